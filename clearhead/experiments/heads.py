"""Heads: one against eight of the same total width, and what the heads of a trained model do, by scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.experiments.fitting import IGNORED, Batch, Batches, accuracy, build, fit, small
from clearhead.experiments.result import Chart, Curve, Result, Table, decide, if_learnt, judge, middle, percent, spell
from clearhead.experiments.tasks import brackets, partners, repetition, two_back
from clearhead.inside import head_scores, intervene, probe, repeated_tokens, zero
from clearhead.models import Decoder

COUNTS = (1, 2, 4, 8)
NEAR, FAR, PAIR = 1, 4, 6  # two places to look at, at once; tokens of that task
SOLVED = 0.1  # nats: training ends below this loss
VOCAB, KINDS, LENGTH = 16, 4, 24  # tokens of the repetitions; kinds of brackets, which have the tokens after them
HIGH = 0.5  # a score from which on a head counts as one of its kind
SCORES = ("previous", "first", "induction", "matching")


@dataclass(frozen=True)
class Size:
    steps: int = 300
    mixed_steps: int = 350  # of the model whose heads are looked at
    rows: int = 16


SIZES = {"quick": Size(steps=4, mixed_steps=4, rows=4), "usual": Size(), "full": Size(2_000, 3_000, 32)}


@dataclass(frozen=True)
class Head:
    """One head of the first seed's model: its scores, and the share right on each task when it is switched off."""

    place: str
    scores: dict[str, float]
    repetition: float
    brackets: float


@dataclass(frozen=True)
class Measured:
    right: dict[int, list[float]]  # two places at once, one layer: by number of heads
    steps: dict[int, list[float]]  # of training, fewer if it was solved before
    whole: tuple[float, float]  # the mixed model, on repetitions and on brackets
    heads: list[Head]
    silenced: float  # right on repetitions without all heads whose induction score is at least HIGH


def measure(size: Size, seeds: range) -> Measured:
    right: dict[int, list[float]] = {n: [] for n in COUNTS}
    steps: dict[int, list[float]] = {n: [] for n in COUNTS}
    data = two_back(NEAR, FAR, rows=size.rows, length=24, vocab=PAIR)
    for seed in seeds:
        for n in COUNTS:
            sizes: dict[str, Any] = dict(
                n_layers=1, n_heads=n, d_model=64, positions="learned", max_len=24, vocab_size=PAIR**2
            )
            model = build(small(**sizes), seed)
            losses = fit(model, data, steps=size.steps, seed=seed, enough=SOLVED)
            right[n].append(accuracy(model, data, seed=seed))
            steps[n].append(float(len(losses)))
    return Measured(right, steps, *look(size, seeds[0]))


