"""Tiles of the score matrix, squares of 128 x 128 pairs of a query and a key or less: which of them a mask leaves anything of.

Found from each tile's lowest and highest position, so this costs (T / side) (S / side), never T S. A tile that only might hold an
allowed pair is kept: the kernel asks inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from clearhead.sparsity import Pattern

BLOCK = 128  # the side of a tile
SMALLEST = 32  # on the CPU: below it a strip's overhead costs more than the pairs that it saves
LARGEST_TABLE = 4096  # blocks a side: 16 MB

Sides = tuple[Int[Tensor, "_ T"], Int[Tensor, "_ S"]]  # a number for each query, and for each key


class Tiles(NamedTuple):
    """For each tile of a mask: whether it holds any allowed pair, and whether it holds no other."""

    some: Bool[Tensor, "_ t s"]
    every: Bool[Tensor, "_ t s"]
    side: int


def flex_side() -> int:
    """The side of the tiles that flex_attention skips."""
    return BLOCK


def strip_side(patterns: Sequence[Pattern]) -> int:
    """The side of the tiles on the CPU: that of the smallest block that lies scattered, so that no tile is kept for a part of it.

    A window's and the global blocks lie side by side, and of blocks of single tokens far apart a tile of any side keeps some.
    """
    scattered = [p.block for p in patterns if p.n_random or p.stride or p.dilation > 1]
    smallest = min((block for block in scattered if block >= 4), default=BLOCK)
    return next((side for side in (BLOCK, BLOCK // 2) if smallest % side == 0), min(SMALLEST, BLOCK))


def find_tiles(
    positions: Sides,
    documents: Sequence[Sides],
    places: Sides,
    patterns: Sequence[Pattern],
    causal: bool,
    window: int,
    side: int,
) -> Tiles:
    """The tiles of a mask. A key at a position below 0 is not there; the others are as in layers/masks.py."""
    (q_low, q_high), (k_low, k_high) = _ranges(positions, side)
    nearest, farthest = k_low - q_high, k_high - q_low  # as key minus query
    some = (k_high >= 0).expand_as(nearest)
    every = (k_low >= 0) & _are_whole(positions, side)
    if causal:
        # A tile's lowest position may be that of an absent key, so this keeps a few tiles too many.
        some, every = some & (nearest <= 0), every & (farthest <= 0)
    if window:
        some = some & (nearest < window) & (farthest > -window)
        every = every & (nearest > -window) & (farthest < window)
    for numbers in documents:
        (a, b), (c, d) = _ranges(numbers, side)
        some, every = some & (a <= d) & (c <= b), every & (a == b) & (c == d) & (a == c)
    if patterns:
        queries, keys = _ranges(places, side)
        for pattern in patterns:
            some = some & pattern.may_keep(queries, keys, side)
            every = every & pattern.keeps_all(queries, keys)
    return Tiles(some, every, side)


def pair_rule(pattern: Pattern, length: int | None, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """`pattern.keeps` as a kernel asks it, of places from -1 (none) to `length` - 1; None: of any.

    Drawing a block takes dozens of operations for each pair. Where that is possible it is done here, once, and looked up there.
    """
    n = 0 if length is None else -(-length // pattern.block)
    if not (n and pattern.n_random) or n > LARGEST_TABLE:
        return lambda query, key: pattern.keeps(query.long(), key.long())
    first = torch.arange(-1, n, device=device) * pattern.block
    table = pattern.keeps(first[:, None], first)
    return lambda query, key: table[query // pattern.block + 1, key // pattern.block + 1]


def block_mask(tiles: Tiles, allowed: Callable[..., Tensor], T: int, S: int) -> BlockMask:
    """The tiles as flex_attention takes them. In a tile with forbidden pairs it asks `allowed`."""
    some, every, side = tiles
    parts = [part[:, None] for part in (some & ~every, some & every)]
    numbers = [part.sum(-1, dtype=torch.int32) for part in parts]
    orders = [torch.argsort(part.int(), dim=-1, descending=True, stable=True).int() for part in parts]
    return BlockMask.from_kv_blocks(
        *(numbers[0], orders[0], numbers[1], orders[1]), BLOCK_SIZE=side, mask_mod=allowed, seq_lengths=(T, S)
    )


def _ranges(sides: Sides, side: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The lowest and the highest value in each tile, of the queries as a column and of the keys as a row."""
    (a, b), (c, d) = (_ends(x, side) for x in sides)
    return (a[:, :, None], b[:, :, None]), (c[:, None], d[:, None])


def _ends(x: Int[Tensor, "_ T"], side: int) -> tuple[Int[Tensor, "_ t"], Int[Tensor, "_ t"]]:
    filled = torch.cat([x, x[:, -1:].expand(-1, -x.shape[1] % side)], 1)
    blocks = filled.unflatten(1, (-1, side))
    return blocks.amin(-1), blocks.amax(-1)


def _are_whole(sides: Sides, side: int) -> Bool[Tensor, "t s"]:
    """Tiles that lie wholly inside the matrix."""
    rows, cols = (torch.arange(side, x.shape[1] + side, side, device=x.device) <= x.shape[1] for x in sides)
    return rows[:, None] & cols
