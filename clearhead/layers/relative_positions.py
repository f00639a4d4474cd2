"""Positions as a bias on the scores, by the distance of key and query: ALiBi, and T5's buckets."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.layers.positions import DistanceBias


class Alibi(DistanceBias):
    """ALiBi (Press et al. 2021): each head loses its own slope per step of distance. Encoders use both directions alike."""

    def __init__(self, *, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads

    def slope(self, head: Int[Tensor, "*_"]) -> Float[Tensor, "*_"]:
        """2^(-8i/n) for n a power of two; otherwise those of the power below, then every second one of the next power."""
        power = 2 ** int(math.log2(self.n_heads))
        exponent = torch.where(head < power, (head + 1) * (-8 / power), (2 * (head - power) + 1) * (-4 / power))
        return torch.exp2(exponent)

    def at(self, head: Int[Tensor, ""], distance: Int[Tensor, ""]) -> Float[Tensor, ""]:
        return -self.slope(head) * distance.abs()

    def dense(self, distance: Int[Tensor, "b t s"]) -> Float[Tensor, "b h t s"]:
        slopes = self.slope(torch.arange(self.n_heads, device=distance.device))
        return -slopes[:, None, None] * distance.abs()[:, None]


class RelativeBuckets(DistanceBias):
    """T5 (Raffel et al. 2020): a learned bias per head and bucket of distance; buckets widen with the distance."""

    def __init__(self, *, n_heads: int, n_buckets: int = 32, max_distance: int = 128, both_ways: bool = True) -> None:
        super().__init__()
        self.n_heads, self.n_buckets = n_heads, n_buckets
        self.max_distance, self.both_ways = max_distance, both_ways
        self.weight = nn.Parameter(torch.empty(n_buckets, n_heads).normal_(std=0.02))

    def bucket(self, distance: Int[Tensor, "*_"]) -> Int[Tensor, "*_"]:
        n = self.n_buckets // 2 if self.both_ways else self.n_buckets
        start = torch.where(distance > 0, n, 0) if self.both_ways else 0
        far = distance.abs() if self.both_ways else (-distance).clamp(min=0)
        exact = n // 2  # the first half of the buckets holds one distance each, the rest grow geometrically
        ratio = torch.log(far.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        wide = (exact + (ratio * (n - exact)).long()).clamp(max=n - 1)
        return start + torch.where(far < exact, far, wide)

    def at(self, head: Int[Tensor, ""], distance: Int[Tensor, ""]) -> Float[Tensor, ""]:
        return self.weight[self.bucket(distance), head]

    def dense(self, distance: Int[Tensor, "b t s"]) -> Float[Tensor, "b h t s"]:
        return F.embedding(self.bucket(distance), self.weight).movedim(-1, 1)
