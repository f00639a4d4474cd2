"""Block-sparse attention: from a mask to the blocks of the score matrix that torch's flex_attention may skip."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from clearhead import kernels
from clearhead.layers.masks import ABSENT, Mask
from clearhead.layers.positions import Bias

BLOCK = 128  # the side of a block


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, blocks: BlockMask | None, bias: Bias | None, scale: float
) -> Tensor:
    """Attention that skips the blocks a mask forbids."""
    T, S = q.shape[2], k.shape[2]
    learned = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias.parameters())
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *learned))
    blocks = blocks or block_mask(mask, T, S, q.device)
    score_mod = _score_mod(mask, bias, T, S, q.device)
    return kernels.block_sparse_attention(q, k, v, blocks, score_mod, scale, needs_grad=needs_grad)


def block_mask(mask: Mask, T: int, S: int, device: torch.device) -> BlockMask:
    """Which blocks of the score matrix hold any allowed pair, and which nothing else.

    Found from each block's lowest and highest position, so this costs (T / 128) (S / 128), never T S. A block that only
    might hold a pair is kept: the kernel asks `allowed` inside it.
    """
    place, documents = _places(mask, T, S, device), mask.numbers(T, S)

    def allowed(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = place(b, i, j)
        ok = key > ABSENT
        if mask.causal:
            ok = ok & (key <= query)
        if mask.window:
            ok = ok & ((key - query).abs() < mask.window)
        for asking, ids in documents:
            ok = ok & (asking[b % asking.shape[0], i] == ids[b % ids.shape[0], j])
        return ok

    queries, keys = mask.positions(T, S, device)
    q_low, q_high = _block_range(queries)
    k_low, k_high = _block_range(keys)
    nearest, farthest = k_low[:, None] - q_high[:, :, None], k_high[:, None] - q_low[:, :, None]  # as key minus query
    some = (k_high > ABSENT)[:, None].expand_as(nearest)
    every = (k_low > ABSENT)[:, None] & _is_whole(T, S, device)
    if mask.causal:
        # A block's lowest position may be that of an absent key, so this keeps a few blocks too many.
        some, every = some & (nearest <= 0), every & (farthest <= 0)
    if mask.window:
        some = some & (nearest < mask.window) & (farthest > -mask.window)
        every = every & (nearest > -mask.window) & (farthest < mask.window)
    for asking, ids in documents:
        (a, b), (c, d) = _block_range(asking), _block_range(ids)
        some = some & (a[:, :, None] <= d[:, None]) & (c[:, None] <= b[:, :, None])
        every = every & (a == b)[:, :, None] & (c == d)[:, None] & (a[:, :, None] == c[:, None])
    parts = [part[:, None] for part in (some & ~every, some & every)]
    numbers = [part.sum(-1, dtype=torch.int32) for part in parts]
    orders = [torch.argsort(part.int(), dim=-1, descending=True, stable=True).int() for part in parts]
    return BlockMask.from_kv_blocks(
        *(numbers[0], orders[0], numbers[1], orders[1]), BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=(T, S)
    )


def _block_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest value in each block of a row."""
    filled = torch.cat([x, x[:, -1:].expand(-1, -x.shape[1] % BLOCK)], 1)
    blocks = filled.unflatten(1, (-1, BLOCK))
    return blocks.amin(-1), blocks.amax(-1)


def _is_whole(T: int, S: int, device: torch.device) -> Tensor:
    """Blocks that lie wholly inside the matrix."""
    rows = torch.arange(1, -(-T // BLOCK) + 1, device=device) * BLOCK <= T
    cols = torch.arange(1, -(-S // BLOCK) + 1, device=device) * BLOCK <= S
    return rows[:, None] & cols


def _score_mod(mask: Mask, bias: Bias | None, T: int, S: int, device: torch.device) -> Callable[..., Tensor] | None:
    if bias is None:
        return None
    if isinstance(bias, Tensor):
        written = bias
        return lambda score, b, h, i, j: score + written[b % written.shape[0], h % written.shape[1], i, j]
    place, symbolic = _places(mask, T, S, device), bias

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = place(b, i, j)
        return score + symbolic.at(h, key - query)

    return add


def _places(
    mask: Mask, T: int, S: int, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The positions of query i and key j of row b: arithmetic where they are in order, a look-up where not."""
    if mask.is_ordered:
        return lambda b, i, j: (i + (S - T), j)
    queries, keys = mask.positions(T, S, device)
    return lambda b, i, j: (queries[b % queries.shape[0], i], keys[b % keys.shape[0], j])
