"""The heads panel: `grid` (every head of a layer in small), `map` (one head) and `row` (one row of one head).

Weights are computed in strips of rows, and only what is drawn is kept: for a layer, size x size bytes per head.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from clearhead.errors import InputError
from clearhead.explorer.fields import Fields
from clearhead.explorer.forward_passes import Begun, ForwardPasses, Steps
from clearhead.explorer.wire_format import pack
from clearhead.inside.ablation_sweep import n_heads_of
from clearhead.inside.head_scores import HeadScore, HeadScoreSums, strips
from clearhead.inside.heatmap import max_pool
from clearhead.inside.probe import Seen

MAX_CELLS = 1024  # of a map, on a side
# The fields of HeadScore that the page shows.
SCORES = ("head", "previous", "first", "induction", "entropy", "alignment")

Box = tuple[int, int, int, int]  # first row, end, first column, end


def grid(passes: ForwardPasses, fields: Fields) -> Steps[bytes]:
    """Every head of a layer as a thumbnail, with its scores. Later layers need not be computed yet."""
    run = passes.parse(fields)
    group = fields.text("attention", "attention" if "attention" in passes.groups() else "encoder")
    sites = passes.group(group)
    layer, size = fields.integer("layer", 0, len(sites) - 1), fields.integer("size", 4, 128, 32)
    site = sites[layer]
    begun = yield from passes.until(run, site)
    ids, aligned = passes.score_inputs(begun, site)
    real = begun.source.real if not site.startswith("decoder.") else None
    return pack_grid(begun.seen, site, size=size, ids=ids, aligned=aligned, real=real)


def head_map(passes: ForwardPasses, fields: Fields) -> Steps[bytes]:
    """One head's weights, all or those in a box, in at most `most` x `most` cells."""
    begun, site, head = yield from _head(passes, fields)
    attention = begun.seen.attention[site]
    T, S = attention.q.shape[2], attention.k.shape[2]
    box: Box | None = None
    if fields.has("box"):
        given = fields.integers("box", 0, max(T, S), 4)
        if len(given) != 4 or not (0 <= given[0] < given[1] <= T and 0 <= given[2] < given[3] <= S):
            raise InputError(
                f"box is [row, end, column, end] within {T} rows and {S} columns; got {given}; null is all"
            )
        box = (given[0], given[1], given[2], given[3])
    return pack_map(begun.seen, site, head, box, most=fields.integer("most", 8, MAX_CELLS, 256))


def row(passes: ForwardPasses, fields: Fields) -> Steps[bytes]:
    """One row of one head, not pooled."""
    begun, site, head = yield from _head(passes, fields)
    T = begun.seen.attention[site].q.shape[2]
    weights = begun.seen.rows(f"{site}.weights", fields.integer("row", 0, T - 1), head=head)
    return pack({"site": site, "head": head}, weights=weights[0, 0, 0].float().cpu().numpy())


def _head(passes: ForwardPasses, fields: Fields) -> Steps[tuple[Begun, str, int]]:
    run, site = passes.parse(fields), fields.choice("site", list(passes.attentions))
    head = fields.integer("head", 0, n_heads_of(passes.attentions[site]) - 1)
    return (yield from passes.until(run, site)), site, head


def pack_grid(
    seen: Seen,
    site: str,
    *,
    size: int = 32,
    ids: Int[Tensor, "1 _"] | None = None,
    aligned: Bool[Tensor, "1 T S"] | None = None,
    real: Bool[Tensor, "1 _"] | None = None,
    batch: int = 0,
) -> bytes:
    """The answer to `grid`, from what a probe saw of an attention. The options are those of `head_scores`."""
    thumbnails, scores = survey(seen, f"{site}.weights", size=size, ids=ids, aligned=aligned, real=real, batch=batch)
    shown = [{kind: getattr(score, kind) for kind in SCORES} for score in scores]
    return pack({"site": site, "scores": shown}, thumbs=thumbnails)


def pack_map(seen: Seen, site: str, head: int, box: Box | None = None, *, most: int = 256, batch: int = 0) -> bytes:
    """The answer to `map`, from what a probe saw of an attention: each cell is the largest of `pooled` rows x columns."""
    attention = seen.attention[site]
    T, S = attention.q.shape[2], attention.k.shape[2]
    top, bottom, left, right = box or (0, T, 0, S)
    whole = seen.rows(f"{site}.weights", slice(top, bottom), head=head)[batch, 0].float()
    tall, wide = math.ceil((bottom - top) / most), math.ceil((right - left) / most)
    cells = max_pool(whole[:, left:right], tall, wide).cpu()
    answer = {"T": T, "S": S, "box": (top, bottom, left, right), "pooled": (tall, wide)}
    return pack(answer, map=cells.numpy(), rowmax=whole.amax(1).cpu().numpy())


def survey(
    seen: Seen,
    site: str,
    *,
    size: int,
    ids: Int[Tensor, "1 _"] | None,
    aligned: Bool[Tensor, "1 T S"] | None,
    real: Bool[Tensor, "1 _"] | None,
    batch: int,
) -> tuple[UInt8[np.ndarray, "H n n"], list[HeadScore]]:
    """Every head of a site (".weights") as size x size bytes, 255 sqrt(weight), and its scores; one pass over the weights.

    A cell shows its largest weight, so that attention to single tokens stays visible. A short text's cells repeat.
    """
    is_cross = site.endswith(".cross.weights")
    S = seen.attention[site.removesuffix(".weights")].k.shape[2]
    sums = HeadScoreSums(None if is_cross else ids, None if is_cross else real, aligned if is_cross else None)
    pooled: list[Tensor] = []
    for start, weights in strips(seen, site):
        one = weights[batch : batch + 1].float()
        sums.add(start, one, is_cross)
        pooled.append(_pool_columns(one[0], S, size))  # columns first, rows below
    cells = F.adaptive_max_pool2d(torch.cat(pooled, 1), (size, size))
    return (cells.clamp(0, 1).sqrt() * 255).round().to(torch.uint8).cpu().numpy(), list(sums.scores(site))


def _pool_columns(weights: Float[Tensor, "H t s"], S: int, size: int) -> Float[Tensor, "H t n"]:
    """The largest weight in each of `size` ranges of S columns. Columns from s on are not given and count as 0."""
    found = torch.zeros(*weights.shape[:2], size, dtype=weights.dtype, device=weights.device)
    for part in range(size):
        columns = weights[..., part * S // size : -(-(part + 1) * S // size)]
        if columns.shape[-1]:
            found[..., part] = columns.amax(-1)
    return found
