"""Tiles of the score matrix, 128 x 128 pairs of a query and a key: which of them a mask leaves anything of.

Found from each tile's lowest and highest position, so this costs (T / 128) (S / 128), never T S. A tile that only might hold an
allowed pair is kept: the kernel asks inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from clearhead.sparsity import Pattern

BLOCK = 128  # the side of a tile

Sides = tuple[Int[Tensor, "_ T"], Int[Tensor, "_ S"]]  # a number for each query, and for each key
Tiles = tuple[Bool[Tensor, "_ t s"], Bool[Tensor, "_ t s"]]  # whether a tile holds any allowed pair, and no other


def find_tiles(
    positions: Sides,
    documents: Sequence[Sides],
    places: Sides,
    patterns: Sequence[Pattern],
    *,
    causal: bool,
    window: int,
) -> Tiles:
    """The tiles of a mask. A key at a position below 0 is not there; the others are as in layers/masks.py."""
    (q_low, q_high), (k_low, k_high) = _ranges(positions)
    nearest, farthest = k_low - q_high, k_high - q_low  # as key minus query
    some = (k_high >= 0).expand_as(nearest)
    every = (k_low >= 0) & _are_whole(positions)
    if causal:
        # A tile's lowest position may be that of an absent key, so this keeps a few tiles too many.
        some, every = some & (nearest <= 0), every & (farthest <= 0)
    if window:
        some = some & (nearest < window) & (farthest > -window)
        every = every & (nearest > -window) & (farthest < window)
    for numbers in documents:
        (a, b), (c, d) = _ranges(numbers)
        some, every = some & (a <= d) & (c <= b), every & (a == b) & (c == d) & (a == c)
    if patterns:
        queries, keys = _ranges(places)
        for pattern in patterns:
            some = some & pattern.may_keep(queries, keys, BLOCK)
            every = every & pattern.keeps_all(queries, keys)
    return some, every


def block_mask(tiles: Tiles, allowed: Callable[..., Tensor], T: int, S: int) -> BlockMask:
    """The tiles as flex_attention takes them. In a tile with forbidden pairs it asks `allowed`."""
    some, every = tiles
    parts = [part[:, None] for part in (some & ~every, some & every)]
    numbers = [part.sum(-1, dtype=torch.int32) for part in parts]
    orders = [torch.argsort(part.int(), dim=-1, descending=True, stable=True).int() for part in parts]
    return BlockMask.from_kv_blocks(
        *(numbers[0], orders[0], numbers[1], orders[1]), BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=(T, S)
    )


def _ranges(sides: Sides) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The lowest and the highest value in each tile, of the queries as a column and of the keys as a row."""
    (a, b), (c, d) = (_ends(x) for x in sides)
    return (a[:, :, None], b[:, :, None]), (c[:, None], d[:, None])


def _ends(x: Int[Tensor, "_ T"]) -> tuple[Int[Tensor, "_ t"], Int[Tensor, "_ t"]]:
    filled = torch.cat([x, x[:, -1:].expand(-1, -x.shape[1] % BLOCK)], 1)
    blocks = filled.unflatten(1, (-1, BLOCK))
    return blocks.amin(-1), blocks.amax(-1)


def _are_whole(sides: Sides) -> Bool[Tensor, "t s"]:
    """Tiles that lie wholly inside the matrix."""
    rows, cols = (torch.arange(BLOCK, x.shape[1] + BLOCK, BLOCK, device=x.device) <= x.shape[1] for x in sides)
    return rows[:, None] & cols
