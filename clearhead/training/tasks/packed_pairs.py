"""Packed batches of pairs: the sources one after the other in one row, the targets in another, without padding.

Attention stays within each text (layers/packing.py), so a batch may hold texts of any lengths at the same cost. All batches have
one shape, so they are compiled or recorded once. Free space is filled with texts that are not predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from clearhead.layers.packing import across, packed, packed_at
from clearhead.models import EncoderDecoder
from clearhead.quantization.model_weights import example_weight

SPARE = 64  # tokens of a row that are reserved for filler texts, so that each has at least one token on both sides


@dataclass(frozen=True)
class PackedShape:
    """The shape of every batch."""

    sizes: tuple[int, int]  # tokens of the sources, of the targets
    texts: int  # at most
    longest: int  # tokens of a text

    @classmethod
    def of(cls, lengths: Sequence[NDArray[np.int64]], budget: int, longest: int) -> PackedShape:
        """The side with more tokens gets `budget` tokens, the other side a proportional number: both fill up together."""
        sums = [int(column.sum()) for column in lengths]
        source, target = (max(math.ceil(budget * n / max(sums) / SPARE) * SPARE, longest + SPARE) for n in sums)
        texts = math.ceil(1.25 * budget * len(lengths[0]) / max(sums) / SPARE + 1) * SPARE
        return cls((source, target), texts, longest)

    @property
    def free(self) -> tuple[int, int]:
        """The number of tokens of each side that the texts of a batch may fill."""
        return self.sizes[0] - SPARE, self.sizes[1] - SPARE


def can_pack(model: EncoderDecoder, longest: int) -> bool:
    """Whether every attention of the model can stay within its text, on its device and under the current autocast."""
    mask, like, c = packed([1])[0], example_weight(model), model.config
    fits = c.inputs == "tokens" and c.n_kv_heads == c.n_heads and longest >= SPARE
    return fits and model.encoder.packs(mask, like) and model.decoder.packs(mask, like)


def pack(
    sides: tuple[list[NDArray[Any]], list[NDArray[Any]]], fill: tuple[int, int], shape: PackedShape
) -> list[tuple[Int[Tensor, "1 _"], Int[Tensor, " _"]]]:
    """Each side's texts in one row, and where each text starts. At the end come texts of `fill`, then empty ones."""
    left = [size - sum(map(len, texts)) for size, texts in zip(shape.sizes, sides, strict=True)]
    n = math.ceil(max(left) / shape.longest)
    assert n <= min(left), "the texts do not fit"
    made: list[tuple[Tensor, Tensor]] = []
    for texts, value, size, free in zip(sides, fill, shape.sizes, left, strict=True):
        lengths = [*map(len, texts), *(free // n + (i < free % n) for i in range(n))]
        starts = np.full(max(shape.texts, len(lengths)) + 1, size, np.int32)
        starts[: len(lengths)] = np.cumsum([0, *lengths[:-1]])
        row = np.concatenate([*texts, np.full(free, value, np.int64)])
        made.append((torch.from_numpy(row)[None], torch.from_numpy(starts)))
    return made


def pair_states(
    model: EncoderDecoder,
    source: tuple[Int[Tensor, "1 S"], Int[Tensor, " n"]],
    target: tuple[Int[Tensor, "1 T"], Int[Tensor, " n"]],
    longest: int,
    *,
    checkpointing: bool = False,
) -> Float[Tensor, "1 T D"]:
    """The decoder's states for packed targets and sources. Each side is the tokens and where its texts start."""
    (read, read_at), (written, written_at) = (
        packed_at(starts, row.shape[1], longest) for row, starts in (source, target)
    )
    memory = model.encode(source[0], read, positions=read_at, checkpointing=checkpointing)
    seen = across(written, read)
    return model.states(target[0], memory, seen, mask=written, positions=written_at, checkpointing=checkpointing)
