"""Lists of token ids: checked against a vocabulary, and padded to a rectangle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import InputError

Ids = Sequence[Sequence[int]]  # several texts


def check_rows(rows: Sequence[object], vocab_size: int, what: str) -> list[list[int]]:
    """The rows as lists of ids; InputError for anything else, and for ids outside the vocabulary."""
    checked: list[list[int]] = []
    for place, row in enumerate(rows):
        ids: list[Any] = list(row) if isinstance(row, Sequence) else [None]
        if not set(map(type, ids)) <= {int}:
            raise InputError(
                f"{what}s are a list of lists of ids; got {what} {place} = {str(row)[:40]!r}; encode text with the model's "
                f"tokenizer, and put a single {what} in a list of its own"
            )
        check_ids(ids, vocab_size, f"{what} {place}")
        checked.append(ids)
    return checked


def check_ids(ids: Sequence[int], vocab_size: int, what: str) -> None:
    """InputError if an id lies outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise InputError(
            f"{what} holds ids from {min(ids)} to {max(ids)}; the vocabulary has 0 .. {vocab_size - 1}; "
            f"is this the model's own tokenizer?"
        )


def pad(
    rows: Sequence[Sequence[int] | NDArray[Any]], fill: int = 0, rounding: tuple[int, int] = (1, 1)
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Rows of different lengths as one (B, T) array, filled up on the right, and which of its ids are real.

    B and T are rounded up to multiples of `rounding`. An added row has one real token, because no row may have none.
    """
    lengths = [len(row) for row in rows]
    height, width = (-(-size // to) * to for size, to in zip((len(rows), max(lengths)), rounding, strict=True))
    tokens = np.full((height, width), fill, np.int64)
    for at, row in enumerate(rows):
        tokens[at, : len(row)] = row
    lengths += [1] * (height - len(rows))
    return tokens, np.arange(width) < np.array(lengths)[:, None]
