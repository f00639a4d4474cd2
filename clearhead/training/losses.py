"""Cross-entropy over a vocabulary, without ever holding all the logits.

Logits for a batch of 32 x 1,024 tokens and 50,257 words are 6.6 GB in float32, several times the model. Here they exist for a
few thousand tokens at a time; of each such chunk the loss and its gradients are computed at once and the logits are dropped.
The number of products is the same as for the plain loss: nothing is computed twice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

IGNORED = -100  # a target that is not to be predicted
CHUNK_ELEMENTS = {"cpu": 2**26, "cuda": 2**28}  # logits held at a time; each chunk adds to the weight's whole gradient


def cross_entropy(
    x: Float[Tensor, "*n D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "*n"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    smoothing: float = 0.0,
    chunk: int = 0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, ""]]:
    """The sum over all targets of -log p(target), with p = softmax(x W^T + b); what to minimise; and how many are guessed right.

    With `smoothing` e, what to minimise is (1 - e) times that sum plus e times the mean over the vocabulary (section 5.4 of
    the paper); the first value stays the plain one. Gradients flow from the second only. Targets of IGNORED do not count.
    """
    rows = chunk or even_rows(targets.numel(), weight.shape[0], x.device.type)
    # Asked here, since inside the function gradients are off and compilers differ in what they tell.
    wanted = tuple(torch.is_grad_enabled() and y is not None and y.requires_grad for y in (x, weight, bias))
    if not any(wanted):
        x, weight, bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
    device = x.device.type
    if torch.is_autocast_enabled(device):  # the product runs in autocast's type, as F.linear would
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    asked = x.flatten(0, -2), weight, bias, targets.flatten(), smoothing, rows, wanted
    goal, correct, *plain = _CrossEntropy.apply(*asked)  # type: ignore[misc]
    return (plain[0] if smoothing else goal.detach()), goal, correct


def even_rows(n: int, vocab_size: int, device: str) -> int:
    """How many rows a chunk has: as few chunks as may be, of one size."""
    most = max(1, CHUNK_ELEMENTS.get(device, 2**26) // vocab_size)
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
    ) -> tuple[Tensor, ...]:
        exact = torch.promote_types(x.dtype, torch.float32)
        V = len(weight)
        if (
            x.is_cuda and V % 8
        ):  # rows of logits that start at odd places cost several times as much (GPT-2's 50,257 words)
            weight = F.pad(weight, (0, 0, 0, -V % 64))
            bias = None if bias is None else F.pad(bias, (0, -V % 64))
        totals: list[Tensor] = []
        grads_x: list[Tensor] = []
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        # Nothing is written into a tensor twice: torch 2.11's compiler loses what is, where a tensor is saved for backward.
        for start in range(0, max(len(x), 1), rows):
            part, target = x[start : start + rows], targets[start : start + rows]
            logits = F.linear(part, weight, bias)
            *losses, log_sum = chunk_losses(logits[:, :V], target, smoothing)
            totals = losses if not totals else [total + loss for total, loss in zip(totals, losses, strict=True)]
            if any(wanted):
                grad = chunk_gradient(logits, target, smoothing, log_sum, V)
                if wanted[0]:
                    grads_x.append(grad @ weight)
                if wanted[1]:  # sums over chunks keep their precision
                    of_chunk = (grad.T @ part)[:V].to(exact)
                    grad_weight = of_chunk if grad_weight is None else grad_weight + of_chunk
                if bias is not None and wanted[2]:
                    of_chunk = grad[:, :V].sum(0, dtype=exact)
                    grad_bias = of_chunk if grad_bias is None else grad_bias + of_chunk
        grad_x = None if not wanted[0] else grads_x[0] if len(grads_x) == 1 else torch.cat(grads_x)
        plain, smoothed, correct = totals
        ctx.save_for_backward(grad_x, grad_weight, grad_bias)
        ctx.dtype = weight.dtype
        # Without smoothing both losses are one number, and a function does not return one tensor twice.
        return (smoothed, correct, plain) if smoothing else (smoothed, correct)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        return (
            None if x is None else x * grad.to(x.dtype),
            None if weight is None else (weight * grad).to(ctx.dtype),
            None if bias is None else (bias * grad).to(ctx.dtype),
            *(None, None, None, None),
        )


def chunk_losses(
    logits: Float[Tensor, "n V"], targets: Int[Tensor, "n"], smoothing: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, ""], Float[Tensor, "n"]]:
    """Plain loss, smoothed loss, correct guesses, and each row's log of the sum of exponentials."""
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
    if (
        torch.compiler.is_compiling()
    ):  # all of it becomes one pass over the logits; scattering would write them out wide
        columns = torch.arange(logits.shape[1], device=logits.device)
        grad = grad - (1 - smoothing) * (columns == targets[:, None])
        return torch.where(real & (columns < V), grad, 0.0).to(logits.dtype)
    hit = torch.full_like(targets, -1, dtype=grad.dtype) * (1 - smoothing)
    grad = grad.scatter_add_(1, targets.clamp(min=0)[:, None], hit[:, None]).masked_fill_(~real, 0.0)
    grad[:, V:] = 0
    return grad.to(logits.dtype)
