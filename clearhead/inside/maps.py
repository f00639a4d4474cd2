"""Attention as pictures are drawn from it: small ones of every head with its scores, and one head's, no larger than asked for.

Weights are computed in strips of rows, and only what is drawn is kept: of a layer, size x size bytes a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from clearhead.inside.heads import HeadScore, Tally, strips
from clearhead.inside.pictures import pool
from clearhead.inside.probe import Seen


def survey(
    seen: Seen,
    site: str,
    *,
    size: int = 32,
    ids: Int[Tensor, "1 _"] | None = None,
    aligned: Bool[Tensor, "1 T S"] | None = None,
    real: Bool[Tensor, "1 _"] | None = None,
    batch: int = 0,
) -> tuple[UInt8[np.ndarray, "H n n"], list[HeadScore]]:
    """Every head of a site (".weights") as size x size bytes, 255 times the root of a weight; and what each head did.

    The largest weight of each cell is shown, so that a head that looks at single tokens is seen; a short text's cells repeat.
    """
    is_cross = site.endswith(".cross.weights")
    S = seen.looks[site.removesuffix(".weights")].k.shape[2]
    tally = Tally(None if is_cross else ids, None if is_cross else real, aligned if is_cross else None)
    narrow: list[Tensor] = []
    for start, weights in strips(seen, site):
        one = weights[batch : batch + 1].float()
        tally.add(start, one, is_cross)
        narrow.append(_narrow(one[0], S, size))  # the largest of a cell: columns first, then rows
    drawn = F.adaptive_max_pool2d(torch.cat(narrow, 1), (size, size))
    return (drawn.clamp(0, 1).sqrt() * 255).round().to(torch.uint8).cpu().numpy(), list(tally.scores(site))


def _narrow(weights: Float[Tensor, "H t s"], S: int, size: int) -> Float[Tensor, "H t n"]:
    """The largest weight in each of `size` parts of S columns, of which the first s are there and the others nothing."""
    found = torch.zeros(*weights.shape[:2], size, dtype=weights.dtype, device=weights.device)
    for part in range(size):
        columns = weights[..., part * S // size : -(-(part + 1) * S // size)]
        if columns.shape[-1]:
            found[..., part] = columns.amax(-1)
    return found


@dataclass(frozen=True)
class HeadMap:
    """One head's weights in a box of rows and columns, each cell the largest of `pooled` rows by columns."""

    T: int
    S: int
    box: tuple[int, int, int, int]
    pooled: tuple[int, int]
    weights: Float[Tensor, "t s"]
    row_max: Float[Tensor, " rows"]  # of each row of the box, over all columns


def head_map(
    seen: Seen, site: str, head: int, box: tuple[int, int, int, int] | None = None, *, most: int = 256, batch: int = 0
) -> HeadMap:
    """One head (of ".weights") at most `most` cells high and wide. The box is first row, end, first column, end; None: all."""
    look = seen.looks[site.removesuffix(".weights")]
    T, S = look.q.shape[2], look.k.shape[2]
    top, bottom, left, right = box or (0, T, 0, S)
    whole = seen.rows(site, slice(top, bottom), head=head)[batch, 0].float()
    tall, wide = math.ceil((bottom - top) / most), math.ceil((right - left) / most)
    drawn = pool(whole[:, left:right], tall, wide).cpu()
    return HeadMap(T, S, (top, bottom, left, right), (tall, wide), drawn, whole.amax(1).cpu())
