"""Training: with and without warm-up, norm first and norm after; Adam against SGD, each at its best learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from clearhead.experiments.fitting import build, fit, last, small
from clearhead.experiments.result import Chart, Curve, Finding, Result, Table, if_learnt, judge, middle, spell
from clearhead.experiments.tasks import repetition

NORMS = {"norm after (paper)": False, "norm first": True}
WARMUPS = ("with warm-up", "without")
VOCAB, LENGTH = 16, 24


@dataclass(frozen=True)
class Size:
    steps: int = 200
    rows: int = 16
    layers: int = 3
    adam: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    sgd: tuple[float, ...] = (0.03, 0.3, 1.0)


SIZES = {
    "quick": Size(steps=4, rows=4, layers=1, adam=(1e-3, 1e-2), sgd=(0.1,)),
    "usual": Size(),
    "full": Size(steps=1_500, rows=32, layers=6, adam=(3e-4, 1e-3, 3e-3, 1e-2), sgd=(0.01, 0.03, 0.1, 0.3, 1.0)),
}


@dataclass(frozen=True)
class Measured:
    """The loss of the last steps, one a seed."""

    warmup: dict[str, dict[str, dict[float, list[float]]]]  # by norm, with or without, and learning rate
    sgd: dict[float, list[float]]  # norm first, with warm-up, momentum 0.9
    known: float  # the loss of a model that knows nothing


def measure(size: Size, seeds: range) -> Measured:
    data = repetition(rows=size.rows, length=LENGTH, vocab=VOCAB)

    def loss(seed: int, lr: float, warmup: int, *, norm_first: bool = True, sgd: bool = False) -> float:
        fields: dict[str, Any] = dict(n_layers=size.layers, vocab_size=VOCAB, positions="rotary", max_len=LENGTH)
        model = build(small(**fields, norm_first=norm_first), seed)
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9) if sgd else None
        return last(fit(model, data, steps=size.steps, lr=lr, warmup=warmup, seed=seed, optimizer=optimizer))

    rises = dict(zip(WARMUPS, (max(size.steps // 5, 1), 0), strict=True))
    return Measured(
        {
            norm: {
                way: {lr: [loss(seed, lr, rises[way], norm_first=first) for seed in seeds] for lr in size.adam}
                for way in WARMUPS
            }
            for norm, first in NORMS.items()
        },
        {lr: [loss(seed, lr, rises["with warm-up"], sgd=True) for seed in seeds] for lr in size.sgd},
        float(torch.tensor(float(VOCAB)).log()),
    )


def conclude(m: Measured) -> Result:
    rates = list(m.warmup["norm first"]["without"])
    pre = m.warmup["norm first"]
    best = {way: min(values.values(), key=middle) for way, values in (("Adam", pre["with warm-up"]), ("SGD", m.sgd))}
    rows = [
        (f"{norm}, {way}", *(spell(m.warmup[norm][way][lr], 2) for lr in rates)) for norm in NORMS for way in WARMUPS
    ]
    return Result(
        tables=(
            Table(
                f"AdamW: loss after training ({m.known:.2f} knows nothing)",
                ("", *(f"lr {lr:g}" for lr in rates)),
                tuple(rows),
            ),
            Table(
                "SGD with momentum, norm first, with warm-up",
                ("", *(f"lr {lr:g}" for lr in m.sgd)),
                (("loss", *(spell(values, 2) for values in m.sgd.values())),),
            ),
        ),
        charts=(
            Chart(
                "AdamW",
                "learning rate",
                "loss",
                tuple(
                    Curve(f"{norm}, {way}", tuple(rates), tuple(middle(m.warmup[norm][way][lr]) for lr in rates))
                    for norm in NORMS
                    for way in WARMUPS
                ),
                log_x=True,
            ),
            Chart(
                "The best of each",
                "",
                "loss",
                (Curve("loss", tuple(best), tuple(middle(values) for values in best.values())),),
            ),
        ),
        findings=tuple(if_learnt(min(best["Adam"]) < 0.8 * m.known, each) for each in findings(m, best)),
    )


def findings(m: Measured, best: dict[str, list[float]]) -> tuple[Finding, ...]:
    post, pre = m.warmup["norm after (paper)"], m.warmup["norm first"]
    rates = list(pre["without"])
    high = rates[-1]
    return (
        judge(
            "Norm after each step, as in the paper, needs warm-up.",
            f"At learning rate {high:g} the loss is {spell(post['without'][high])} without and "
            f"{spell(post['with warm-up'][high])} with; at {rates[0]:g} {spell(post['without'][rates[0]])} and "
            f"{spell(post['with warm-up'][rates[0]])}.",
            more=[max(pair) for pair in zip(*post["without"].values(), strict=True)],
            less=[max(pair) for pair in zip(*post["with warm-up"].values(), strict=True)],
            margin=0.2,
        ),
        judge(
            "Norm first does without warm-up.",
            f"At learning rate {high:g} the loss is {spell(pre['without'][high])} without and "
            f"{spell(pre['with warm-up'][high])} with; at {rates[0]:g} {spell(pre['without'][rates[0]])} and "
            f"{spell(pre['with warm-up'][rates[0]])}.",
            more=[0.2],
            less=[max(middle(pre["without"][lr]) - middle(pre["with warm-up"][lr]) for lr in rates)],
            margin=0.0,
        ),
        judge(
            "Adam trains a Transformer better than SGD, each at its best learning rate of those tried.",
            f"SGD with momentum reaches {spell(best['SGD'])}, AdamW {spell(best['Adam'])} in the same number of steps.",
            more=best["SGD"],
            less=best["Adam"],
            margin=0.1,
        ),
    )
