"""Masks and biases as questions about one pair of tokens, for the naive attention of clearhead/lessons/references.py.

Shares no code with clearhead's layers; only `Facts.mask` and `make_bias` build clearhead's own objects, to be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from clearhead.layers import masks
from clearhead.layers.masks import Mask
from clearhead.layers.positions import Bias
from clearhead.layers.relative_positions import Alibi, RelativeBuckets
from clearhead.lessons.references import BiasAt
from clearhead.sparsity import Pattern

# Sizes of every test here, all different: batch, heads, key heads, queries, keys, head width.
B, H, K, T, S, E = 2, 6, 3, 7, 11, 5


@dataclass
class Facts:
    """The facts of one mask, and the two things to compare: clearhead's `Mask` of them, and the plain question."""

    causal: bool = False
    window: int = 0
    real: list[list[bool]] | None = None
    documents: list[list[list[int]]] = field(default_factory=list)
    patterns: list[Pattern] = field(default_factory=list)

    def mask(self) -> Mask:
        parts = [masks.causal()] if self.causal else []
        parts += [masks.window(self.window)] if self.window else []
        parts += [masks.padding(torch.tensor(self.real))] if self.real else []
        parts += [masks.documents(torch.tensor(ids)) for ids in self.documents]
        parts += [masks.sparse(pattern) for pattern in self.patterns]
        return reduce(and_, parts, Mask())

    def place(self, b: int, i: int) -> int:
        """A token's place among the real tokens of its row; padding stands before all of them, at -1."""
        if self.real is None:
            return i
        return sum(self.real[b][:i]) if self.real[b][i] else -1

    def distance(self, b: int, i: int, j: int) -> int:
        return self.place(b, j) - self.place(b, i)

    def may(self, b: int, i: int, j: int) -> bool:
        distance = self.distance(b, i, j)
        return (
            (self.real is None or self.real[b][j])
            and (not self.causal or distance <= 0)
            and (not self.window or abs(distance) < self.window)
            and all(ids[b][i] == ids[b][j] for ids in self.documents)
            and all(keeps(pattern, self.place_in_text(b, i), self.place_in_text(b, j)) for pattern in self.patterns)
        )

    def place_in_text(self, b: int, i: int) -> int:
        """The same, counted from where the token's document begins."""
        if self.real is not None and not self.real[b][i]:
            return -1
        start = i
        while start > 0 and all(ids[b][start - 1] == ids[b][i] for ids in self.documents):
            start -= 1
        return sum(self.real[b][start:i]) if self.real is not None else i - start

    def pairs(self, B: int, T: int, S: int) -> Tensor:
        """Every pair's answer, (B, T, S)."""
        return torch.tensor([[[self.may(b, t + S - T, j) for j in range(S)] for t in range(T)] for b in range(B)])


def keeps(pattern: Pattern, query: int, key: int) -> bool:
    """Whether a sparse pattern keeps a pair, kind by kind. What is drawn at random is its own to say."""
    i, j = query // pattern.block, key // pattern.block
    steps = [n * pattern.dilation for n in range(pattern.window)]
    near = i - j in steps or j - i in steps
    is_global = pattern.n_global > 0 and min(i, j) < pattern.n_global
    strided = pattern.stride > 0 and (i - j) % pattern.stride == 0
    return near or is_global or strided or (pattern.n_random > 0 and bool(pattern.keeps(query, key)))


BIASES = ["none", "written", "written per row", "alibi", "t5", "t5 one way"]


def make_bias(kind: str, facts: Facts, T: int = T, S: int = S) -> tuple[Bias | None, BiasAt | None]:
    """clearhead's bias of a kind for H heads, in float64, and the same as a question about one pair."""
    if kind == "none":
        return None, None
    if kind == "alibi":
        slopes = alibi_slopes(H)
        return Alibi(n_heads=H), lambda b, h, i, j: torch.tensor(-slopes[h] * abs(facts.distance(b, i, j))).double()
    if kind.startswith("t5"):
        both_ways = kind == "t5"
        ours = RelativeBuckets(n_heads=H, n_buckets=8, max_distance=13, both_ways=both_ways).double()
        torch.nn.init.normal_(ours.weight)
        return ours, lambda b, h, i, j: ours.weight[t5_bucket(facts.distance(b, i, j), 8, 13, both_ways), h]
    shape = (1, H, T, S) if kind == "written" else (B, 1, T, S)
    table = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    return table, lambda b, h, i, j: table[b % shape[0], h % shape[1], i - (S - T), j]


def alibi_slopes(n: int) -> list[float]:
    """As the paper's authors wrote it down: a geometric series, and for other counts the missing ones from twice as many."""
    if (n & (n - 1)) == 0:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]
    below = 2 ** math.floor(math.log2(n))
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: n - below]


def t5_bucket(distance: int, n_buckets: int, max_distance: int, both_ways: bool) -> int:
    """Buckets of one distance each, then ever wider ones; keys after the query have the second half (T5, section 2.1)."""
    start = 0
    if both_ways:
        n_buckets //= 2
        start = n_buckets if distance > 0 else 0
        far = abs(distance)
    else:
        far = max(-distance, 0)
    exact = n_buckets // 2
    if far < exact:
        return start + far
    wider = math.log(far / exact) / math.log(max_distance / exact) * (n_buckets - exact)
    return start + min(exact + int(wider), n_buckets - 1)


def random_qkv(
    *, T: int = T, S: int = S, H: int = H, K: int = K, dtype: torch.dtype = torch.float64, grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (B, H, T, E), (B, K, S, E), (B, K, S, E)
    q, k, v = (torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad) for shape in shapes)
    return q, k, v
