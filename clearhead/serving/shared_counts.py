"""Counts by key, such as the requests at once of a client, summed over the processes of a server without a lock."""

from __future__ import annotations

import hashlib
import mmap
from collections import Counter
from dataclasses import dataclass

import numpy as np

SLOTS = 2**18  # two keys in one slot share a limit: rare, and nobody can look for them, since the hash has a secret


@dataclass(frozen=True)
class SharedTable:
    """A file in memory: for each process a row of numbers, which it alone writes. Only pages that are used take memory."""

    file: int  # its descriptor
    secret: bytes
    row: int
    n_rows: int

    @property
    def n_bytes(self) -> int:
        return self.n_rows * SLOTS * 8


class Counts:
    """`of(key)` is the sum over all processes. Two that add at the same time may both see the sum from before."""

    def __init__(self, table: SharedTable | None = None, what: str = "") -> None:
        self.own, self.table, self.what = Counter[str](), table, what
        if table is not None:
            memory = mmap.mmap(table.file, table.n_bytes)
            self.numbers = np.frombuffer(memory, np.int64).reshape(table.n_rows, SLOTS)

    def add(self, key: str, n: int) -> None:
        self.own[key] += n
        if not self.own[key]:
            del self.own[key]
        if self.table is not None:
            self.numbers[self.table.row, self._slot(key)] += n

    def of(self, key: str) -> int:
        return self.own[key] if self.table is None else int(self.numbers[:, self._slot(key)].sum())

    def _slot(self, key: str) -> int:
        assert self.table is not None
        digest = hashlib.blake2b(f"{self.what} {key}".encode(), digest_size=8, key=self.table.secret).digest()
        return int.from_bytes(digest, "big") % SLOTS
