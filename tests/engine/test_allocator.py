"""The block allocator in random order of arrival, growth, sharing and freeing, against plain dicts and lists."""

from __future__ import annotations

import random

import numpy as np
import pytest

from clearhead.engine.allocator import NO_OWNER, BlockAllocator

BLOCK = 3


class Holder:
    """A text of some rows, as a search has them: the blocks of each, and how many it may still allocate."""

    def __init__(self, number: int, tokens: list[int], rows: list[list[int]], left: int) -> None:
        self.number, self.tokens, self.rows, self.left = number, tokens, rows, left
        self.took: set[int] = set()


class Plain:
    """The same bookkeeping done slowly: references are counted in the rows, and prefixes are known by all their tokens."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.holders: list[Holder] = []
        self.known: dict[tuple[int, ...], int] = {}
        self.kept: list[int] = []

    def refs(self, block: int) -> int:
        return sum(row.count(block) for holder in self.holders for row in holder.rows)

    def held(self) -> set[int]:
        return {block for holder in self.holders for row in holder.rows for block in row}

    def n_free(self) -> int:
        return self.n_blocks - 1 - len(self.held()) - len(self.kept)

    def find(self, tokens: list[int]) -> list[int]:
        found: list[int] = []
        while (end := (len(found) + 1) * BLOCK) < len(tokens) and tuple(tokens[:end]) in self.known:
            found.append(self.known[tuple(tokens[:end])])
        return found

    def remember(self, tokens: list[int], row: list[int]) -> None:
        for at, block in enumerate(row[: len(tokens) // BLOCK]):
            name = tuple(tokens[: (at + 1) * BLOCK])
            if name not in self.known and block not in self.known.values():
                self.known[name] = block

    def evict(self, n: int) -> None:
        """Evict until n blocks are free, the least recently used first."""
        while self.n_free() < n:
            block = self.kept.pop(0)
            self.known = {name: known for name, known in self.known.items() if known != block}

    def drop(self, blocks: list[int]) -> None:
        """Rows with these blocks are gone: blocks in no row are credited to their owner, or free."""
        for block in dict.fromkeys(reversed(blocks)):
            if self.refs(block) == 0:
                for holder in self.holders:
                    if block in holder.took:
                        holder.took.remove(block)
                        holder.left += 1
                if block in self.known.values():
                    self.kept.append(block)


def check(allocator: BlockAllocator, plain: Plain) -> None:
    assert allocator.ref_counts.tolist() == [plain.refs(block) for block in range(plain.n_blocks)]
    assert allocator.n_used == len(plain.held())
    assert allocator.n_free == plain.n_free()
    assert list(allocator.evictable) == plain.kept
    assert sorted(allocator.cached.values()) == sorted(plain.known.values())
    left = {holder.number: holder.left for holder in plain.holders}
    assert {at: n for at, n in enumerate(allocator.reserved.tolist()) if n} == {at: n for at, n in left.items() if n}
    assert allocator.n_reserved == sum(left.values())
    assert allocator.n_available == plain.n_free() + len(plain.kept) - sum(left.values()) >= 0
    owners = {block: holder.number for holder in plain.holders for block in holder.took}
    assert allocator.owners.tolist() == [owners.get(block, NO_OWNER) for block in range(plain.n_blocks)]


def flat(rows: list[list[int]]) -> list[int]:
    return [block for row in rows for block in row]


def take(allocator: BlockAllocator, plain: Plain, holder: Holder, n: int) -> list[int]:
    plain.evict(n)
    before = plain.held() | set(plain.kept)
    taken = allocator.allocate([holder.number] * n).tolist()
    assert len({*taken} - before - {0}) == n  # free before, and each once
    holder.left -= n
    holder.took |= set(taken)
    return taken


def come(allocator: BlockAllocator, plain: Plain, rng: random.Random) -> int:
    """A text with a prefix that others have, and room to grow by some blocks in each of its rows."""
    tokens = [7 * rng.randrange(2)] * rng.randrange(14) + [rng.randrange(2) for _ in range(rng.randint(1, 4))]
    found = allocator.find_prefix(tokens)
    assert found == plain.find(tokens)
    width, n = rng.choice([1, 1, 2, 3]), -(-len(tokens) // BLOCK)
    need = n - len(found) + width * rng.randrange(4) + width  # the last block may have to be copied
    if need + sum(plain.refs(block) == 0 for block in found) > allocator.n_available or not allocator.free_numbers:
        return 0
    allocator.take_prefix(found)
    plain.kept = [block for block in plain.kept if block not in found]
    holder = Holder(-1, tokens, [found], need)
    plain.holders.append(holder)
    holder.number = allocator.reserve(need)
    assert holder.number not in {other.number for other in plain.holders[:-1]}
    holder.rows[0] = found + take(allocator, plain, holder, n - len(found))
    allocator.share(np.tile(np.array(holder.rows[0], np.int32), width - 1))
    holder.rows = [list(holder.rows[0]) for _ in range(width)]
    allocator.cache_prefix(tokens, holder.rows[0])
    plain.remember(tokens, holder.rows[0])
    return len(found)


def grow(allocator: BlockAllocator, plain: Plain, rng: random.Random) -> None:
    holder = rng.choice(plain.holders)
    if holder.left >= len(holder.rows):
        for row in holder.rows:
            row += take(allocator, plain, holder, 1)
        if len(holder.rows) == 1:
            holder.tokens += [rng.randrange(2) for _ in range(len(holder.rows[0]) * BLOCK - len(holder.tokens))]


def part(allocator: BlockAllocator, plain: Plain, rng: random.Random) -> None:
    """Rows continue each other's blocks, as beams do."""
    holder = rng.choice(plain.holders)
    new = [rng.choice(holder.rows) for _ in holder.rows]
    old, holder.rows = holder.rows, [list(row) for row in new]
    allocator.share(np.array(flat(new), np.int32))
    gone = flat(old)
    allocator.free(np.array(gone, np.int32))
    plain.drop(gone)


