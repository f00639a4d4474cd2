"""Sparse attention patterns: which key a query may look at, by the places of both in their text.

A `Pattern` is a rule for one pair of places, so it does not depend on the text's length: a cached step, a padded row and a packed
document see what the whole text sees. It is symmetric; a decoder's causal mask takes the half that lies behind. Places are counted
in blocks of `block` tokens, and a pair of blocks is kept if any of these says so:

    window, dilation   a block sees itself and `window` - 1 blocks to each side, `dilation` apart      (Longformer, BigBird)
    n_global           the first blocks see all and are seen by all                                    (Longformer, BigBird)
    stride             a block sees every block at a multiple of `stride` from it                      (Sparse Transformer)
    n_random           so many blocks are drawn for each block, among those between the global ones and its window (BigBird)

Written as text, as in a config, a pattern is "block=64, window=2, n_global=1, n_random=3". This file knows no torch: the rules are
arithmetic that numbers and tensors both take.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from clearhead.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

PRIME = 2**31 - 1  # numbers are drawn below it, so that products with it fit into 64 bits
LIMITS = {  # of each field, the lowest and the highest value; a higher one is a broken file's
    **dict.fromkeys(("block", "window", "dilation"), (1, 2**24)),
    **dict.fromkeys(("n_global", "stride"), (0, 2**24)),
    "n_random": (0, 64),
    "seed": (0, PRIME - 1),
}


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A sparse attention pattern. All but `block` and `seed` count blocks."""

    block: int = 1  # tokens
    window: int = 1
    dilation: int = 1
    n_global: int = 0
    stride: int = 0  # 0: none
    n_random: int = 0
    seed: int = 0  # of the random blocks

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(
                    f"a sparse pattern has {name} from {low} to {high}; got {name}={value!r}; change it, or leave it out"
                )
        if self.dilation > 1 and self.window == 1:
            raise ConfigError(
                f"dilation={self.dilation} spreads the blocks of a window, and window=1 has none to the side; raise window"
            )
        if self.seed and not self.n_random:
            raise ConfigError(f"seed={self.seed} draws random blocks, and n_random=0; set n_random, or leave seed out")

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """The pattern that a text such as "block=64, window=2, n_global=1" describes."""
        known, values = [field.name for field in fields(cls)], dict[str, int]()
        for part in re.split(r"[,\s]+", text.strip()):
            name, equals, value = part.partition("=")
            if name not in known:
                raise ConfigError(f"a sparse pattern has no {name!r}; got {text!r}; {did_you_mean(name, known)}")
            if not equals or not value.isdecimal() or name in values:
                raise ConfigError(
                    f"a sparse pattern gives each of its fields one whole number; got {part!r} in {text!r}; "
                    f'write it as in "block=64, window=2, n_global=1"'
                )
            values[name] = int(value)
        return cls(**values)

    def __str__(self) -> str:
        """The text that `parse` reads: the fields that are not at their default, and `window`."""
        shown = [f for f in fields(self) if f.name == "window" or getattr(self, f.name) != f.default]
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in shown)

    @property
    def reach(self) -> int:
        """The distance of the window's last block."""
        return (self.window - 1) * self.dilation

    def keeps(self, query: Any, key: Any) -> Any:
        """Whether a query at one place may look at a key at another; for whole numbers, or tensors of them that broadcast."""
        return self._keeps_block(query // self.block, key // self.block)

    def _keeps_block(self, i: Any, j: Any) -> Any:
        apart = i - j
        kept = abs(apart) <= self.reach
        if self.dilation > 1:
            kept = kept & (apart % self.dilation == 0)
        if self.n_global:
            kept = kept | (i < self.n_global) | (j < self.n_global)
        if self.stride:
            kept = kept | (apart % self.stride == 0)
        for n in range(self.n_random):
            for row, drawn in ((i, j), (j, i)):
                kept = kept | ((self._choices(row) > 0) & (self._drawn(row, n) == drawn))
        return kept

    def _choices(self, row: Any) -> Any:
        """How many blocks there are before a block, between the global ones and its window. None, if not above 0."""
        return row - self.reach - self.n_global

    def _drawn(self, row: Any, n: int) -> Any:
        """The n-th block drawn for a block: the choices are cut into `n_random` equal parts, and one of the n-th is drawn."""
        choices = self._choices(row)
        start, stop = n * choices // self.n_random, (n + 1) * choices // self.n_random
        chance = _mix(_mix(_mix(self.seed + 1) + n) + row)
        return self.n_global + start + chance * (stop - start) // PRIME

    # For kernels: what the pattern says of all pairs of a tile, from the lowest and the highest places of its queries and keys.

    def may_keep(self, queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], side: int) -> Tensor:
        """Whether a tile of `side` places each way holds a pair that is kept. Where places start anew it may say so in vain."""
        (a, b), (c, d) = ([x // self.block for x in ends] for ends in (queries, keys))
        nearest, farthest = a - d, b - c
        low, high = nearest.clamp(min=-self.reach), farthest.clamp(max=self.reach)
        kept = high // self.dilation * self.dilation >= low
        if self.n_global:
            kept = kept | (a < self.n_global) | (c < self.n_global)
        if self.stride:
            kept = kept | (farthest // self.stride * self.stride >= nearest)
        if self.n_random:
            n_rows = side // self.block + 2
            kept = kept | (b - a >= n_rows) | (d - c >= n_rows)
            for step in range(n_rows):
                for (first, last), (low, high) in (((a, b), (c, d)), ((c, d), (a, b))):
                    row = first + step
                    some = (row <= last) & (self._choices(row) > 0)
                    for n in range(self.n_random):
                        drawn = self._drawn(row, n)
                        kept = kept | (some & (low <= drawn) & (drawn <= high))
        return kept

    def keeps_all(self, queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]) -> Tensor:
        """Whether every pair of a tile is kept. Of a tile with several blocks it may say no in vain."""
        (a, b), (c, d) = ([x // self.block for x in ends] for ends in (queries, keys))
        kept = (a == b) & (c == d) & self._keeps_block(a, c)
        if self.dilation == 1:
            kept = kept | ((a - d >= -self.reach) & (b - c <= self.reach))
        return kept | (b < self.n_global) | (d < self.n_global) if self.n_global else kept

    # Closed forms, for costs.

    def count_pairs(self, T: int, S: int, *, causal: bool) -> int:
        """The pairs that are kept: of T = S tokens among themselves, or of one token (T = 1) after S - 1."""
        if T == 1 and causal:
            row, offset = divmod(S - 1, self.block)
            return self.count_before(row) * self.block + offset + 1
        assert T == S, "several tokens after a cache are not counted"
        n, rest = divmod(T, self.block)
        before = self.block**2 * sum(map(self.count_before, range(n))) + rest * self.block * self.count_before(n)
        if causal:
            return before + n * self.block * (self.block + 1) // 2 + rest * (rest + 1) // 2
        return 2 * before + n * self.block**2 + rest**2

    def count_before(self, row: int) -> int:
        """How many of the blocks before a block are kept."""
        if row <= self.n_global:
            return row
        apart = row - self.n_global  # the distances that the global blocks leave: 1 .. apart
        count = self.n_global + min(self.window - 1, apart // self.dilation)
        if self.stride:
            both = math.lcm(self.dilation, self.stride)
            count += apart // self.stride - min(apart, self.reach) // both
        if not self.stride:
            return count + max(0, min(self.n_random, self._choices(row)))
        drawn = {self._drawn(row, n) for n in range(self.n_random)} if self._choices(row) > 0 else set[int]()
        return count + sum((row - j) % self.stride != 0 for j in drawn)


def _mix(x: Any) -> Any:
    """A number below PRIME that looks random, from one up to twice as large."""
    x = x % PRIME
    for _ in range(2):
        x = (x ^ (x >> 15)) * 73_244_475 % PRIME
    return x
