"""Which rows, tokens and values of a site an intervention changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead.errors import InputError

Batch = int | Sequence[int] | Bool[Tensor, " B"] | None  # None: all
Positions = int | Sequence[int] | slice | Bool[Tensor, "B T"] | None


@dataclass(frozen=True)
class SiteCall:
    """A site in one call: its name, and the position of each of its rows in the text."""

    site: str
    positions: Int[Tensor, "_ T"]


def over_tokens(tokens: Tensor, x: Tensor) -> Tensor:
    """Values per token, shaped to broadcast over x."""
    return tokens[:, None, :, None] if x.ndim == 4 else tokens[..., None]


def as_indices(numbers: Sequence[int], x: Tensor) -> Int[Tensor, " n"]:
    return torch.tensor(list(numbers), device=x.device, dtype=torch.int64)


def chosen_rows(batch: int | Sequence[int] | Tensor, x: Tensor, site: str) -> Bool[Tensor, " B"]:
    """The rows of the batch that `batch` names."""
    if isinstance(batch, Tensor) and batch.dtype == torch.bool:
        if batch.shape != x.shape[:1]:
            raise InputError(
                f"{site!r} has {len(x)} rows, but batch= is of shape {tuple(batch.shape)}; give one boolean a row"
            )
        return batch.to(x.device)
    rows = [batch] if isinstance(batch, int) else [int(row) for row in batch]
    if any(not -len(x) <= row < len(x) for row in rows):
        raise InputError(f"{site!r} has rows 0 .. {len(x) - 1}; got batch={batch!r}; name some of these")
    return torch.isin(torch.arange(len(x), device=x.device), as_indices([row % len(x) for row in rows], x))


def chosen_units(unit: int | Sequence[int], x: Tensor, site: str) -> Bool[Tensor, " d"]:
    """The elements of the last axis that `unit` names."""
    units = [unit] if isinstance(unit, int) else [int(each) for each in unit]
    if not units or any(not 0 <= each < x.shape[-1] for each in units):
        raise InputError(f"{site!r} has units 0 .. {x.shape[-1] - 1}; got unit={unit!r}; name one or some of these")
    return torch.isin(torch.arange(x.shape[-1], device=x.device), as_indices(units, x))


def chosen_tokens(positions: int | Sequence[int] | slice | Tensor, x: Tensor, call: SiteCall) -> Bool[Tensor, "_ T"]:
    """The tokens that `positions` names."""
    at = call.positions
    end = at.amax(-1, keepdim=True) + 1
    if isinstance(positions, slice):
        low, high, step = positions.start or 0, positions.stop, positions.step or 1
        low = end + low if low < 0 else torch.full_like(end, low)
        chosen = (at >= low) & ((at - low) % step == 0)
        return chosen if high is None else chosen & (at < (end + high if high < 0 else high))
    if isinstance(positions, Tensor) and positions.dtype == torch.bool:
        if positions.shape != (len(x), x.shape[-2]):
            raise InputError(
                f"{call.site!r} has {(len(x), x.shape[-2])} (rows, tokens), but positions= is of shape "
                f"{tuple(positions.shape)}; give one boolean a token of the call, or positions by number"
            )
        return positions.to(x.device)
    numbers = [positions] if isinstance(positions, int) else [int(n) for n in positions]
    chosen = torch.isin(at, as_indices([n for n in numbers if n >= 0], x))
    return chosen | torch.isin(at - end, as_indices([n for n in numbers if n < 0], x))


def fit_value(value: Tensor, x: Tensor, call: SiteCall) -> tuple[Tensor, Tensor]:
    """The value, shaped and cast as x, and the elements for which there is one."""
    value, there = value.to(x), torch.ones((), dtype=torch.bool, device=x.device)
    if value.ndim == x.ndim and value.shape[-2] not in (1, x.shape[-2]):
        n, at = value.shape[-2], over_tokens(call.positions, x)
        there = (at >= 0) & (at < n)
        value = torch.take_along_dim(value, at.clamp(0, n - 1), -2)
    try:
        fits = torch.broadcast_shapes(value.shape, x.shape) == x.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise InputError(
            f"{call.site!r} is {tuple(x.shape)} in this call, and a value of shape {tuple(value.shape)} does not fit it; "
            f"take it from a run of as many rows, or give one vector of {x.shape[-1]}"
        )
    return value, there
