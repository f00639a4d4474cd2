"""Cross-entropy over a vocabulary, without holding all logits at once.

Logits for a batch of 32 x 1,024 tokens and 50,257 words are 6.6 GB in float32, several times the model. Here they are computed
for a few thousand tokens at a time, with the loss and its gradients, and then dropped. No product is computed twice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.kernels import float8
from clearhead.kernels.checks import has_triton
from clearhead.limits import LOSS_CHUNK

IGNORED = -100  # a target that is not to be predicted
HAS_TRITON = has_triton()  # a constant: torch.compile can not trace the call
SCALE = 2.0**15  # brings the gradient of a softmax, at most 1, near the largest number of e5m2


def cross_entropy(
    x: Float[Tensor, "*n D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "*n"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    smoothing: float = 0.0,
    chunk: int = 0,
    eight: bool = False,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, ""]]:
    """Returns the loss, the sum over all targets of -log p(target), with p = softmax(x W^T + b); the loss with label smoothing,
    which is to be minimised; and the number of targets that are the likeliest token.

    With `smoothing` e, the second is (1 - e) times the first plus e times the mean of -log p over the vocabulary (section 5.4
    of the paper). Gradients come from the second only. Targets of IGNORED do not count. With `eight`, products are in fp8.
    """
    rows = chunk or even_rows(targets.numel(), weight.shape[0], x.device.type)
    if eight:
        rows = -(-rows // 16) * 16
    # Read here: inside an autograd.Function gradients are off, and compilers differ in what requires_grad says there.
    wanted = tuple(torch.is_grad_enabled() and y is not None and y.requires_grad for y in (x, weight, bias))
    if not any(wanted):
        x, weight, bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
    device = x.device.type
    if torch.is_autocast_enabled(device):  # the product runs in autocast's type, as F.linear would
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    asked = x.flatten(0, -2), weight, bias, targets.flatten(), smoothing, rows, wanted, eight
    goal, correct, *plain = _CrossEntropy.apply(*asked)  # type: ignore[misc]
    return (plain[0] if smoothing else goal.detach()), goal, correct


def even_rows(n: int, vocab_size: int, device: str) -> int:
    """The rows of a chunk: as few chunks as possible, of equal size."""
    most = max(1, LOSS_CHUNK.get(device, 2**26) // vocab_size)
    return max(1, math.ceil(n / math.ceil(n / most))) if n else 1


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        smoothing: float,
        rows: int,
        wanted: tuple[bool, bool, bool],
        eight: bool,
    ) -> tuple[Tensor, ...]:
        exact = torch.promote_types(x.dtype, torch.float32)
        V = len(weight)
        # Rows of logits that are not aligned cost several times as much (GPT-2's vocabulary of 50,257).
        if (x.is_cuda or eight) and V % 16:
            weight = F.pad(weight, (0, 0, 0, -V % 64))
            bias = None if bias is None else F.pad(bias, (0, -V % 64))
        rounded = Rounded(x, weight) if eight and wanted[0] and wanted[1] else None
        totals: list[Tensor] = []
        grads_x: list[Tensor] = []
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        # Sums are not in place: torch 2.11's compiler loses writes to a tensor that is saved for the backward pass.
        for start in range(0, max(len(x), 1), rows):
            part, target = x[start : start + rows], targets[start : start + rows]
            logits = F.linear(part, weight, bias) if rounded is None else rounded.logits(start, len(part), bias)
            *losses, log_sum, grad = on_chunk(logits, target, smoothing, V, wanted=any(wanted) and rounded is None)
            totals = losses if not totals else [total + loss for total, loss in zip(totals, losses, strict=True)]
            if rounded is not None:
                grad, grad_t = row_gradients(logits, target, log_sum, smoothing, V)
                of_x, of_weight = rounded.gradients(start, grad, grad_t)
                of_bias = grad_t.float().sum(1) / SCALE if bias is not None and wanted[2] else None
            elif grad is not None:
                of_x, of_weight = grad @ weight if wanted[0] else None, grad.T @ part if wanted[1] else None
                of_bias = grad.sum(0, dtype=exact) if bias is not None and wanted[2] else None
            else:
                continue
            if of_x is not None:
                grads_x.append(of_x)
            if of_weight is not None:  # summed over chunks in float32
                of_weight = of_weight[:V].to(exact)
                grad_weight = of_weight if grad_weight is None else grad_weight + of_weight
            if of_bias is not None:
                grad_bias = of_bias[:V] if grad_bias is None else grad_bias + of_bias[:V]
        grad_x = None if not wanted[0] else grads_x[0] if len(grads_x) == 1 else torch.cat(grads_x)
        plain, smoothed, correct = totals
        ctx.save_for_backward(grad_x, grad_weight, grad_bias)
        ctx.dtype = weight.dtype
        # Without smoothing both losses are the same tensor, which must not be returned twice.
        return (smoothed, correct, plain) if smoothing else (smoothed, correct)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        return (
            None if x is None else x * grad.to(x.dtype),
            None if weight is None else (weight * grad).to(ctx.dtype),
            None if bias is None else (bias * grad).to(ctx.dtype),
            *(None, None, None, None, None),
        )


class Rounded:
    """x and the weight in fp8, each also transposed; each is scaled by its own largest number."""

    def __init__(self, x: Float[Tensor, "n D"], weight: Float[Tensor, "W D"]) -> None:
        self.back_x, self.x, self.x_t = self._round(x)
        self.back_weight, self.weight, self.weight_t = self._round(weight)
        self.back = torch.full_like(self.back_x, 1 / SCALE)

    def _round(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        largest = x.abs().amax().float()
        top = torch.finfo(float8.FORWARD).max
        return largest / top, *float8.cast8([x], None, "", top / largest, torch.zeros_like(largest), float8.FORWARD)

    def logits(self, start: int, n: int, bias: Tensor | None) -> Tensor:
        return float8.multiply(self.x[start : start + n], self.weight, self.back_x, self.back_weight, bias)

    def gradients(self, start: int, grad: Tensor, grad_t: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and of the weight. `grad_t` is the transposed `grad`; it may end in zeros, as `x_t` does.

        Summed exactly: most of a gradient are small probabilities, which sums of 14 bits would lose beside a target's 1.
        """
        of_x = float8.multiply(grad, self.weight_t, self.back, self.back_weight, exact=True)
        part = self.x_t[:, start : start + grad_t.shape[1]]
        return of_x, float8.multiply(grad_t, part, self.back, self.back_x, exact=True)


