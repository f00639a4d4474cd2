"""Optimizers: AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest.

Their state is named by parameter, so that a checkpoint is one flat table of tensors.
"""

# torch has no other names for its operations on lists of tensors.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead import kernels
from clearhead.layers.linear import FusedLinear
from clearhead.training.distributed import gather, is_sharded
from clearhead.training.recipe import Train

Quintic = tuple[float, float, float]  # a, b, c of a x + b x^3 + c x^5
# Muon's iterations, a quintic for each step. `quintic`: one that pulls singular values towards 1, steep at 0 rather than exact at 1
# (Jordan et al. 2024, as torch.optim.Muon). `polar`: each step has the quintic that is nearest to 1, over the interval in which
# singular values from 0.001 to 1 are at that step (Amsel et al. 2025, algorithm 1); but for the last, with room for 1% of rounding.
# A test computes these numbers.
ITERATIONS: dict[str, list[Quintic]] = {
    "quintic": [(3.4445, -4.7750, 2.0315)] * 5,
    "polar": [
        (8.205160414005567, -22.901934987056027, 16.4607249101803),
        (4.0663951599427755, -2.861154086755144, 0.5183995226694745),
        (3.909594904437908, -2.8233517350395103, 0.5250369769390012),
        (3.285564017198617, -2.415301959635948, 0.4852940655279093),
        (2.3006520199548186, -1.66890398457475, 0.4188073119525671),
    ],
}
EPSILON = 1e-7


class Optimizers:
    """AdamW, and Muon if the recipe asks for it, behind one interface. `record`: the step will be a CUDA graph."""

    def __init__(self, model: nn.Module, train: Train, *, lr: float, record: bool = False) -> None:
        matrices, decayed, plain = sort_parameters(model, muon=train.optimizer == "muon")
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.all: list[torch.optim.Optimizer] = []
        self.record = record
        cautious = train.weight_decay if train.cautious_decay else 0.0
        groups = [
            dict(params=decayed, weight_decay=train.weight_decay - cautious, cautious_decay=cautious, max_lr=lr),
            dict(params=plain, weight_decay=0.0, cautious_decay=0.0, max_lr=lr),
        ]
        groups = [group for group in groups if group["params"]]
        if groups:
            sharded = any(map(is_sharded, self.names))
            self.all.append(
                torch.optim.AdamW(groups, lr=lr, betas=train.betas, fused=not sharded, capturable=record)  # type: ignore[arg-type]
            )
        if matrices:
            muon = dict(params=matrices, weight_decay=train.weight_decay - cautious, cautious_decay=cautious)
            self.all.append(
                Muon(
                    [muon | dict(max_lr=train.muon_lr)],
                    lr=train.muon_lr,
                    momentum=train.momentum,
                    beta2=train.muon_beta2,
                    iteration=train.muon_iteration,
                    parts=parts_of(model),
                )
            )
        self._fill()
        if record:  # a CUDA graph reads its learning rates from memory; Python numbers would be fixed in it
            for optimizer in self.all:
                for group in optimizer.param_groups:
                    group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)

    def _fill(self) -> None:
        """Make all state now, so that a checkpoint can be read into it before the first step."""
        for optimizer, parameter in self._each():
            state = optimizer.state[parameter]
            if isinstance(optimizer, Muon):
                state["momentum"] = torch.zeros_like(parameter)
                if optimizer.beta2:  # whole on every process, as the step is
                    state["row_squares"] = torch.zeros(
                        len(parameter),
                        device=parameter.device,
                        dtype=torch.promote_types(parameter.dtype, torch.float32),
                    )
            else:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)

    def _each(self) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter]]:
        for optimizer in self.all:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield optimizer, parameter

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, by name: moments and step counts. Learning rates follow from the step."""
        return {
            f"{self.names[parameter]}.{name}": value
            for optimizer, parameter in self._each()
            for name, value in optimizer.state[parameter].items()
        }

    def scale(self, share: float) -> None:
        """Set every learning rate to this share of its highest value."""
        for optimizer in self.all:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(group["max_lr"] * share)
                else:
                    group["lr"] = group["max_lr"] * share

    def step(self, skip: Tensor | None = None) -> None:
        """One update. Where `skip` is True on the device, nothing changes."""
        for optimizer in self.all:
            if skip is not None and isinstance(optimizer, Muon):
                optimizer.skip = skip
            elif skip is not None and optimizer.defaults["fused"]:
                optimizer.found_inf = skip.float()  # type: ignore[attr-defined]  # what torch's GradScaler tells it by
            elif skip is not None and bool(skip):  # shards: processes wait for each other anyway
                continue
            if isinstance(optimizer, torch.optim.AdamW):
                for group in optimizer.param_groups:
                    decay_adamw(group, optimizer.state, skip)
            optimizer.step()

    def zero_grad(self) -> None:
        """For a CUDA graph gradients are set to zero in place: it adds to the same memory at each replay."""
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=not self.record)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._each()]


@torch.no_grad()
def decay_adamw(
    group: dict[str, Any], state: Mapping[Tensor, Mapping[str, Tensor]], skip: Tensor | None = None
) -> None:
    """Cautious weight decay before AdamW's step, whose sign is that of its next first moment. Where `skip` is True, none."""
    parameters = [p for p in group["params"] if p.grad is not None]
    if not group["cautious_decay"] or not parameters:
        return
    rate = group["lr"] * group["cautious_decay"]
    if skip is not None:
        rate = rate * (~skip).to(parameters[0].dtype)
    moments, grads = [state[p]["exp_avg"] for p in parameters], [p.grad for p in parameters]
    decay(parameters, torch._foreach_lerp(moments, grads, 1 - group["betas"][0]), rate)


