"""A text store as one stream of tokens, cut into windows of equal length, for language models.

Documents follow one another without padding. `batch` numbers them, so that a mask (`layers.masks.documents`) can restrict
attention to each token's own document.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from clearhead.data.batch_order import RowOrder, draw
from clearhead.data.token_store import Column
from clearhead.errors import InputError


def split_stream(n_tokens: int, share: float) -> int:
    """The start of the last `share` of a stream: the tokens before it are for training, the others for validation."""
    return int(n_tokens * (1 - share))


class Windows:
    """Windows of `length` + 1 tokens (a model's input and its targets, shifted by one) over tokens `start` to `stop`.

    In training, every epoch shifts the windows by another number of tokens, so that epochs do not repeat windows; less than one
    window of tokens is skipped at each end. In an evaluation every token comes once, in order.
    """

    def __init__(
        self,
        column: Column,
        length: int,
        seed: int,
        start: int = 0,
        stop: int | None = None,
        rows_per_step: int | Sequence[tuple[int, int]] = 1,
    ) -> None:
        self._column, self.length, self.seed = column, length, seed
        self.start, self.stop = start, len(column.flat) if stop is None else stop
        n_tokens = self.stop - self.start
        if length < 1 or n_tokens <= length:
            raise InputError(
                f"{n_tokens:,} tokens are too few for one window of {length:,} and the token after it; give more text, or shorter "
                "windows"
            )
        self._n = max(1, (n_tokens - length) // length)
        self._slack = min(length, n_tokens - self._n * length)  # shifts that leave room for all windows
        self._order = RowOrder(self._n, rows_per_step, seed)

    def __len__(self) -> int:
        """The number of windows in an epoch of training."""
        return self._n

    def starts(self, step: int) -> NDArray[np.int64]:
        """The starts of the windows of a training step: a pure function of (seed, step)."""
        return np.concatenate(
            [self.start + self._shift(epoch) + rows * self.length for epoch, rows in self._order.parts(step)]
        )

    def epoch(self, step: int) -> float:
        """Epochs done before this step."""
        return self._order.epoch(step)

    def _shift(self, epoch: int) -> int:
        return int(draw(self.seed + 1, epoch).integers(self._slack))

    def in_order(self) -> NDArray[np.int64]:
        """The starts of the windows of an evaluation; the last one may be shorter."""
        return np.arange(self.start, self.stop - 1, self.length)

    def batch(
        self, starts: NDArray[np.int64], length: int = 0
    ) -> tuple[Int[Tensor, "n length"], Int[Tensor, "n length"]]:
        """The tokens of the windows (of shorter ones, if a `length` is given), and the number of each token's document. After the
        end of the stream these are 0 and -1."""
        assert self._column.offsets is not None
        places = starts[:, None] + np.arange((length or self.length) + 1)
        inside = places < self.stop
        places = np.minimum(places, self.stop - 1)
        documents = np.searchsorted(self._column.offsets, places, side="right") - 1
        tokens = self._column.flat[places].astype(np.int64)
        return torch.from_numpy(np.where(inside, tokens, 0)), torch.from_numpy(np.where(inside, documents, -1))