def look(size: Size, seed: int) -> tuple[tuple[float, float], list[Head], float]:
    """A model of two layers that learns repetitions and brackets, and all its heads."""
    model = build(small(n_heads=4, vocab_size=VOCAB + 2 * KINDS, max_len=2 * LENGTH, positions="rotary"), seed)
    assert isinstance(model, Decoder)
    tasks = repetition(rows=size.rows, length=LENGTH, vocab=VOCAB), bracket_rows(size.rows)
    fit(model, mixed(*tasks), steps=size.mixed_steps, lr=5e-3, seed=seed)
    whole = both_right(model, tasks)
    matching = matching_scores(model, tasks[1])
    found: list[Head] = []
    for score in head_scores(model, repeated_tokens(VOCAB, length=LENGTH // 2)):
        place = score.site.removesuffix(".weights")
        layer = int(place.split(".")[1])
        with intervene(model, zero(f"{place}.out", head=score.head)):
            without = both_right(model, tasks)
        scores = {name: float(getattr(score, name) or 0.0) for name in SCORES[:3]}
        scores["matching"] = matching[layer][score.head]
        found.append(Head(f"layer {layer}, head {score.head}", scores, *without))
    return whole, found, right_without(model, [head for head in found if head.scores["induction"] >= HIGH], tasks[0])


def right_without(model: Decoder, heads: list[Head], task: Batches) -> float:
    places = [head.place.removeprefix("layer ").split(", head ") for head in heads]
    with intervene(model, *(zero(f"blocks.{layer}.attention.out", head=int(head)) for layer, head in places)):
        return accuracy(model, task, rounds=2)


def bracket_rows(rows: int) -> Batches:
    plain = brackets(rows=rows, length=LENGTH, kinds=KINDS)

    def batches(generator: torch.Generator) -> Batch:
        (tokens,), targets = plain(generator)
        return (tokens + VOCAB,), torch.where(targets == IGNORED, IGNORED, targets + VOCAB)

    return batches


def mixed(first: Batches, second: Batches) -> Batches:
    def batches(generator: torch.Generator) -> Batch:
        (a,), x = first(generator)
        (b,), y = second(generator)
        return (torch.cat([a, b]),), torch.cat([x, y])

    return batches


def both_right(model: nn.Module, tasks: tuple[Batches, Batches]) -> tuple[float, float]:
    return accuracy(model, tasks[0], rounds=2), accuracy(model, tasks[1], rounds=2)


@torch.no_grad()
def matching_scores(model: Decoder, task: Batches) -> list[list[float]]:
    """By layer and head: the mean weight on the bracket that is to be closed, where it is not the token itself."""
    (tokens,), targets = task(torch.Generator().manual_seed(1))
    partner = partners(tokens - VOCAB)
    at = torch.arange(tokens.shape[1])
    counted = (targets != IGNORED) & (partner >= 0) & (partner != at)
    with probe(model, "blocks.*.attention.weights") as seen:
        model(tokens)
    found: list[list[float]] = []
    for layer in range(model.config.n_layers):
        weights: Tensor = seen[f"blocks.{layer}.attention.weights"]
        picked = weights.gather(-1, partner.clamp(min=0)[:, None, :, None].expand(-1, weights.shape[1], -1, 1))[..., 0]
        found.append([float(head[counted].mean()) for head in picked.transpose(0, 1)])
    return found


def conclude(m: Measured) -> Result:
    one, eight = m.right[COUNTS[0]], m.right[COUNTS[-1]]
    best = {name: max(m.heads, key=lambda head: head.scores[name]) for name in SCORES}
    induction = best["induction"]
    special = [name for name in ("previous", "induction", "matching") if best[name].scores[name] >= HIGH]
    inducing = [head for head in m.heads if head.scores["induction"] >= HIGH]
    return Result(
        tables=(
            Table(
                f"Two tokens at once, {NEAR} and {FAR} back; one layer of width 64",
                ("heads", "right", "steps"),
                tuple((n, percent(values), spell(m.steps[n], 0)) for n, values in m.right.items()),
            ),
            Table(
                f"Mean weights of each head, and what is right without it (whole: {percent(m.whole[:1])}, "
                f"{percent(m.whole[1:])})",
                ("head", *SCORES, "repetitions without", "brackets without"),
                tuple(head_rows(m)),
            ),
        ),
        charts=charts_of(m),
        findings=(
            judge(
                "Eight heads are better than one of the same total width, when two places matter at once.",
                f"One head is right for {percent(one)}, eight for {percent(eight)}, after {spell(m.steps[COUNTS[0]], 0)} "
                f"and {spell(m.steps[COUNTS[-1]], 0)} steps.",
                more=eight,
                less=one,
                margin=0.05,
            ),
            if_learnt(
                m.whole[0] > 0.5,
                decide(
                    "Heads specialise.",
                    "The highest score of any head: "
                    + ", ".join(f"{name} {best[name].scores[name]:.2f} ({best[name].place})" for name in best)
                    + f". At least 0.5 of the weight, of those that the tasks need: {', '.join(special) or 'none'}.",
                    bool(special),
                ),
            ),
            if_learnt(
                m.whole[0] > 0.5,
                decide(
                    "The head with the highest induction score is what completes repetitions.",
                    f"Without it ({induction.place}) {percent([induction.repetition])} are right, with all heads "
                    f"{percent([m.whole[0]])}.",
                    m.whole[0] - induction.repetition >= 0.2,
                ),
            ),
            if_learnt(
                m.whole[0] > 0.5 and bool(inducing),
                decide(
                    "Induction heads together are.",
                    f"{len(inducing)} heads have an induction score of at least {HIGH}; without all of them "
                    f"{percent([m.silenced])} are right.",
                    m.whole[0] - m.silenced >= 0.2,
                ),
            ),
        ),
    )


def short(place: str) -> str:
    """Layer 1, head 3 as 1.3."""
    return place.replace("layer ", "").replace(", head ", ".")


def charts_of(m: Measured) -> tuple[Chart, ...]:
    return (
        Chart(
            "Two places at once",
            "heads",
            "share right",
            (Curve("right", tuple(str(n) for n in m.right), tuple(map(middle, m.right.values()))),),
        ),
        Chart(
            "Heads of the mixed model",
            "layer.head",
            "mean weight",
            tuple(
                Curve(name, tuple(short(head.place) for head in m.heads), tuple(head.scores[name] for head in m.heads))
                for name in ("previous", "induction", "matching")
            ),
        ),
    )


def head_rows(m: Measured) -> list[tuple[Any, ...]]:
    return [
        (head.place, *(head.scores[name] for name in SCORES), percent([head.repetition]), percent([head.brackets]))
        for head in m.heads
    ]