def decay(parameters: Sequence[Tensor], steps: Sequence[Tensor], rate: float | Tensor) -> None:
    """w <- w - rate [w u >= 0] w: decay only where the step w - u goes towards zero, too (Chen et al. 2025)."""
    for parameter, step in zip(parameters, steps, strict=True):
        parameter.mul_(1 - rate * (parameter * step >= 0).to(parameter.dtype))


def sort_parameters(
    model: nn.Module, *, muon: bool
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Three groups: matrices for Muon, other parameters with weight decay (matrices, embeddings), those without (norms, biases)."""
    matrices: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2:
            plain.append(parameter)
        # Not for embeddings and heads: their rows are independent words.
        elif muon and parameter.ndim == 2 and "blocks." in name:
            matrices.append(parameter)
        else:
            decayed.append(parameter)
    return matrices, decayed, plain


def parts_of(model: nn.Module) -> dict[nn.Parameter, list[int]]:
    """The numbers of rows of the matrices inside each fused one: q, k and v are made orthogonal one by one."""
    fused = (module for module in model.modules() if isinstance(module, FusedLinear))
    return {module.weight: list(module.parts.values()) for module in fused}


class Muon(torch.optim.Optimizer):
    """The step is the momentum made orthogonal (Jordan et al. 2024): all directions of a matrix learn at the same rate.

    As torch.optim.Muon, with three differences: matrices of one shape are iterated together, in one batched product; on a CPU,
    where bfloat16 is slow, the iteration runs in float32; fused matrices are split first, and sharded ones gathered.

    `beta2` is NorMuon's (Li et al. 2025): each row of the orthogonal O, that is each neuron, is divided by the root of the running
    mean of its squares, v <- beta2 v + (1 - beta2) mean(O O, of a row). The step keeps the Frobenius norm of O.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        momentum: float = 0.95,
        beta2: float = 0.0,
        iteration: str = "quintic",
        parts: dict[nn.Parameter, list[int]] | None = None,
    ) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=0.0, cautious_decay=0.0))
        self.beta2, self.iteration, self.parts = beta2, iteration, parts or {}
        self.skip: Tensor | None = None  # if True, the next step changes nothing

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "Muon takes one gradient a step"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            grads: list[Tensor] = [p.grad for p in parameters]
            moments: list[Tensor] = [self.state[p]["momentum"] for p in parameters]
            lr = group["lr"]
            if self.skip is not None:  # the moments move towards themselves, and the weights by 0
                skip = self.skip.to(grads[0].device)
                grads = [torch.where(skip, moment, grad) for moment, grad in zip(moments, grads, strict=True)]
                lr = lr * kernels.to_float64(~skip)
            torch._foreach_lerp_(moments, grads, 1 - group["momentum"])
            torch._foreach_lerp_(grads, moments, group["momentum"])  # Nesterov momentum
            steps = self._orthogonal(parameters, grads)
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
            if group["cautious_decay"]:
                decay(parameters, steps, lr * group["cautious_decay"])
            torch._foreach_mul_(steps, lr)
            torch._foreach_sub_(parameters, steps)

    def _orthogonal(self, parameters: list[nn.Parameter], grads: list[Tensor]) -> list[Tensor]:
        gathered = [gather(grad) for grad in grads]
        pieces = [
            list(grad.split(self.parts.get(p, [len(grad)]))) for p, grad in zip(parameters, gathered, strict=True)
        ]
        by_shape: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for i, split in enumerate(pieces):
            for j, piece in enumerate(split):
                rows, cols = piece.shape
                by_shape[min(rows, cols), max(rows, cols)].append((i, j))
        for places in by_shape.values():
            wide = [
                pieces[i][j] if pieces[i][j].shape[0] <= pieces[i][j].shape[1] else pieces[i][j].T for i, j in places
            ]
            for (i, j), result in zip(
                places, orthogonalise(torch.stack(wide), ITERATIONS[self.iteration]), strict=True
            ):
                rows, cols = pieces[i][j].shape
                # A tall matrix has fewer directions than rows: its step is scaled to the size of a square one's.
                pieces[i][j] = (result if rows <= cols else result.T) * math.sqrt(max(1.0, rows / cols))
        if self.beta2:
            for p, split in zip(parameters, pieces, strict=True):
                squares = self.state[p]["row_squares"].split([len(piece) for piece in split])
                split[:] = [self._even_rows(piece, mean) for piece, mean in zip(split, squares, strict=True)]
        joined = [torch.cat(split).to(grad.dtype) for split, grad in zip(pieces, gathered, strict=True)]
        return [_shard(step, p) for step, p in zip(joined, parameters, strict=True)]

    def _even_rows(self, step: Tensor, mean: Tensor) -> Tensor:
        """The step with each row divided by its running root mean square, which moves, too; its norm stays."""
        new = mean.lerp(step.square().mean(1).to(mean.dtype), 1 - self.beta2)
        if self.skip is not None:
            new = torch.where(self.skip.to(mean.device), mean, new)
        mean.copy_(new)
        even = step / (mean.sqrt() + EPSILON)[:, None]
        return even * (step.norm() / even.norm().clamp(min=EPSILON))


def _shard(step: Tensor, like: Tensor) -> Tensor:
    """This process's part of a step that all processes have computed."""
    if not is_sharded(like):
        return step
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(step, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


def orthogonalise(x: Tensor, iteration: list[Quintic] | None = None) -> Tensor:
    """About U V^T for each matrix U S V^T of a batch: its singular values become about 0.7 to 1.2, by `polar` 0.85 to 1.13."""
    out = x if x.device.type == "cpu" else x.bfloat16()
    out = out / out.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for a, b, c in iteration or ITERATIONS["quintic"]:
        gram = out @ out.mT
        out = torch.baddbmm(out, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), out, beta=a)
    return out.to(x.dtype)
