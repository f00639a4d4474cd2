"""Residuals and norms: 2, 8 and 32 layers with norm first, norm after, no norm, and no residual stream."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.experiments.fitting import Batches, build, fit, last, loss_on, small
from clearhead.experiments.result import Chart, Curve, Finding, Result, Table, if_learnt, judge, middle, spell
from clearhead.experiments.tasks import looking_back
from clearhead.layers.block import Block

WAYS: dict[str, dict[str, Any]] = {
    "norm first": dict(norm_first=True),
    "norm after (paper)": dict(norm_first=False),
    "no norm": dict(norm="none"),
    "no residual": dict(norm_first=True),
}
VOCAB, LENGTH, WIDTH = 16, 16, 32


@dataclass(frozen=True)
class Size:
    depths: tuple[int, ...] = (2, 8, 32)
    steps: int = 120
    rows: int = 16


SIZES = {"quick": Size(depths=(2, 3), steps=4, rows=4), "usual": Size(), "full": Size(steps=1_000, rows=32)}


@dataclass(frozen=True)
class Measured:
    """By way and depth, one number a seed."""

    loss: dict[str, dict[int, list[float]]]  # of the last steps
    gradient: dict[str, dict[int, list[float]]]  # norm in the first block divided by that in the last, before training
    known: float  # the loss of a model that only knows how often each token comes


class Plain(Block):
    """A block without the residual stream: the result of a step replaces its input."""

    def step(self, x: Tensor, norm: nn.Module, sublayer: Any) -> Tensor:
        return sublayer(norm(x))


def measure(size: Size, seeds: range) -> Measured:
    def table() -> dict[str, dict[int, list[float]]]:
        return {way: {n: [] for n in size.depths} for way in WAYS}

    m = Measured(table(), table(), math.log(VOCAB))
    data = looking_back(2, rows=size.rows, length=LENGTH, vocab=VOCAB)
    for seed in seeds:
        for way, fields in WAYS.items():
            for depth in size.depths:
                sizes: dict[str, Any] = dict(
                    n_layers=depth, d_model=WIDTH, n_heads=2, vocab_size=VOCAB, max_len=LENGTH, positions="rotary"
                )
                model = build(small(**sizes, **fields), seed)
                if way == "no residual":
                    for module in model.modules():
                        if isinstance(module, Block):
                            module.__class__ = Plain
                m.gradient[way][depth].append(gradient_ratio(model, data))
                losses = fit(model, data, steps=size.steps, seed=seed)
                m.loss[way][depth].append(last(losses))
    return m


def gradient_ratio(model: nn.Module, data: Batches) -> float:
    loss_on(model, data(torch.Generator().manual_seed(7))).backward()
    norms = {"first": 0.0, "last": 0.0}
    n_blocks = len(list(model.get_submodule("blocks").children()))
    for name, parameter in model.named_parameters():
        for key, place in (("first", 0), ("last", n_blocks - 1)):
            if name.startswith(f"blocks.{place}.") and parameter.grad is not None:
                norms[key] += float(parameter.grad.square().sum())
    model.zero_grad()
    return math.sqrt(norms["first"] / norms["last"]) if norms["last"] else math.inf


def conclude(m: Measured) -> Result:
    depths = list(m.loss["norm first"])
    deep = depths[-1]
    rows = [(way, *(spell(m.loss[way][n], 3) for n in depths)) for way in WAYS]
    ratios = [(way, *(f"{middle(m.gradient[way][n]):.2g}" for n in depths)) for way in WAYS]
    return Result(
        tables=(
            Table(
                f"Loss after training ({m.known:.3f} knows nothing)",
                ("", *(f"{n} layers" for n in depths)),
                tuple(rows),
            ),
            Table(
                "Gradient of the first block, divided by that of the last, before training",
                ("", *(f"{n} layers" for n in depths)),
                tuple(ratios),
            ),
        ),
        charts=(
            Chart("After training", "layers", "loss", lines(m.loss), log_x=True),
            Chart(
                "Before training", "layers", "gradient, first block / last", lines(m.gradient), log_x=True, log_y=True
            ),
        ),
        findings=(
            worse("Deep models need the residual stream.", "no residual", m, deep),
            worse("Deep models need norms.", "no norm", m, deep),
            worse(
                "At depth, norm first trains more easily than norm after, as in the paper.",
                "norm after (paper)",
                m,
                deep,
            ),
            shallow(m, depths[0]),
        ),
    )


def worse(claim: str, way: str, m: Measured, depth: int) -> Finding:
    """The claim says that this way ends higher than norm first, with so many layers."""
    words = f"With {depth} layers the loss is {spell(m.loss[way][depth], 3)} ({way}) and {spell(m.loss['norm first'][depth], 3)}"
    finding = judge(
        claim, f"{words} (norm first).", more=m.loss[way][depth], less=m.loss["norm first"][depth], margin=0.1
    )
    return if_learnt(min(min(m.loss[each][depth]) for each in WAYS) < 0.8 * m.known, finding)


def shallow(m: Measured, depth: int) -> Finding:
    ways = [way for way in WAYS if way != "norm first"]
    words = ", ".join(f"{way} {spell(m.loss[way][depth], 3)}" for way in WAYS)
    claim = f"With {depth} layers it does not matter yet."
    gaps = [max(abs(middle(m.loss[way][depth]) - middle(m.loss["norm first"][depth])) for way in ways)]
    learnt = min(m.loss["norm first"][depth]) < 0.8 * m.known
    return if_learnt(learnt, judge(claim, f"Losses: {words}.", more=[0.1], less=gaps, margin=0.0))


def lines(values: dict[str, dict[int, list[float]]]) -> tuple[Curve, ...]:
    return tuple(Curve(way, tuple(each), tuple(map(middle, each.values()))) for way, each in values.items())
