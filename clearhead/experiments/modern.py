"""From the paper to today: each change since 2017 as one field of the config, each made alone, on real text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.experiments import facts
from clearhead.experiments.embeddings import windows
from clearhead.experiments.fitting import build, fit, loss_on, small
from clearhead.experiments.result import Chart, Curve, Finding, Result, Table, decide, middle, spell

WIDTH, LETTERS = 64, 128
PAPER: dict[str, Any] = dict(
    positions="sinusoidal",
    norm="layer",
    norm_first=False,
    feedforward="relu",
    embedding_scale=True,
    tie_embeddings=True,
    init="xavier",
    init_residual="same",
)
# A gated layer has three matrices: two thirds of the width keep the number of parameters.
GATED: dict[str, Any] = dict(feedforward="silu", gated=True, d_ff=8 * WIDTH // 3)
SMALL_INIT: dict[str, Any] = dict(init="normal", init_residual="scaled", embedding_scale=False)
CHANGES: dict[str, dict[str, Any]] = {
    "norm first": dict(norm_first=True),
    "RMS norm": dict(norm="rms"),
    "rotary positions": dict(positions="rotary"),
    "gelu": dict(feedforward="gelu_tanh"),
    "gated silu": GATED,
    "no biases": dict(bias=False),
    "one key head": dict(n_kv_heads=1),
    "qk-norm": dict(qk_norm=True),
    "head not tied": dict(tie_embeddings=False),
    "small init, no scale": SMALL_INIT,
}
ALL: dict[str, Any] = {name: value for fields in CHANGES.values() for name, value in fields.items()} | GATED


@dataclass(frozen=True)
class Size:
    steps: int = 150
    rows: int = 12
    length: int = 48


SIZES = {"quick": Size(steps=4, rows=4, length=16), "usual": Size(), "full": Size(steps=1_500, rows=32, length=96)}


@dataclass(frozen=True)
class Measured:
    """Loss on text that was not trained on, nats a letter, one a seed."""

    paper: list[float]  # three times for each seed: how much it differs by chance alone
    loss: dict[str, list[float]]  # by change
    everything: list[float]


def measure(size: Size, seeds: range) -> Measured:
    text = facts.real_text(None)
    ids = torch.tensor([min(ord(letter), LETTERS - 1) for letter in text])
    cut = int(0.9 * len(ids))

    def loss(seed: int, fields: dict[str, Any]) -> float:
        model = build(small(**{**PAPER, **fields}, vocab_size=LETTERS, max_len=size.length), seed)
        fit(model, windows(ids[:cut], size.rows, size.length), steps=size.steps, seed=seed, lr=2e-3)
        return held_out(model, ids[cut:], size)

    return Measured(
        [loss(seed + 100 * again, {}) for seed in seeds for again in range(3)],
        {name: [loss(seed, fields) for seed in seeds] for name, fields in CHANGES.items()},
        [loss(seed, ALL) for seed in seeds],
    )


@torch.no_grad()
def held_out(model: torch.nn.Module, ids: Tensor, size: Size, rounds: int = 8) -> float:
    """The mean over the same windows for every model."""
    data, generator = windows(ids, 32, size.length), torch.Generator().manual_seed(5)
    return sum(float(loss_on(model, data(generator))) for _ in range(rounds)) / rounds


def conclude(m: Measured) -> Result:
    base, spread = middle(m.paper), max(m.paper) - min(m.paper)
    gains = {name: base - middle(values) for name, values in m.loss.items()}
    rows = [("the paper's", spell(m.paper, 3), "", f"by chance: {spread:.3f}")]
    rows += [(name, spell(m.loss[name], 3), f"{gains[name]:+.3f}", word(gains[name], spread)) for name in CHANGES]
    together = base - middle(m.everything)
    rows += [("all of them", spell(m.everything, 3), f"{together:+.3f}", word(together, spread))]
    by_kind = {
        kind: [name for name in CHANGES if word(gains[name], spread) == kind] for kind in ("better", "worse", "alike")
    }
    names = (*CHANGES, "all of them")
    return Result(
        tables=(
            Table(
                "Loss on held-out text, nats a letter", ("change", "loss", "gain", "beside the paper's"), tuple(rows)
            ),
        ),
        charts=(
            Chart(
                "Gain over the paper's decoder",
                "",
                "nats a letter",
                (Curve("gain", names, (*gains.values(), together)),),
            ),
        ),
        findings=(
            Finding(
                "Each change since 2017 makes a model better.",
                f"Alone, better: {', '.join(by_kind['better']) or 'none'}; worse: {', '.join(by_kind['worse']) or 'none'}; not "
                f"told apart from chance ({spread:.3f} between seeds of the paper's): {', '.join(by_kind['alike']) or 'none'}.",
                "agrees"
                if len(by_kind["better"]) == len(CHANGES)
                else "contradicts"
                if by_kind["worse"]
                else "not told apart",
            ),
            decide(
                "All together are better than the paper's.",
                f"The loss is {spell(m.everything, 3)} with all, {spell(m.paper, 3)} with none.",
                word(together, spread) == "better",
            ),
            decide(
                "The gains add up.",
                f"The gains of the single changes sum to {sum(gains.values()):+.3f}; all together gain {together:+.3f}.",
                abs(sum(gains.values()) - together) <= spread,
            ),
        ),
    )


def word(gain: float, spread: float) -> str:
    """A gain that is no larger than what chance makes is none."""
    return "better" if gain > spread else "worse" if gain < -spread else "alike"
