"""Weights in fewer bits: what every packed format offers, and how rows are laid out in tiles for the CPU's kernels.

Row-major, a packed weight is one to three tensors of N rows. In tiles, the values that 16 rows hold at one place (4 bytes of q, or
one scale) lie side by side, as if the shape were (N / 16, D / 4, 16, 4). The last N % 16 rows are a smaller tile.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

TILE = 16  # rows side by side


class Packed(nn.Module):
    """A weight held in fewer bits, in the place of the parameter: it multiplies, and it gives single rows."""

    shape: torch.Size
    dtype: torch.dtype  # of results
    device: torch.device
    kind: str

    @abstractmethod
    def product(self, x: Float[Tensor, "*_ D"], bias: Float[Tensor, " N"] | None) -> Float[Tensor, "*_ N"]: ...

    @abstractmethod
    def rows(self, ids: Int[Tensor, "*_"]) -> Float[Tensor, "*_ D"]: ...


def tile(rows: Tensor, width: int) -> Tensor:
    """Row-major to tiles; `width` values of one row stay together."""
    rows = F.pad(rows, (0, -rows.shape[1] % width)).contiguous()
    tiled = torch.empty_like(rows)
    for target, source in zip(_as_tiles(tiled, width), _as_rows(rows, width), strict=True):
        target.copy_(source)
    return tiled


def untile(tiled: Tensor, width: int) -> Tensor:
    """Tiles to row-major."""
    rows = torch.empty_like(tiled)
    for target, source in zip(_as_rows(rows, width), _as_tiles(tiled, width), strict=True):
        target.copy_(source)
    return rows


def tile_offsets(ids: Int[Tensor, "*_"], shape: torch.Size, width: int) -> Int[Tensor, "*_ m"]:
    """Where the values of these rows lie in the flattened tiles."""
    n, m = shape
    across, at = (n - ids // TILE * TILE).clamp(max=TILE)[..., None], torch.arange(m)
    return (ids // TILE * TILE * m + ids % TILE * width)[..., None] + at // width * (across * width) + at % width


def _as_rows(rows: Tensor, width: int) -> list[Tensor]:
    """Whole tiles, and the rows that are left, as (tiles, places, rows, width)."""
    return [
        part.view(-1, many, rows.shape[1] // width, width).transpose(1, 2) for part, many in _parts(rows) if len(part)
    ]


def _as_tiles(tiled: Tensor, width: int) -> list[Tensor]:
    """The same of memory that is in tiles."""
    return [part.view(-1, tiled.shape[1] // width, many, width) for part, many in _parts(tiled) if len(part)]


def _parts(held: Tensor) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
    n = len(held) // TILE * TILE
    return (held[:n], TILE), (held[n:], len(held) - n)
