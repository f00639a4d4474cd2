"""The scale of attention: softmax(q k^T) with and without the division by sqrt(d). Its entropy and its gradient for random q and k,
and what training makes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from clearhead.experiments.fitting import accuracy, build, fit, small
from clearhead.experiments.result import Chart, Curve, Result, Table, if_learnt, judge, middle, percent, spell
from clearhead.experiments.tasks import repetition
from clearhead.inside.head_scores import entropy

WAYS = ("with 1/sqrt(d)", "without")
VOCAB, LENGTH, KEYS = 16, 24, 64


@dataclass(frozen=True)
class Size:
    widths: tuple[int, ...] = (8, 32, 128, 512, 2048)
    rows: int = 64
    trained: tuple[int, ...] = (16, 64, 256)  # head widths of the models that are trained
    steps: int = 300


SIZES = {
    "quick": Size(widths=(8, 128), rows=8, trained=(16,), steps=4),
    "usual": Size(),
    "full": Size(widths=(8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096), rows=256, steps=1_500),
}


@dataclass(frozen=True)
class Measured:
    """By way and width, one number a seed."""

    entropy: dict[str, dict[int, list[float]]]  # share of log(KEYS), the entropy of equal weights
    largest: dict[str, dict[int, list[float]]]  # weight
    slope: dict[
        str, dict[int, list[float]]
    ]  # mean of p (1 - p) over the keys, times KEYS: how much a score can still change
    accuracy: dict[str, dict[int, list[float]]]  # of trained models, by head width


def measure(size: Size, seeds: range) -> Measured:
    def table(widths: tuple[int, ...]) -> dict[str, dict[int, list[float]]]:
        return {way: {width: [] for width in widths} for way in WAYS}

    m = Measured(table(size.widths), table(size.widths), table(size.widths), table(size.trained))
    data = repetition(rows=16, length=LENGTH, vocab=VOCAB)
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for width in size.widths:
            q = torch.randn(size.rows, width, generator=generator)
            k = torch.randn(KEYS, width, generator=generator)
            for way, factor in zip(WAYS, (1 / math.sqrt(width), 1.0), strict=True):
                weights = (q @ k.T * factor).softmax(-1)
                m.entropy[way][width].append(float(entropy(weights).mean()) / math.log(KEYS))
                m.largest[way][width].append(float(weights.max(-1).values.mean()))
                m.slope[way][width].append(float((weights * (1 - weights)).mean()) * KEYS)
        for width in size.trained:
            for way, scale in zip(WAYS, (0.0, 1.0), strict=True):
                sizes: dict[str, Any] = dict(
                    n_heads=1, d_model=64, d_head=width, d_ff=64, vocab_size=VOCAB, max_len=LENGTH
                )
                model = build(small(**sizes, attention_scale=scale, positions="rotary"), seed)
                fit(model, data, steps=size.steps, lr=5e-3, seed=seed, enough=0.1)
                m.accuracy[way][width].append(accuracy(model, data, seed=seed))
    return m


def conclude(m: Measured) -> Result:
    widths, trained = list(m.entropy[WAYS[0]]), list(m.accuracy[WAYS[0]])
    wide, with_it, without = widths[-1], *WAYS
    rows = [
        (width, *(middle(part[way][width]) for way in WAYS for part in (m.entropy, m.largest, m.slope)))
        for width in widths
    ]
    learnt = [(width, *(percent(m.accuracy[way][width]) for way in WAYS)) for width in trained]
    gaps = [[m.accuracy[way][width] for width in trained] for way in WAYS]
    worst = max(range(len(trained)), key=lambda n: sum(gaps[0][n]) - sum(gaps[1][n]))
    return Result(
        tables=(
            Table(
                f"Random queries and {KEYS} keys: entropy (share of the largest), largest weight, gradient's factor",
                ("d", *(f"{what}, {way}" for way in WAYS for what in ("entropy", "largest", "gradient"))),
                tuple(rows),
            ),
            Table("Repetition completed after training, one head", ("d", *WAYS), tuple(learnt)),
        ),
        charts=(
            chart("Entropy of the weights", "share of log 64", m.entropy),
            chart("Gradient's factor, sum of p (1 - p)", "sum", m.slope),
            chart("After training", "share right", m.accuracy),
        ),
        findings=(
            judge(
                "Without the scale, wide heads' softmax puts all weight on one key.",
                f"At d = {wide} the largest of {KEYS} weights is {spell(m.largest[without][wide])} without the scale, "
                f"{spell(m.largest[with_it][wide])} with it.",
                more=m.largest[without][wide],
                less=[0.5],
                margin=0.0,
            ),
            judge(
                "Then hardly any gradient passes through the softmax.",
                f"The gradient's factor at d = {wide} is {spell(m.slope[without][wide], 3)} without, "
                f"{spell(m.slope[with_it][wide], 3)} with it.",
                more=[value / 2 for value in m.slope[with_it][wide]],
                less=m.slope[without][wide],
                margin=0.0,
            ),
            if_learnt(
                max(max(each) for each in gaps[0]) > 0.5,
                judge(
                    "So a model without the scale trains worse.",
                    f"The largest difference is at d = {trained[worst]}: {percent(gaps[0][worst])} right with, "
                    f"{percent(gaps[1][worst])} without.",
                    more=gaps[0][worst],
                    less=gaps[1][worst],
                    margin=0.05,
                ),
            ),
        ),
    )


def chart(title: str, label: str, values: dict[str, dict[int, list[float]]]) -> Chart:
    curves = tuple(Curve(way, tuple(values[way]), tuple(middle(each) for each in values[way].values())) for way in WAYS)
    return Chart(title, "width of a head, d", label, curves, log_x=True)
