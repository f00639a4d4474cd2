"""The block allocator: reference counts, reservations, and a prefix cache of blocks whose tokens are known."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 16  # tokens: few enough to share short prefixes, enough to be read in one piece
NO_OWNER = -1

BlockIds = NDArray[np.int32]


class BlockAllocator:
    """Blocks 1 .. n_blocks - 1 of a pool. Block 0 is never allocated: padding is written there.

    A request reserves the most blocks that it may ever need before it is admitted, so no request runs out of memory halfway
    and none must be preempted. `reserve` gives it a number, under which it allocates block by block.

    A free block whose tokens are known stays in the prefix cache until its memory is needed. A prompt that starts with the same
    tokens takes it from there.
    """

    def __init__(self, n_blocks: int, block_size: int, *, max_reservations: int, prefix_cache: bool = True) -> None:
        self.n_blocks, self.block_size, self.prefix_cache = n_blocks, block_size, prefix_cache
        self.ref_counts = np.zeros(n_blocks, np.int32)
        self.owners = np.full(n_blocks, NO_OWNER, np.int32)  # the reservation that each block was allocated under
        self.free_stack: BlockIds = np.arange(n_blocks - 1, -1, -1, dtype=np.int32)  # the first `n_free` are free
        self.n_free = n_blocks - 1
        self.evictable: OrderedDict[int, bytes] = OrderedDict()  # cached blocks without references, LRU first
        self.hashes: dict[int, bytes] = {}  # of every block whose tokens are known
        self.cached: dict[bytes, int] = {}  # from these hashes to their blocks
        self.free_numbers = list(range(max_reservations))
        self.reserved = np.zeros(max_reservations, np.int64)  # blocks not yet allocated, by reservation
        self.n_reserved = 0  # the sum of these

    @property
    def n_available(self) -> int:
        """Blocks that are neither in use nor reserved."""
        return self.n_free + len(self.evictable) - self.n_reserved

    @property
    def n_used(self) -> int:
        """Blocks with references."""
        return self.n_blocks - 1 - self.n_free - len(self.evictable)

    def reserve(self, n: int) -> int:
        """Reserve n blocks, which must be available; returns the reservation's number."""
        assert n <= self.n_available
        number = self.free_numbers.pop()
        self.reserved[number] = n
        self.n_reserved += n
        return number

    def allocate(self, reservations: Sequence[int] | NDArray[np.int64]) -> BlockIds:
        """One block for each reservation named, with one reference."""
        n = len(reservations)
        np.subtract.at(self.reserved, reservations, 1)
        self.n_reserved -= n
        while self.n_free < n:
            block, name = self.evictable.popitem(last=False)
            del self.hashes[block], self.cached[name]
            self._push_free(np.array([block], np.int32))
        self.n_free -= n
        blocks = self.free_stack[self.n_free : self.n_free + n].copy()
        self.ref_counts[blocks], self.owners[blocks] = 1, reservations
        return blocks

    def share(self, blocks: BlockIds) -> None:
        """Add a reference to each; a block may be named several times."""
        np.add.at(self.ref_counts, blocks, 1)

    def free(self, blocks: BlockIds) -> None:
        """Drop a reference to each. A block without references is free again, and credited to its owner's reservation.

        Cached blocks become evictable, the last named first: a cached prefix is of no use without its first blocks.
        """
        np.subtract.at(self.ref_counts, blocks, 1)
        gone = np.unique(blocks[self.ref_counts[blocks] == 0])
        owners = self.owners[gone]
        owners = owners[owners != NO_OWNER]
        np.add.at(self.reserved, owners, 1)
        self.n_reserved += len(owners)
        self.owners[gone] = NO_OWNER
        is_cached = [block in self.hashes for block in gone.tolist()] if self.hashes else []
        if any(is_cached):
            cached = set(gone[is_cached].tolist())
            self.evictable |= {block: self.hashes[block] for block in reversed(blocks.tolist()) if block in cached}
        self._push_free(gone[~np.array(is_cached)] if is_cached else gone)

    def cancel(self, reservations: Sequence[int]) -> None:
        """End these reservations. Their blocks that others still share have no owner from now on."""
        self.owners[np.isin(self.owners, reservations)] = NO_OWNER
        self.n_reserved -= int(self.reserved[list(reservations)].sum())
        self.reserved[list(reservations)] = 0
        self.free_numbers += reservations

    def find_prefix(self, tokens: Sequence[int]) -> list[int]:
        """The cached blocks that hold the start of these tokens; takes no reference."""
        found: list[int] = []
        # The last token is always computed: its logits choose the next one.
        for name in self._names(tokens, (len(tokens) - 1) // self.block_size if self.cached else 0):
            if name not in self.cached:
                break
            found.append(self.cached[name])
        return found

    def take_prefix(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block that `find_prefix` found."""
        for block in blocks:
            self.evictable.pop(block, None)
            self.ref_counts[block] += 1

    def forget_prefixes(self) -> None:
        """Empty the prefix cache: its blocks hold what the model computes no more."""
        unused = np.array([*self.evictable], np.int32)
        self.evictable.clear()
        self.hashes.clear()
        self.cached.clear()
        self._push_free(unused)

    def cache_prefix(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Enter the full blocks among these, which hold these tokens, in the prefix cache."""
        n = min(len(tokens) // self.block_size, len(blocks)) if self.prefix_cache else 0
        for block, name in zip(blocks, self._names(tokens, n), strict=False):
            if name not in self.cached and block not in self.hashes:
                self.cached[name], self.hashes[block] = block, name

    def _names(self, tokens: Sequence[int], n: int) -> Iterator[bytes]:
        """The names of the first n blocks of a text."""
        name, width = b"", 8 * self.block_size
        numbers = np.asarray(tokens[: n * self.block_size], np.int64).tobytes()
        for start in range(0, len(numbers), width):
            name = _hash(name, numbers[start : start + width])
            yield name

    def _push_free(self, blocks: BlockIds) -> None:
        self.free_stack[self.n_free : self.n_free + len(blocks)] = blocks
        self.n_free += len(blocks)


def _hash(before: bytes, tokens: bytes) -> bytes:
    """Hash of a block's tokens and of all before them. Cryptographic, so that no prompt can be made to match another's blocks."""
    return hashlib.sha256(before + tokens).digest()
