"""Block-sparse attention on the CPU: torch's flash kernel for each strip of queries, with the keys that the strip may look at.

Time follows the tiles kept, forward and backward; memory is that of q, k, v and the result, and of one strip: its keys and its mask
are made anew in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead import limits
from clearhead.kernels.checks import has_forward_gradients, product_dtype
from clearhead.kernels.tiles import Tiles

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Ask = Callable[[slice, Int[Tensor, " s"]], Tensor | None]  # of some queries and keys, by index


@dataclass(frozen=True, eq=False)
class Strip:
    """Some queries, and the runs of keys that they may look at: of the first `n_full` keys all pairs are allowed."""

    rows: slice
    runs: list[slice]
    n_full: int
    allowed: Ask
    added: Ask | None  # to the scores

    def pairs(self, dtype: torch.dtype) -> tuple[Float[Tensor, "_ _ t s"] | None, Bool[Tensor, "_ 1 t 1"] | None]:
        """What is added to the scores, -inf where a pair is forbidden, and the queries without any key; None: nothing, none."""
        keys = torch.cat([torch.arange(run.start, run.stop) for run in self.runs])
        added = None if self.added is None else self.added(self.rows, keys)
        allowed = self.allowed(self.rows, keys[self.n_full :]) if self.n_full < len(keys) else None
        if allowed is None:
            return None if added is None else added.to(dtype), None
        empty = None if self.n_full else ~allowed.any(-1, keepdim=True)
        # A query that may attend to nothing attends to everything, and its result is then zeroed.
        forbidden = ~allowed if empty is None else ~(allowed | empty)
        forbidden = F.pad(forbidden, (self.n_full, 0))
        added = torch.zeros((), dtype=dtype) if added is None else added.to(dtype)
        return added.masked_fill(forbidden, -math.inf), empty


def takes_strips(like: Tensor, S: int) -> bool:
    """Whether `strip_attention` runs for such inputs, and so many keys are enough."""
    return (
        like.device.type == "cpu"
        and limits.SPARSE_KEYS["cpu"] <= S
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not has_forward_gradients()
    )


def make_strips(found: Tiles, T: int, S: int, allowed: Ask, added: Ask | None) -> list[Strip]:
    """The tiles of a mask as strips, for all rows of a batch."""
    some, every, side = found.some.any(0), found.every.all(0), found.side
    strips: list[Strip] = []
    for n, (kept, full) in enumerate(zip(some.tolist(), (some & every).tolist(), strict=True)):
        # The full tiles first: only in the others pairs are asked for. A sum over keys has any order.
        first = _runs(full, S, side)
        runs = first + _runs([k and not f for k, f in zip(kept, full, strict=True)], S, side)
        if runs:
            rows = slice(n * side, min((n + 1) * side, T))
            strips.append(Strip(rows, runs, sum(run.stop - run.start for run in first), allowed, added))
    return strips


def _runs(kept: list[bool], S: int, side: int) -> list[slice]:
    """Neighbouring tiles as one slice of keys."""
    runs: list[slice] = []
    for n, keep in enumerate(kept):
        if keep:
            start = n * side
            if runs and runs[-1].stop == start:
                start = runs.pop().start
            runs.append(slice(start, min((n + 1) * side, S)))
    return runs


def strip_attention(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B K S E"],
    v: Float[Tensor, "B K S E"],
    strips: Sequence[Strip],
    scale: float,
) -> Float[Tensor, "B H T E"]:
    """Strip by strip; queries of no strip get zeros. Gradients flow to q, k and v, not to what `pairs` adds."""
    q, k, v = (x.to(product_dtype(q)) for x in (q, k, v))
    out: Tensor = _Strips.apply(q, k, v, strips, scale)  # pyright: ignore[reportAssignmentType]
    return out


class _Strips(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, strips: Sequence[Strip], scale: float) -> Tensor:
        B, H, T, E = q.shape
        # Token by token in memory, as the output projection reads it.
        out = q.new_zeros(B, T, H, E).transpose(1, 2)
        sums = q.new_zeros(B, k.shape[1], H // k.shape[1], T, dtype=torch.promote_types(q.dtype, torch.float32))
        for strip in strips:
            pairs, empty = strip.pairs(q.dtype)
            one = _fold(q, strip.rows, k)
            part, logsumexp = flash(
                *(one, _gather(k, strip.runs), _gather(v, strip.runs)),
                attn_mask=_fold_pairs(pairs, q, k),
                scale=scale,
            )
            part = _unfold(part, q)
            out[:, :, strip.rows] = part if empty is None else part.masked_fill(empty, 0)
            sums[..., strip.rows] = logsumexp.unflatten(2, (sums.shape[2], -1))
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.strips, ctx.scale = strips, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, sums = ctx.saved_tensors
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros_like(x, dtype=sums.dtype) for x in (k, v))
        for strip in ctx.strips:
            pairs, empty = strip.pairs(q.dtype)
            rows = strip.rows
            part = grad[:, :, rows] if empty is None else grad[:, :, rows].masked_fill(empty, 0)
            strip_dq, strip_dk, strip_dv = flash_backward(
                *(_fold(part, slice(None), k), _fold(q, rows, k), _gather(k, strip.runs), _gather(v, strip.runs)),
                *(_fold(out, rows, k), sums[..., rows].flatten(2), 0.0, False),
                attn_mask=_fold_pairs(pairs, q, k),
                scale=ctx.scale,
            )
            dq[:, :, rows] = _unfold(strip_dq, q)
            at = 0
            for run in strip.runs:
                taken = slice(at, at + run.stop - run.start)
                dk[:, :, run] += strip_dk[:, :, taken]
                dv[:, :, run] += strip_dv[:, :, taken]
                at = taken.stop
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _gather(x: Tensor, runs: Sequence[slice]) -> Tensor:
    return x[:, :, runs[0]] if len(runs) == 1 else torch.cat([x[:, :, run] for run in runs], 2)


def _fold(x: Float[Tensor, "B H T E"], rows: slice, k: Tensor) -> Float[Tensor, "B K gt E"]:
    """Queries that share a key head, one under the other."""
    return x[:, :, rows].unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _unfold(x: Float[Tensor, "B K gt E"], q: Tensor) -> Float[Tensor, "B H t E"]:
    return x.unflatten(2, (q.shape[1] // x.shape[1], -1)).flatten(1, 2)


def _fold_pairs(pairs: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    group = q.shape[1] // k.shape[1]
    if pairs is None or group == 1:
        return pairs
    return pairs.repeat(1, 1, group, 1) if pairs.shape[1] == 1 else _fold(pairs, slice(None), k)
