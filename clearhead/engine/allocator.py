"""Who holds which block of a pool: references are counted, needs promised ahead, and beginnings kept for whom they fit next."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int32]
NOBODY = -1


class Blocks:
    """The blocks of a pool, from 1 on; block 0 is nobody's.

    A request is let in when the most it may need is there, so that none ever runs out of memory halfway: `admit` gives it the
    number under which it takes what it was promised, block by block. A block that nobody holds and whose tokens are known is
    kept until its room is needed: a text that starts with the same tokens takes it over.
    """

    def __init__(self, n_blocks: int, block: int, *, max_holders: int, keep_beginnings: bool = True) -> None:
        self.n_blocks, self.block, self.keep_beginnings = n_blocks, block, keep_beginnings
        self.refs = np.zeros(n_blocks, np.int32)
        self.owner = np.full(n_blocks, NOBODY, np.int32)  # who took it, while he is here
        self.free: Numbers = np.arange(n_blocks - 1, -1, -1, dtype=np.int32)  # a stack; the first `n_free` count
        self.n_free = n_blocks - 1
        self.kept: OrderedDict[int, bytes] = OrderedDict()  # known tokens, no holder; longest unused first
        self.names: dict[int, bytes] = {}  # of all blocks whose tokens are known
        self.known: dict[bytes, int] = {}
        self.open = list(range(max_holders))
        self.left = np.zeros(max_holders, np.int64)  # promised to each, and not yet taken
        self.promised = 0  # the sum of these

    @property
    def n_available(self) -> int:
        """Blocks that nobody holds and nobody was promised."""
        return self.n_free + len(self.kept) - self.promised

    @property
    def n_held(self) -> int:
        """Blocks that somebody holds."""
        return self.n_blocks - 1 - self.n_free - len(self.kept)

    def admit(self, most: int) -> int:
        """Promise that many blocks; the caller has looked whether they are there."""
        assert most <= self.n_available
        holder = self.open.pop()
        self.left[holder] = most
        self.promised += most
        return holder

    def take(self, holders: Sequence[int] | NDArray[np.int64]) -> Numbers:
        """One block for each, of those promised to it."""
        n = len(holders)
        np.subtract.at(self.left, holders, 1)
        self.promised -= n
        while self.n_free < n:
            block, name = self.kept.popitem(last=False)
            del self.names[block], self.known[name]
            self._give_back(np.array([block], np.int32))
        self.n_free -= n
        taken = self.free[self.n_free : self.n_free + n].copy()
        self.refs[taken], self.owner[taken] = 1, holders
        return taken

    def share(self, blocks: Numbers) -> None:
        """One more reference each; a block may be named several times."""
        np.add.at(self.refs, blocks, 1)

    def release(self, blocks: Numbers) -> None:
        """One reference fewer each. What nobody holds is free again, and his who took it to take another, while he is here.

        Of what is known the first blocks named go last: a text without its beginning is found by nobody.
        """
        np.subtract.at(self.refs, blocks, 1)
        gone = np.unique(blocks[self.refs[blocks] == 0])
        owners = self.owner[gone]
        owners = owners[owners != NOBODY]
        np.add.at(self.left, owners, 1)
        self.promised += len(owners)
        self.owner[gone] = NOBODY
        known = [block in self.names for block in gone.tolist()] if self.names else []
        if any(known):
            leaving = set(gone[known].tolist())
            self.kept |= {block: self.names[block] for block in reversed(blocks.tolist()) if block in leaving}
        self._give_back(gone[~np.array(known)] if known else gone)

    def leave(self, holders: Sequence[int]) -> None:
        """Nothing more is promised to these, and what others still share is not theirs."""
        self.owner[np.isin(self.owner, holders)] = NOBODY
        self.promised -= int(self.left[list(holders)].sum())
        self.left[list(holders)] = 0
        self.open += holders

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Blocks that hold this beginning, without taking them: as many whole ones as are known."""
        found: list[int] = []
        name = b""
        # The last token must be read anew: its logits choose the next.
        for start in range(0, (len(tokens) - 1) // self.block * self.block if self.known else 0, self.block):
            name = _name(name, tokens[start : start + self.block])
            if name not in self.known:
                break
            found.append(self.known[name])
        return found

    def hold(self, blocks: Sequence[int]) -> None:
        """One reference more to what `find` found."""
        for block in blocks:
            self.kept.pop(block, None)
            self.refs[block] += 1

    def remember(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """These blocks hold these tokens; whole blocks are known from now on."""
        name = b""
        for at in range(min(len(tokens) // self.block, len(blocks)) if self.keep_beginnings else 0):
            name = _name(name, tokens[at * self.block : (at + 1) * self.block])
            if name not in self.known and blocks[at] not in self.names:
                self.known[name], self.names[blocks[at]] = blocks[at], name

    def _give_back(self, blocks: Numbers) -> None:
        self.free[self.n_free : self.n_free + len(blocks)] = blocks
        self.n_free += len(blocks)


def _name(before: bytes, tokens: Sequence[int]) -> bytes:
    """Of a block: its tokens and all before them. A cryptographic hash, so that no prompt can be made to find another's."""
    return hashlib.sha256(before + np.asarray(tokens, np.int64).tobytes()).digest()
