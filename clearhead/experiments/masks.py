"""Masks: a language model without a causal mask. Its loss falls below what is possible, and it can not write.

The text comes from a Markov chain, so the smallest honest loss is known: the chain's entropy rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.experiments.fitting import Batch, Batches, build, fit, loss_on, small
from clearhead.experiments.result import Chart, Curve, Result, Table, judge, middle, percent, spell

VOCAB, CHOICES, LENGTH = 24, 4, 24
WAYS = {"causal": dict(shape="decoder"), "no mask": dict(shape="encoder", head="tokens")}


@dataclass(frozen=True)
class Size:
    steps: int = 300
    rows: int = 16


SIZES = {"quick": Size(steps=5, rows=4), "usual": Size(), "full": Size(2_000, 32)}


@dataclass(frozen=True)
class Measured:
    """By way, one number a seed."""

    rate: list[float]  # the chain's entropy, nats a token
    loss: dict[str, list[float]]  # on fresh text
    written: dict[str, list[float]]  # share of steps in the model's own text that the chain allows
    change: dict[str, list[float]]  # of earlier logits, when the last token is replaced
    curves: dict[str, list[float]]  # losses of the first seed


def measure(size: Size, seeds: range) -> Measured:
    m = Measured([], *({way: [] for way in WAYS} for _ in range(4)))
    for seed in seeds:
        chain = make_chain(torch.Generator().manual_seed(seed))
        m.rate.append(entropy_rate(chain))
        data = texts(chain, size.rows)
        for way, fields in WAYS.items():
            model = build(small(vocab_size=VOCAB, max_len=2 * LENGTH, positions="rotary", **fields), seed)
            losses = fit(model, data, steps=size.steps, seed=seed)
            m.curves[way][:] = m.curves[way] or losses
            with torch.no_grad():
                m.loss[way].append(float(loss_on(model, data(torch.Generator().manual_seed(9_000 + seed)))))
            m.written[way].append(allowed_steps(model, chain))
            m.change[way].append(largest_change(model))
    return m


def make_chain(generator: torch.Generator) -> Tensor:
    """After each token CHOICES others may follow, with unequal chances."""
    chances = torch.tensor([2.0**-n for n in range(CHOICES)])
    follow = torch.rand(VOCAB, VOCAB, generator=generator).argsort(-1)[:, :CHOICES]
    return torch.zeros(VOCAB, VOCAB).scatter_(1, follow, (chances / chances.sum()).expand(VOCAB, CHOICES))


def entropy_rate(chain: Tensor) -> float:
    """Every row has the same entropy, so the chain has it, too."""
    return float(torch.special.entr(chain[0]).sum())


def texts(chain: Tensor, rows: int) -> Batches:
    def batches(generator: torch.Generator) -> Batch:
        found = [torch.randint(0, VOCAB, (rows,), generator=generator)]
        for _ in range(LENGTH):
            found.append(torch.multinomial(chain[found[-1]], 1, generator=generator)[:, 0])
        tokens = torch.stack(found, 1)
        return (tokens[:, :-1],), tokens[:, 1:]

    return batches


@torch.no_grad()
def allowed_steps(model: nn.Module, chain: Tensor, rows: int = 16) -> float:
    """Greedy text, token by token from a first token; the share of steps with a chance above 0."""
    tokens = torch.arange(rows)[:, None] % VOCAB
    for _ in range(LENGTH - 1):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return float((chain[tokens[:, :-1], tokens[:, 1:]] > 0).float().mean())


@torch.no_grad()
def largest_change(model: nn.Module) -> float:
    """The largest change of any logit before the last place, when the last token is replaced: 0 if nothing leaks."""
    tokens = torch.arange(LENGTH)[None] % VOCAB
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % VOCAB
    return float((model(tokens) - model(other))[:, :-1].abs().max())


def conclude(m: Measured) -> Result:
    rate = middle(m.rate)
    rows = [
        (
            way,
            spell(m.loss[way], 3),
            percent(m.written[way]),
            f"{middle(m.change[way]):.2g}" if middle(m.change[way]) else "0",
        )
        for way in WAYS
    ]
    steps = tuple(range(1, len(m.curves["causal"]) + 1))
    return Result(
        tables=(
            Table(
                f"A Markov chain of {VOCAB} tokens; the smallest possible loss is {rate:.3f}",
                ("", "loss on fresh text", "allowed steps when it writes", "change of past logits by a future token"),
                tuple(rows),
            ),
        ),
        charts=charts_of(m, rate, steps),
        findings=(
            judge(
                "Without a mask the loss falls below what is possible.",
                f"The chain's entropy is {rate:.3f} nats; the loss is {spell(m.loss['no mask'], 3)} without a mask, "
                f"{spell(m.loss['causal'], 3)} with it.",
                more=[rate],
                less=m.loss["no mask"],
                margin=0.1,
            ),
            judge(
                "And the model can not write: it has learnt to copy the next token, which is not there yet.",
                f"Of the steps in its own text {percent(m.written['no mask'])} are allowed by the chain, "
                f"{percent(m.written['causal'])} with the mask (a random step: {CHOICES / VOCAB:.0%}).",
                more=m.written["causal"],
                less=m.written["no mask"],
                margin=0.2,
            ),
            judge(
                "With the mask no future token changes a past logit.",
                f"Another last token changes earlier logits by {spell(m.change['causal'], 1)} with the mask, by "
                f"{spell(m.change['no mask'], 1)} without.",
                more=[math.ulp(1.0)],
                less=m.change["causal"],
                margin=0.0,
            ),
        ),
    )


def charts_of(m: Measured, rate: float, steps: tuple[int, ...]) -> tuple[Chart, ...]:
    return (
        Chart(
            "Loss in training",
            "step",
            "nats a token",
            (
                *(Curve(way, steps, tuple(m.curves[way])) for way in WAYS),
                Curve("smallest possible", (1, steps[-1]), (rate, rate)),
            ),
        ),
        Chart(
            "Its own text",
            "",
            "share of allowed steps",
            (Curve("allowed", tuple(WAYS), tuple(middle(m.written[way]) for way in WAYS)),),
        ),
    )
