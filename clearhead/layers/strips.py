"""Fused attention in strips of queries, each with only the keys it can reach: memory grows with T, not with T^2."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead.layers.masks import ALL, Mask, lower_pairs
from clearhead.layers.positions import Bias, DistanceBias
from clearhead.limits import WRITTEN_OUT, is_narrow

Fused = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]  # of q, k, v, pairs, empty
Shared = dict[tuple[int, int, int], tuple[Tensor | None, Tensor | None]]  # by offset, rows and columns of a strip


def pays(mask: Mask, bias: Bias | None, T: int, S: int) -> bool:
    """Whether the pairs are too many to be written out, or a narrow window leaves out most keys."""
    return _is_narrow(mask, S) or n_pairs(mask, bias, T, S) > WRITTEN_OUT


def n_pairs(mask: Mask, bias: Bias | None, T: int, S: int) -> int:
    """How many numbers the mask and the bias have when written out."""
    rows = T if bias is not None or mask.causal or mask.window or mask.documents or len(mask.patterns) else 1
    heads = 1 if bias is None else bias.n_heads if isinstance(bias, DistanceBias) else bias.shape[1]
    return (mask.batch or 1) * heads * rows * S


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None, fused: Fused) -> Tensor:
    """`fused` for each strip, one under the other."""
    T, S = q.shape[2], k.shape[2]
    narrow = _is_narrow(mask, S)
    step = max(mask.window, 64) if narrow else max(64, WRITTEN_OUT * T // (2 * n_pairs(mask, bias, T, S)))
    # The backward pass would keep every strip's mask, T^2 in all, so wide strips are computed again instead.
    again = torch.is_grad_enabled() and not narrow
    # Narrow strips are alike but for the first and the last: one mask serves all that are.
    alike = narrow and len(mask.documents) == 0 and not (len(mask.patterns) or isinstance(bias, Tensor))
    shared: Shared | None = {} if alike else None
    strips: list[Tensor] = []
    for start in range(0, T, step):
        rows = slice(start, min(start + step, T))
        strip = functools.partial(
            _strip, mask=mask, bias=bias, fused=fused, rows=rows, cols=_reach(mask, rows, T, S), shared=shared
        )
        strips.append(checkpoint(strip, q, k, v, use_reentrant=False) if again else strip(q, k, v))
    return torch.cat(strips, 2)


def _strip(
    *qkv: Tensor, mask: Mask, bias: Bias | None, fused: Fused, rows: slice, cols: slice, shared: Shared | None
) -> Tensor:
    q, k, v = qkv
    T, S = q.shape[2], k.shape[2]
    alike = (0, 0, 0) if shared is None else (rows.start - cols.start, rows.stop - rows.start, cols.stop - cols.start)
    if shared is not None and alike in shared:
        pairs, empty = shared[alike]
    else:
        pairs, empty = lower_pairs(mask, bias, T, S, rows, cols, q.device)
        if shared is not None:
            if pairs is not None and pairs.dtype == torch.bool:  # the kernel would do this anew for each strip
                pairs = torch.zeros_like(pairs, dtype=q.dtype).masked_fill(~pairs, float("-inf"))
            shared[alike] = pairs, empty
    return fused(q[:, :, rows], k[:, :, cols], v[:, :, cols], pairs, empty)


def _is_narrow(mask: Mask, S: int) -> bool:
    return mask.is_ordered and is_narrow(mask.window, S)


def _reach(mask: Mask, rows: slice, T: int, S: int) -> slice:
    """The keys that these queries could attend to, by index."""
    if not mask.is_ordered:
        return ALL
    first, last = rows.start + S - T, rows.stop - 1 + S - T
    low = max(0, first - mask.window + 1) if mask.window else 0
    high = last + 1 if mask.causal else last + mask.window if mask.window else S
    return slice(low, max(min(high, S), low + 1))
