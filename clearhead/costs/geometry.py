"""How many almost orthogonal directions fit into n dimensions: bounds, an experiment, and a model's own embedding.

N(n, eps) is the size of the largest set of unit vectors with every |<x, y>| <= eps = sin(delta): "angles of 88 to 92 degrees" is
delta = 2 degrees. It is not known exactly; these bounds are proven:

    from below   union       exp(n eps^2 / 4): random signs, and the union bound over pairs
                 greedy      1 / p: add vectors until caps around them, each a share p of the sphere, cover it (Gilbert-Varshamov)
                 structured  families from coding theory, and their direct sums (`structured_bound` lists them)
    from above   Welch       n (1 - eps^2) / (1 - n eps^2), while n eps^2 < 1
                 Levenshtein the linear-programming bound, for every eps

So the count is a little above n until eps^2 is about 1 / n, and grows exponentially only if n is far above 1 / eps^2.

A formula that is often quoted, floor(2^((n/2)(1 - ln(1 / sin a)))) vectors at angles of at least a, is wrong (`popular_formula`).
At a = 90 degrees, where exactly n vectors fit, it says 2^(n/2), and just below it hardly changes. For n = 128 at 89 degrees it
says 1.8e19; the proven upper bound is 133. It uses an asymptotic law for every n, and with the wrong exponent.

Only `embedding_angles` loads torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from clearhead.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

CLOSE = 1e-12  # relative tolerance: a bound that is a whole number may be computed a rounding error below it
BINS = 180

# Vectors found by optimisation (tests/costs/test_geometry.py), within so many degrees of a right angle: (n, degrees) -> count.
PACKED = {(128, 1): 131, (128, 2): 144, (128, 5): 448, (768, 1): 900, (768, 2): 1536}


def log_beta_share(x: float, a: float, b: float) -> float:
    """log I_x(a, b), the regularised incomplete beta function, by its continued fraction (Lentz): no underflow at any size."""
    if not (0 <= x <= 1 and a > 0 and b > 0):
        raise InputError(f"the incomplete beta function takes 0 <= x <= 1 and a, b > 0; got x={x}, a={a}, b={b}")
    if x in (0.0, 1.0):
        return 0.0 if x else -math.inf
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast below the mean; above, use 1 - the other tail
        return math.log1p(-math.exp(log_beta_share(1 - x, b, a)))
    log_front = a * math.log(x) + b * math.log1p(-x) - math.log(a)
    log_front -= math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 100_000):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / (1 + step * d), 1 + step / c
            fraction *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return log_front + math.log(fraction)


def log_pair_share(n: int, eps: float) -> float:
    """log of the probability that two random directions have |<x, y>| >= eps: I_(1 - eps^2)((n - 1) / 2, 1 / 2)."""
    return log_beta_share(1 - eps * eps, (n - 1) / 2, 0.5)


def angle_density(n: int, degrees: float) -> float:
    """Density, per degree, of the angle between two random directions: sin^(n-2), over its integral."""
    sine = math.sin(math.radians(degrees))
    if sine <= 0:
        return 0.0
    log_area = math.lgamma(0.5) + math.lgamma((n - 1) / 2) - math.lgamma(n / 2)
    return math.exp((n - 2) * math.log(sine) - log_area) * math.pi / 180


def union_bound(n: int, eps: float) -> float:
    return math.exp(n * eps * eps / 4)


def greedy_bound(n: int, eps: float) -> float:
    return math.exp(-log_pair_share(n, eps))


def structured_bound(n: int, eps: float) -> int:
    """The largest number of vectors from known families, also combined in orthogonal subspaces.

    A basis has d vectors in d dimensions. For odd m and d = 2^m there are d^2 at eps = sqrt(2 / d) and d^3 at 2 sqrt(2 / d); for
    d = 4^k Kerdock's sets have d (d + 2) / 2 at 1 / sqrt(d). Vectors of orthogonal subspaces are orthogonal: counts add.
    """
    families: list[tuple[int, int]] = [(1, 1)]
    for m in range(1, n.bit_length()):
        d = 2**m
        found = [d]
        if m % 2:
            found += [d**2] * (eps >= math.sqrt(2 / d)) + [d**3] * (eps >= 2 * math.sqrt(2 / d))
        elif eps >= 1 / math.sqrt(d):
            found.append(d * (d + 2) // 2)
        if max(found) > d:
            families.append((d, max(found)))
    best = [0] * (n + 1)
    for size in range(1, n + 1):
        best[size] = max(count + best[size - d] for d, count in families if d <= size)
    return best[n]


def upper_bound(n: int, eps: float) -> float:
    """An upper bound: Welch's for small eps, else Levenshtein's. Results up to 2^53 are rounded down to whole numbers.

    Levenshtein's: in t = <x, y>^2 the directions of R^n have the weight t^(-1/2) (1 - t)^((n-3)/2). A quadrature for it with nodes
    at 1, at eps^2 and, for every second degree, at 0 gives N <= 1 / (its weight at 1). The polynomial that vanishes at the other
    nodes is Q_k - c Q_(k-1) in Jacobi polynomials Q of the weight times (1 - t), or times t (1 - t), scaled to 1 at 1, so
        N <= (1 - c) / (1 / R_k - c / R_(k-1)),   c = Q_k / Q_(k-1) at eps^2,   R_k = C(n + 2k - 1, 2k), or C(n + 2k, 2k + 1),
    for eps^2 between the largest zeros of the neighbouring polynomials.
    """
    if not (n >= 2 and 0 <= eps < 1):
        raise InputError(f"a bound needs n of at least 2 and 0 <= eps < 1; got n={n}, eps={eps}; eps is sin(delta)")
    t = eps * eps
    if t <= 1 / (n + 2):
        return _round_down(n * (1 - t) / (1 - n * t))
    k = 1
    while True:
        for odd in (0, 1):
            a, b = (n - 1) / 2, odd - 0.5
            if t <= _largest_zero(k, a, b) * (1 + CLOSE):
                c = _ratio(k, a, b, t)
                above, below = (math.comb(n + 2 * j - 1 + odd, 2 * j + odd) for j in (k, k - 1))
                return _round_down((1 - c) / (1 / above - c / below))
        k += 1


def least_coherence(n: int, count: int) -> float:
    """Some pair of any `count` vectors in R^n has |<x, y>| of at least this: the smallest eps whose upper bound allows `count`."""
    low, high = 0.0, 1 - 1e-9
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if upper_bound(n, middle) < count else (low, middle)
    return high


def popular_formula(n: int, degrees: float) -> float:
    """log2 of the wrong formula floor(2^((n/2)(1 - ln(1 / sin a)))) (see above)."""
    return n / 2 * (1 + math.log(math.sin(math.radians(degrees))))


def _largest_zero(k: int, a: float, b: float) -> float:
    """Of the Jacobi polynomial of degree k for (1 - t)^a t^b on 0 to 1: the largest eigenvalue of its recurrence."""
    i, j = np.arange(1, k), np.arange(1, k) * 2 + a + b
    first = (b - a) / (a + b + 2)
    diagonal = np.concatenate([[first], (b * b - a * a) / (j * (j + 2))])
    # i + a + b and j - 1 are the same for i = 1, and may both be 0.
    tail = np.where(i == 1, 1.0, (i + a + b) / np.where(i == 1, 1.0, j - 1))
    beside = np.sqrt(4 * i * (i + a) * (i + b) * tail / (j * j * (j + 1)))
    matrix = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    return (1 + float(np.linalg.eigvalsh(matrix)[-1])) / 2


def _ratio(k: int, a: float, b: float, t: float) -> float:
    """Q_k(t) / Q_(k-1)(t), from the three-term recurrence of Jacobi polynomials."""
    x = 2 * t - 1
    ratio = (a + 1) + (a + b + 2) * (x - 1) / 2
    for i in range(2, k + 1):
        s = 2 * i + a + b
        middle = (s - 1) * (s * (s - 2) * x + a * a - b * b)
        ratio = (middle - 2 * (i + a - 1) * (i + b - 1) * s / ratio) / (2 * i * (i + a + b) * (s - 2))
    return ratio * k / (k + a)


def _round_down(bound: float) -> float:
    return float(math.floor(bound * (1 + CLOSE))) if bound < 2**53 else bound


def sample_coherence(n: int, count: int, seed: int = 0) -> float:
    """The largest |<x, y>| of `count` random directions."""
    vectors = np.random.default_rng(seed).standard_normal((count, n))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    worst = 0.0
    for start in range(0, count, 1024):
        strip = np.abs(vectors[start : start + 1024] @ vectors[start:].T)
        strip[np.arange(len(strip)), np.arange(len(strip))] = 0
        worst = max(worst, float(strip.max()))
    return worst


def expected_coherence(n: int, count: int) -> float:
    """The median of `sample_coherence`: where the number of pairs, times the probability for one pair, is log 2."""
    pairs = count * (count - 1) / 2
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if math.log(pairs) + log_pair_share(n, middle) > math.log(math.log(2)) else (low, middle)
        )
    return high


@dataclass(frozen=True)
class Angles:
    """The pairwise angles of a set of directions, and the bound on their coherence."""

    n: int
    count: int
    histogram: tuple[int, ...]  # pairs in each of BINS equal bins from 0 to 180 degrees
    coherence: float  # the largest |cos|
    bound: float  # the smallest coherence that is possible

    @property
    def pairs(self) -> int:
        return self.count * (self.count - 1) // 2

    def share_within(self, degrees: int) -> float:
        """The share of pairs whose angle differs from 90 by less than so many degrees."""
        middle = BINS // 2
        return sum(self.histogram[middle - degrees : middle + degrees]) / self.pairs

    @property
    def mean(self) -> float:
        """The mean angle, to a bin's width."""
        return sum((i + 0.5) * 180 / BINS * pairs for i, pairs in enumerate(self.histogram)) / self.pairs


def embedding_angles(table: Tensor, most: int = 10_000) -> Angles:
    """All pairwise angles of a table's rows, or of `most` of them, evenly spaced. Rows of zeros are left out."""
    import torch
    import torch.nn.functional as F

    table = table.detach().float()
    table = table[table.norm(dim=1) > 0]
    if len(table) > most:
        table = table[torch.linspace(0, len(table) - 1, most).long()]
    count, n = table.shape
    if count < 2 or n < 2:
        raise InputError(f"angles need two rows or more of two numbers or more; got {count} rows of {n}")
    table = F.normalize(table, dim=1)
    edges = torch.linspace(0, 180, BINS + 1)[1:-1].deg2rad().cos().flip(0)
    total, worst = torch.zeros(BINS, dtype=torch.int64), 0.0
    for start in range(0, count, 512):
        strip = table[start : start + 512] @ table[start:].T
        above = torch.ones_like(strip, dtype=torch.bool).triu(1)
        cosines = strip[above]
        worst = max(worst, float(cosines.abs().max())) if len(cosines) else worst
        total += torch.bincount(torch.bucketize(cosines, edges), minlength=BINS).flip(0)
    return Angles(n, count, tuple(total.tolist()), min(worst, 1.0), least_coherence(n, count))
