"""Geometry: how nearly orthogonal random directions are, how many fit, and what a trained model's words do with that room."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.costs.geometry import (
    PACKED,
    embedding_angles,
    greedy_bound,
    log_pair_share,
    structured_bound,
    union_bound,
    upper_bound,
)
from clearhead.experiments import facts
from clearhead.experiments.embeddings import small_model, windows
from clearhead.experiments.fitting import fit
from clearhead.experiments.result import Cell, Chart, Curve, Result, Table, decide, judge, middle, percent
from clearhead.inside.neighbours import embedding_table

DEGREES = 2
NAMES = ("random directions", "before training", "after training")


@dataclass(frozen=True)
class Size:
    widths: tuple[int, ...] = (2, 16, 128, 768, 4_096, 12_288)
    count: int = 200  # of random directions
    words: int = 600
    steps: int = 250
    rows: int = 32


SIZES = {
    "quick": Size(widths=(2, 64), count=20, words=150, steps=4, rows=4),
    "usual": Size(),
    "full": Size(count=2_000, words=4_000, steps=3_000),
}


@dataclass(frozen=True)
class Measured:
    exact: dict[int, float]  # share of random pairs within DEGREES of a right angle, in closed form
    sampled: dict[int, list[float]]  # the same, counted; one a seed
    counts: dict[int, tuple[float, float]]  # proven: at least and at most so many directions fit
    trained_width: int
    within: dict[str, list[float]]  # of NAMES: the share within 10 degrees
    angles: dict[str, list[float]]  # of the first seed: share of pairs by angle, in bins of 5 degrees
    mean: dict[str, list[float]]  # angle


def measure(size: Size, seeds: range) -> Measured:
    eps = math.sin(math.radians(DEGREES))
    sampled: dict[int, list[float]] = {n: [] for n in size.widths}
    within: dict[str, list[float]] = {name: [] for name in NAMES}
    mean: dict[str, list[float]] = {name: [] for name in NAMES}
    angles: dict[str, list[float]] = {}
    vocab, ids = facts.number_words(facts.words_of(facts.real_text(None)), size.words)
    width = 0
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for n in size.widths:
            sampled[n].append(share_within(torch.randn(size.count, n, generator=generator), eps))
        model = small_model(vocab, seed)
        width = embedding_table(model).shape[1]
        tables = {NAMES[0]: torch.randn(len(vocab), width, generator=generator)}
        tables[NAMES[1]] = embedding_table(model).detach().clone()
        fit(model, windows(ids, size.rows), steps=size.steps, seed=seed)
        tables[NAMES[2]] = embedding_table(model).detach()
        for name, table in tables.items():
            found = embedding_angles(table)
            within[name].append(found.share_within(10))
            mean[name].append(found.mean)
            angles.setdefault(name, binned(found.histogram))
    return Measured(
        exact={n: 1 - math.exp(log_pair_share(n, eps)) for n in size.widths},
        sampled=sampled,
        counts={n: (fits(n, eps), upper_bound(n, eps)) for n in size.widths},
        trained_width=width,
        within=within,
        angles=angles,
        mean=mean,
    )


def share_within(vectors: Tensor, eps: float) -> float:
    """The share of pairs with a cosine of at most eps."""
    unit = F.normalize(vectors, dim=1)
    above = torch.ones(len(unit), len(unit), dtype=torch.bool).triu(1)
    return float(((unit @ unit.T).abs() <= eps)[above].float().mean())


def fits(n: int, eps: float) -> float:
    """The best of the bounds from below, and of the sets that were found by optimisation."""
    return max(
        float(PACKED.get((n, DEGREES), 0)), union_bound(n, eps), greedy_bound(n, eps), float(structured_bound(n, eps))
    )


def binned(histogram: tuple[int, ...]) -> list[float]:
    """Bins of 5 degrees, as shares."""
    total = sum(histogram)
    return [sum(histogram[start : start + 5]) / total for start in range(0, len(histogram), 5)]


def conclude(m: Measured) -> Result:
    widths = list(m.exact)
    wide = widths[-1]
    low, high = m.counts[wide]
    random, before, after = NAMES
    rows: list[tuple[Cell, ...]] = [
        (n, f"{100 * m.exact[n]:.1f}%", percent(m.sampled[n]), spell_count(m.counts[n][0]), spell_count(m.counts[n][1]))
        for n in widths
    ]
    trained = [(name, percent(m.within[name]), f"{middle(m.mean[name]):.1f}") for name in NAMES]
    small = [n for n in widths if m.counts[n][1] < 2 * n]
    bins = tuple(5 * at + 2.5 for at in range(len(m.angles[random])))
    return Result(
        tables=(
            Table(
                f"Angles of {90 - DEGREES} to {90 + DEGREES} degrees",
                ("dimensions", "random pairs, exact", "counted", "fit at least", "fit at most"),
                tuple(rows),
            ),
            Table(
                f"Words in {m.trained_width} dimensions",
                ("", "pairs within 10 degrees of a right angle", "mean angle"),
                tuple(trained),
            ),
        ),
        charts=charts_of(m, widths, bins),
        findings=(
            decide(
                f"In {wide:,} dimensions two random directions are almost orthogonal.",
                f"{100 * m.exact[wide]:.1f}% of random pairs have {90 - DEGREES} to {90 + DEGREES} degrees (counted: "
                f"{percent(m.sampled[wide])}).",
                m.exact[wide] > 0.9,
            ),
            decide(
                f"Far more than n directions fit into n dimensions at {90 - DEGREES} to {90 + DEGREES} degrees, for every n.",
                f"In {wide:,} dimensions at least {spell_count(low)} fit and at most {spell_count(high)}. "
                + (
                    f"Not even twice as many as dimensions, proven, for n = {', '.join(map(str, small))}."
                    if small
                    else ""
                ),
                not small,
            ),
            judge(
                "The words of a trained model are almost orthogonal, as random directions are.",
                f"Within 10 degrees of a right angle are {percent(m.within[after])} of the pairs after training, "
                f"{percent(m.within[before])} before, {percent(m.within[random])} of random ones; the mean angle after training is "
                f"{middle(m.mean[after]):.1f} degrees.",
                more=m.within[after],
                less=[0.9 * share for share in m.within[random]],
                margin=0.0,
            ),
        ),
    )


def spell_count(n: float) -> str:
    return f"{n:,.0f}" if n < 1e7 else f"{n:.1e}"


def charts_of(m: Measured, widths: list[int], bins: tuple[float, ...]) -> tuple[Chart, ...]:
    return (
        Chart(
            f"Pairs within {DEGREES} degrees of a right angle",
            "dimensions",
            "share",
            (
                Curve("exact", tuple(widths), tuple(m.exact.values())),
                Curve("counted", tuple(widths), tuple(map(middle, m.sampled.values()))),
            ),
            log_x=True,
        ),
        Chart(
            f"Angles between words, {m.trained_width} dimensions",
            "degrees",
            "share of pairs",
            tuple(Curve(name, bins, tuple(values)) for name, values in m.angles.items()),
        ),
    )