def on_chunk(
    logits: Float[Tensor, "n W"], targets: Int[Tensor, "n"], smoothing: float, V: int, *, wanted: bool
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, ""], Float[Tensor, " n"], Float[Tensor, "n W"] | None]:
    """Loss, smoothed loss, number of correct rows, each row's log-sum-exp, and the gradient if it is wanted; over V columns."""
    if logits.is_cuda and HAS_TRITON and logits.dtype != torch.float64:
        rows, grad = row_losses(logits, targets, smoothing, V, wanted)
        plain = rows[0].sum()  # sums one by one: views of one result confuse torch 2.11's compiler
        smoothed = (1 - smoothing) * plain + smoothing * rows[1].sum() if smoothing else plain
        return plain, smoothed, rows[2].sum().long(), rows[3], grad if wanted else None
    plain, smoothed, correct, log_sum = chunk_losses(logits[:, :V], targets, smoothing)
    grad = chunk_gradient(logits, targets, smoothing, log_sum, V) if wanted else None
    return plain, smoothed, correct, log_sum, grad


@torch.library.custom_op(
    "clearhead::row_losses",
    mutates_args=(),
    schema="(Tensor logits, Tensor targets, float smoothing, int V, bool wanted) -> (Tensor, Tensor)",
)
def row_losses(logits: Tensor, targets: Tensor, smoothing: float, V: int, wanted: bool) -> tuple[Tensor, Tensor]:
    """See gpu/cross_entropy.py: losses. A compiler takes it as it is."""
    from clearhead.kernels.gpu import cross_entropy as gpu

    return gpu.losses(logits, targets, smoothing, V, IGNORED, wanted=wanted)


@row_losses.register_fake
def _(logits: Tensor, targets: Tensor, smoothing: float, V: int, wanted: bool) -> tuple[Tensor, Tensor]:
    rows = logits.new_empty(4, len(logits), dtype=torch.float32)
    return rows, torch.empty_like(logits) if wanted else logits.new_empty(0)


@torch.library.custom_op(
    "clearhead::row_gradients",
    mutates_args=(),
    schema="(Tensor logits, Tensor targets, Tensor log_sum, float smoothing, int V) -> (Tensor, Tensor)",
)
def row_gradients(logits: Tensor, targets: Tensor, log_sum: Tensor, smoothing: float, V: int) -> tuple[Tensor, Tensor]:
    """See gpu/cross_entropy.py: gradient8."""
    from clearhead.kernels.gpu import cross_entropy as gpu

    return gpu.gradient8(logits, targets, log_sum, smoothing, V, IGNORED, SCALE)


@row_gradients.register_fake
def _(logits: Tensor, targets: Tensor, log_sum: Tensor, smoothing: float, V: int) -> tuple[Tensor, Tensor]:
    n, W = logits.shape
    return logits.new_empty(n, W, dtype=float8.BACKWARD), logits.new_empty(W, -(-n // 16) * 16, dtype=float8.BACKWARD)


def chunk_losses(
    logits: Float[Tensor, "n V"], targets: Int[Tensor, "n"], smoothing: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, ""], Float[Tensor, "n"]]:
    """Loss, smoothed loss, number of correct rows, and each row's log-sum-exp."""
    # bfloat16 keeps 8 significant bits: too few for a log-sum-exp over the vocabulary.
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    real = targets != IGNORED
    log_sum = exact.logsumexp(-1)
    chosen = exact.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    plain = (log_sum - chosen).masked_fill(~real, 0.0).sum()
    smoothed = plain
    if smoothing:
        spread = (log_sum - exact.mean(-1)).masked_fill(~real, 0.0).sum()
        smoothed = (1 - smoothing) * plain + smoothing * spread
    correct = ((exact.argmax(-1) == targets) & real).sum()
    return plain, smoothed, correct, log_sum


def chunk_gradient(
    logits: Float[Tensor, "n W"], targets: Int[Tensor, "n"], smoothing: float, log_sum: Float[Tensor, "n"], V: int
) -> Float[Tensor, "n W"]:
    """d smoothed / d logits = softmax - (1 - e) onehot(target) - e / V, in the logits' type; zero for columns past V."""
    real: Bool[Tensor, "n 1"] = (targets != IGNORED)[:, None]
    grad = torch.exp(logits.to(log_sum.dtype) - log_sum[:, None])
    if smoothing:
        grad = grad - smoothing / V
    if torch.compiler.is_compiling():  # fused into one pass over the logits; scatter_add_ would need them in float32
        columns = torch.arange(logits.shape[1], device=logits.device)
        grad = grad - (1 - smoothing) * (columns == targets[:, None])
        return torch.where(real & (columns < V), grad, 0.0).to(logits.dtype)
    hit = torch.full_like(targets, -1, dtype=grad.dtype) * (1 - smoothing)
    grad = grad.scatter_add_(1, targets.clamp(min=0)[:, None], hit[:, None]).masked_fill_(~real, 0.0)
    grad[:, V:] = 0
    return grad.to(logits.dtype)
