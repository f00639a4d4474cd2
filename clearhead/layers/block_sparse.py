"""Block-sparse attention: from a mask to the tiles of the score matrix that a kernel skips, and what it asks in the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from clearhead import kernels
from clearhead.layers.masks import ABSENT, Mask, bias_of
from clearhead.layers.positions import Bias


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, blocks: BlockMask | None, bias: Bias | None, scale: float
) -> Tensor:
    """Attention that skips the tiles a mask forbids, by torch's flex_attention."""
    T, S = q.shape[2], k.shape[2]
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *_learned(bias)))
    blocks = blocks or block_mask(mask, T, S, q.device)
    score_mod = _score_mod(mask, bias, T, S, q.device)
    return kernels.block_sparse_attention(q, k, v, blocks, score_mod, scale, needs_grad=needs_grad)


def strips(mask: Mask, bias: Bias | None, T: int, S: int, like: Tensor) -> list[kernels.Strip] | None:
    """What a pattern leaves, as strips of queries with the keys of each; None where there is none, or that does not run."""
    if not (len(mask.patterns) and kernels.takes_strips(like, S)) or (torch.is_grad_enabled() and _learned(bias)):
        return None
    found = tiles(mask, T, S, like.device, kernels.strip_side(mask.patterns))
    added = None if bias is None else lambda rows, cols: bias_of(bias, mask, T, S, rows, cols, like.device)
    return kernels.make_strips(found, T, S, lambda rows, cols: mask.allowed(T, S, rows, cols, like.device), added)


def block_mask(mask: Mask, T: int, S: int, device: torch.device) -> BlockMask:
    """What a mask leaves, as flex_attention takes it."""
    position, documents = _pair_of(*mask.positions(T, S, device), in_order=mask.is_ordered), mask.numbers(T, S)
    place = _pair_of(*mask.places(T, S, device), in_order=mask.is_ordered and not documents)
    rules = [kernels.pair_rule(p, max(T, S) if mask.queries is None else None, device) for p in mask.patterns]

    def allowed(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = position(b, i, j)
        ok = key > ABSENT
        if mask.causal:
            ok = ok & (key <= query)
        if mask.window:
            ok = ok & ((key - query).abs() < mask.window)
        for asking, ids in documents:
            ok = ok & (asking[b % asking.shape[0], i] == ids[b % ids.shape[0], j])
        for keeps in rules:
            ok = ok & keeps(*place(b, i, j))
        return ok

    return kernels.block_mask(tiles(mask, T, S, device, kernels.flex_side()), allowed, T, S)


def tiles(mask: Mask, T: int, S: int, device: torch.device, side: int) -> kernels.Tiles:
    """Which tiles hold any allowed pair, and which nothing else."""
    positions, numbers, places = mask.positions(T, S, device), mask.numbers(T, S), mask.places(T, S, device)
    return kernels.find_tiles(positions, numbers, places, mask.patterns, mask.causal, mask.window, side)


def _learned(bias: Bias | None) -> list[Tensor]:
    found = [] if bias is None else [bias] if isinstance(bias, Tensor) else bias.parameters()
    return [t for t in found if t.requires_grad]


def _score_mod(mask: Mask, bias: Bias | None, T: int, S: int, device: torch.device) -> Callable[..., Tensor] | None:
    if bias is None:
        return None
    if isinstance(bias, Tensor):
        written = bias
        return lambda score, b, h, i, j: score + written[b % written.shape[0], h % written.shape[1], i, j]
    position, symbolic = _pair_of(*mask.positions(T, S, device), in_order=mask.is_ordered), bias

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = position(b, i, j)
        return score + symbolic.at(h, key - query)

    return add


def _pair_of(
    queries: Tensor, keys: Tensor, *, in_order: bool
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The numbers of query i and key j of row b: arithmetic where they are in order, a look-up where not."""
    if in_order:
        shift = keys.shape[1] - queries.shape[1]
        return lambda b, i, j: (i + shift, j)
    return lambda b, i, j: (queries[b % queries.shape[0], i], keys[b % keys.shape[0], j])
