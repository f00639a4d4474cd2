"""Embeddings: a model that only learns to predict the next word; do words of one kind end up close together?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.errors import InputError
from clearhead.experiments import facts
from clearhead.experiments.fitting import Batch, Batches, build, fit, small
from clearhead.experiments.result import Chart, Curve, Result, Table, judge, middle, percent
from clearhead.inside.neighbours import embedding_table, neighbours
from clearhead.models import Model

GPT2_INIT: dict[str, Any] = dict(init="normal", embedding_scale=False)
NEAR = 10  # a plural is found if it is among so many nearest words


@dataclass(frozen=True)
class Size:
    sentences: int = 4_000
    words: int = 1_500  # of the real text
    steps: int = 400
    rows: int = 32


SIZES = {"quick": Size(sentences=150, words=120, steps=6, rows=4), "usual": Size(), "full": Size(12_000, 4_000, 2_000)}


@dataclass(frozen=True)
class Measured:
    """Shares of 1, one for each seed, trained and untrained."""

    kin: dict[str, list[float]]  # nearest neighbours of the word's own kind, in the grammar
    kin_chance: float
    analogies: dict[str, list[float]]  # right; "given words left out" and "all words"
    n_analogies: int
    king: list[tuple[str, float]]  # the nearest to king - man + woman, all words
    queen: float  # cosine of king and queen, first seed
    apart: float  # mean cosine of all pairs of words, first seed
    places: dict[
        str, tuple[list[str], Tensor]
    ]  # words of a kind, or of a sex, and where they lie in a plane, first seed
    plural: dict[str, list[float]]
    plural_chance: float
    n_plurals: int
    examples: list[tuple[str, str]]  # words of the real text and their nearest
    text: str


def measure(size: Size, seeds: range, text: Path | None = None) -> Measured:
    made = facts.number_words(facts.sentences(size.sentences, torch.Generator().manual_seed(0)), 1_000)
    words = facts.words_of(facts.real_text(text))
    real = facts.number_words(words, size.words)
    if len(facts.plurals(real[0])) < 3:
        raise InputError(
            f"the text has {len(words):,} words and {len(facts.plurals(real[0]))} pairs of a word and its plural; 3 are needed; "
            f"give a longer English text"
        )
    kin: dict[str, list[float]] = {"trained": [], "untrained": []}
    plural: dict[str, list[float]] = {"trained": [], "untrained": []}
    found: dict[str, list[float]] = {"given words left out": [], "all words": []}
    first: dict[str, Any] = {}
    for seed in seeds:
        model = small_model(made[0], seed)
        kin["untrained"].append(share_of_kin(embedding_table(model), made[0]))
        fit(model, windows(made[1], size.rows), steps=size.steps, seed=seed)
        table = embedding_table(model)
        kin["trained"].append(share_of_kin(table, made[0]))
        for name, keep in (("given words left out", False), ("all words", True)):
            found[name].append(share_of_analogies(table, made[0], keep))
        other = small_model(real[0], seed)
        plural["untrained"].append(share_of_plurals(embedding_table(other), real[0]))
        fit(other, windows(real[1], size.rows), steps=size.steps, seed=seed)
        plural["trained"].append(share_of_plurals(embedding_table(other), real[0]))
        if not first:
            first = describe(table, made[0], embedding_table(other), real[0])
    in_kinds = sum(len(names) for names in facts.KINDS.values())
    chance = sum(len(names) * (len(names) - 1) for names in facts.KINDS.values()) / in_kinds / (len(made[0]) - 1)
    return Measured(
        kin=kin,
        kin_chance=chance,
        analogies=found,
        n_analogies=len(facts.analogies()),
        plural=plural,
        plural_chance=NEAR / (len(real[0]) - 1),
        n_plurals=len(facts.plurals(real[0])),
        text=str(text.name) if text else "Python's help texts",
        **first,
    )


def small_model(vocab: list[str], seed: int) -> Model:
    return build(small(vocab_size=len(vocab), max_len=32, n_layers=1, tie_embeddings=True, **GPT2_INIT), seed)


def windows(ids: Tensor, rows: int, length: int = 24) -> Batches:
    """Random windows of a text; the target is the next word."""

    def batches(generator: torch.Generator) -> Batch:
        starts = torch.randint(0, len(ids) - length - 1, (rows,), generator=generator)
        cut = ids[starts[:, None] + torch.arange(length + 1)]
        return (cut[:, :-1],), cut[:, 1:]

    return batches


def share_of_kin(table: Tensor, vocab: list[str]) -> float:
    """Of how many words of KINDS the nearest word is of the same kind."""
    kind = {word: name for name, words in facts.KINDS.items() for word in words}
    nearest = [(word, vocab[neighbours(table, [vocab.index(word)], n=1)[0][0]]) for word in kind if word in vocab]
    return sum(kind[word] == kind.get(other) for word, other in nearest) / len(nearest)


def share_of_analogies(table: Tensor, vocab: list[str], keep: bool) -> float:
    """How many analogies have the right answer as the nearest; `keep`: the three given words may be the answer, too."""
    answers = [nearest_to(table, vocab, each[:3], keep, 1)[0][0] == each[3] for each in facts.analogies()]
    return sum(answers) / len(answers)


@torch.no_grad()
def nearest_to(table: Tensor, vocab: list[str], given: tuple[str, ...], keep: bool, n: int) -> list[tuple[str, float]]:
    a, b, c = (vocab.index(word) for word in given)
    if not keep:
        return [(vocab[id], cosine) for id, cosine in neighbours(table, [a, c], [b], n=n)]
    unit = F.normalize(table, dim=-1)
    near = unit @ F.normalize(unit[a] - unit[b] + unit[c], dim=0)
    return [(vocab[int(id)], float(near[id])) for id in near.topk(n).indices]


def share_of_plurals(table: Tensor, vocab: list[str]) -> float:
    """Of how many words the plural is among the NEAR nearest."""
    pairs = facts.plurals(vocab)
    number = {word: n for n, word in enumerate(vocab)}
    found = [number[many] in dict(neighbours(table, [number[one]], n=NEAR)) for one, many in pairs]
    return sum(found) / len(found)


@torch.no_grad()
def describe(table: Tensor, vocab: list[str], real: Tensor, real_vocab: list[str]) -> dict[str, Any]:
    """What is shown of the first seed."""
    unit = F.normalize(table, dim=-1)
    cosines = unit @ unit.T
    pairs = cosines.triu(1).sum() / (len(unit) * (len(unit) - 1) / 2)
    shown = [one for one, _ in facts.plurals(real_vocab)][:6]
    near = [(one, neighbours(real, [real_vocab.index(one)], n=4)) for one in shown]
    men, women = zip(*facts.ROLES, strict=True)
    places = plane_of(table, vocab, facts.KINDS) | plane_of(table, vocab, {"men": men, "women": women})
    return dict(
        places=places,
        king=nearest_to(table, vocab, ("king", "man", "woman"), True, 4),
        queen=float(cosines[vocab.index("king"), vocab.index("queen")]),
        apart=float(pairs),
        examples=[(one, ", ".join(f"{real_vocab[id]} {cosine:.2f}" for id, cosine in found)) for one, found in near],
    )


def plane_of(
    table: Tensor, vocab: list[str], kinds: Mapping[str, Sequence[str]]
) -> dict[str, tuple[list[str], Tensor]]:
    """Where the words lie in the plane in which they differ most (their first two principal components)."""
    known = {kind: [word for word in words if word in vocab] for kind, words in kinds.items()}
    rows = F.normalize(table, dim=-1)[[vocab.index(word) for words in known.values() for word in words]]
    rows = rows - rows.mean(0)
    directions = torch.linalg.svd(rows, full_matrices=False).Vh[:2]
    directions = directions * directions.sum(-1, keepdim=True).sign()  # each is found up to its sign
    parts = (rows @ directions.T).split([len(words) for words in known.values()])
    return {kind: (words, part) for (kind, words), part in zip(known.items(), parts, strict=True)}


def conclude(m: Measured) -> Result:
    out, kept = m.analogies["given words left out"], m.analogies["all words"]
    n = m.n_analogies
    findings = (
        judge(
            "Related words lie close together (made text: what is related is known).",
            f"The nearest word is of the same kind for {percent(m.kin['trained'])} of the words after training, "
            f"{percent(m.kin['untrained'])} before; by chance {100 * m.kin_chance:.0f}%.",
            more=m.kin["trained"],
            less=[m.kin_chance, *m.kin["untrained"]],
            margin=0.2,
        ),
        judge(
            "A word's plural is among its nearest (real text).",
            f"In {m.text}, the plural is among the {NEAR} nearest for {percent(m.plural['trained'])} of {m.n_plurals} words, "
            f"{percent(m.plural['untrained'])} before training; by chance {100 * m.plural_chance:.1f}%.",
            more=m.plural["trained"],
            less=[0.5],
            margin=0.0,
        ),
        judge(
            "king - man + woman = queen, nearest of all words, for most analogies (made text).",
            f"Of {n} such analogies {percent(out)} have the right answer nearest, if the three given words may not be "
            f"the answer; {percent(kept)} if they may. king - man + woman is nearest to {m.king[0][0]} "
            f"({m.king[0][1]:.2f}), then {m.king[1][0]} ({m.king[1][1]:.2f}).",
            more=kept,
            less=[0.5],
            margin=0.0,
        ),
    )
    names = ("trained", "untrained")
    rows = [("nearest word of the same kind", *(percent(m.kin[name]) for name in names), f"{100 * m.kin_chance:.0f}%")]
    rows += [
        ("plural among the 10 nearest", *(percent(m.plural[name]) for name in names), f"{100 * m.plural_chance:.1f}%")
    ]
    analogy = [(name, percent(m.analogies[name])) for name in m.analogies]
    return Result(
        tables=(
            Table("Who is near whom", ("", *names, "chance"), tuple(rows)),
            Table(f"{n} analogies a - b + c = d: right answers", ("the answer may be", "right"), tuple(analogy)),
            Table("Nearest to king - man + woman, all words", ("word", "cosine"), tuple(m.king)),
            Table(f"Nearest words in {m.text}", ("word", "nearest, cosine"), tuple(m.examples)),
            Table(
                "Cosines, first seed",
                ("", "cosine"),
                (("king and queen", m.queen), ("two words, on average", m.apart)),
            ),
        ),
        charts=charts_of(m, names),
        findings=findings,
    )


def charts_of(m: Measured, names: tuple[str, ...]) -> tuple[Chart, ...]:
    return (
        Chart(
            "Nearest words",
            "",
            "share",
            tuple(
                Curve(name, ("same kind", "plural in 10"), (middle(m.kin[name]), middle(m.plural[name])))
                for name in names
            ),
        ),
        map_of("Words of four kinds", m, tuple(facts.KINDS), has_words=False),
        map_of("Who is to whom as king to queen", m, ("men", "women")),
    )


def map_of(title: str, m: Measured, kinds: tuple[str, ...], *, has_words: bool = True) -> Chart:
    curves: list[Curve] = []
    for kind in kinds:
        words, places = m.places[kind]
        x, y = (tuple(column) for column in places.T.tolist())
        curves.append(Curve(kind, x, y, tuple(words) if has_words else ()))
    return Chart(title, "first principal component", "second", tuple(curves), is_map=True)