def leave(allocator: BlockAllocator, plain: Plain, rng: random.Random) -> None:
    holder = rng.choice(plain.holders)
    if len(holder.rows) == 1:
        allocator.cache_prefix(holder.tokens, holder.rows[0])
        plain.remember(holder.tokens, holder.rows[0])
    gone, holder.rows = flat(holder.rows), []
    allocator.free(np.array(gone, np.int32))
    allocator.cancel([holder.number])
    plain.drop(gone)
    plain.holders.remove(holder)


@pytest.mark.parametrize("n_blocks", [9, 23, 61])
@pytest.mark.parametrize("seed", range(3))
def test_any_order(seed: int, n_blocks: int) -> None:
    rng, plain = random.Random(seed), Plain(n_blocks)
    allocator = BlockAllocator(n_blocks, BLOCK, max_reservations=7)
    found = evicted = 0
    for _ in range(500):
        before = len(plain.known)
        step = rng.choice([come, grow, part, leave])
        if plain.holders or step is come:
            found += step(allocator, plain, rng) or 0
            check(allocator, plain)
        evicted += len(plain.known) < before
    assert found > 20
    assert evicted > 20
    while plain.holders:
        leave(allocator, plain, rng)
        check(allocator, plain)
    assert (allocator.n_used, allocator.n_reserved, allocator.n_available) == (0, 0, n_blocks - 1)


def test_a_prefix_loses_its_last_blocks_first() -> None:
    """The last blocks of a text are evicted first: the rest is still found."""
    allocator = BlockAllocator(8, BLOCK, max_reservations=1)
    rng = random.Random(0)
    for _ in range(20):  # in any order of its blocks
        tokens = [rng.randrange(99) for _ in range(13)]
        holder = allocator.reserve(5)
        row = allocator.allocate([holder] * 5)[np.array(rng.sample(range(5), 5))]
        allocator.cache_prefix(tokens, row.tolist())
        allocator.free(row)
        allocator.cancel([holder])
        n = rng.randint(1, 3)
        holder = allocator.reserve(3 + n)
        taken = allocator.allocate([holder] * (3 + n))  # three were free
        assert allocator.find_prefix(tokens) == row[: 4 - n].tolist()
        allocator.free(taken)
        allocator.cancel([holder])


def test_without_a_prefix_cache() -> None:
    allocator = BlockAllocator(8, BLOCK, max_reservations=1, prefix_cache=False)
    holder = allocator.reserve(2)
    row = allocator.allocate([holder] * 2)
    allocator.cache_prefix([1, 2, 3, 4, 5, 6], row.tolist())
    allocator.free(row)
    allocator.cancel([holder])
    assert allocator.find_prefix([1, 2, 3, 4, 5, 6, 7]) == []
    assert not allocator.evictable
    assert allocator.n_free == 7


@pytest.mark.parametrize(
    ("tokens", "n"),
    [
        ([1, 2, 3, 4, 5, 6, 7], 2),
        ([1, 2, 3, 4, 5, 6], 1),  # the last token is always computed
        ([1, 2, 3, 4], 1),
        ([1, 2, 3], 0),
        ([], 0),
        ([1, 2, 3, 4, 5, 9, 7], 1),
        ([9, 2, 3, 4, 5, 6, 7], 0),  # the same second block, after another first one
        ([4, 5, 6, 7], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], 2),
    ],
    ids=str,
)
def test_find(tokens: list[int], n: int) -> None:
    allocator = BlockAllocator(8, BLOCK, max_reservations=1)
    row = allocator.allocate([allocator.reserve(3)] * 3).tolist()
    allocator.cache_prefix([1, 2, 3, 4, 5, 6, 7], row)
    assert allocator.find_prefix(tokens) == row[:n]
