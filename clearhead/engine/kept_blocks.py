"""Which blocks of the KV cache a decode step reads: those with a place that the sparse pattern keeps for the row's query."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from clearhead.kernels.decode_step import Table
from clearhead.sparsity import Pattern

NONE = -1  # where a row keeps fewer blocks than another


class KeptBlocks:
    """Of one caller's steps. With `is_exact`, every place of a block that is read is kept, so that no mask is needed."""

    def __init__(self, pattern: Pattern, block: int) -> None:
        self.pattern, self.block = pattern, block
        self.is_exact = pattern.block % block == 0
        self._step = math.gcd(pattern.block, block)  # places that a pattern does not tell apart
        self._found: tuple[NDArray[np.int64], NDArray[np.int32]] | None = None

    def find(self, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
        """(rows, w): each row's blocks in the order of its tokens, for a query at the place `lengths`; NONE behind the last."""
        queries = lengths.astype(np.int64) // self._step
        if self._found is None or not np.array_equal(self._found[0], queries):
            self._found = queries, self._search(queries[:, None] * self._step)
        return self._found[1]

    def _search(self, queries: NDArray[np.int64]) -> NDArray[np.int32]:
        n_blocks = int(queries.max()) // self.block + 1
        places = np.arange(0, n_blocks * self.block, self._step)[None]
        pairs = self.pattern.keeps(queries, places) & (places <= queries)
        kept = pairs.reshape(len(queries), n_blocks, -1).any(-1)
        found = np.argsort(~kept, axis=1, kind="stable")[:, : kept.sum(1).max()]
        return np.where(np.take_along_axis(kept, found, 1), found, NONE).astype(np.int32)

    def table(self, own: Table) -> Table:
        """The kept blocks as a table of their own; its counts are the tokens in them before this step's."""
        assert self.is_exact, "blocks that are kept in part need a mask"
        found = self.find(own.counts)
        blocks = np.where(found == NONE, 0, np.take_along_axis(own.blocks[: len(found)], found, 1))
        counts = ((found != NONE).sum(1) - 1) * self.block + own.counts % self.block
        return Table(np.ascontiguousarray(blocks, np.int32), counts.astype(np.int32))
