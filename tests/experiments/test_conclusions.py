"""The sentences follow the numbers: each experiment concludes from numbers made up here, which say one thing and its opposite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from clearhead.experiments import (
    cache,
    cost,
    embeddings,
    facts,
    geometry,
    heads,
    long_range,
    masks,
    modern,
    optimizers,
    positions,
    residuals,
    scale,
    shapes,
)
from clearhead.experiments.result import Finding, decide, if_learnt, judge, percent, spell

AGREES, CONTRADICTS, OPEN = "agrees", "contradicts", "not told apart"


@pytest.mark.parametrize(
    ("more", "less", "verdict"),
    [
        ([0.9], [0.5], AGREES),
        ([0.9], [0.85], OPEN),
        ([0.5], [0.9], CONTRADICTS),
        ([0.9, 0.5], [0.3, 0.2], AGREES),
        ([0.9, 0.5], [0.6, 0.2], OPEN),  # one seed of the one is below one of the other
        ([0.2, 0.1], [0.6, 0.4], CONTRADICTS),
    ],
)
def test_every_seed_must_show_the_difference(more: list[float], less: list[float], verdict: str) -> None:
    assert judge("claim", "numbers", more=more, less=less, margin=0.1).verdict == verdict


def test_who_learnt_nothing_proves_nothing() -> None:
    finding = decide("claim", "0% and 0%.", True)
    assert if_learnt(True, finding) is finding
    assert if_learnt(False, finding) == Finding("claim", "0% and 0%. The task is not learnt.", OPEN)


def test_several_seeds_are_spelled_with_their_range() -> None:
    assert spell([0.5]) == "0.50"
    assert spell([3.0, 1.0, 2.0], 1) == "2.0 (1.0 to 3.0)"
    assert percent([0.25, 0.75]) == "50 (25 to 75)%"


EMBEDDINGS = embeddings.Measured(
    kin={"trained": [0.9], "untrained": [0.1]},
    kin_chance=0.06,
    analogies={"given words left out": [0.8], "all words": [0.7]},
    n_analogies=84,
    king=[("queen", 0.9), ("king", 0.8)],
    queen=0.8,
    apart=0.1,
    places={kind: (["a", "b"], torch.eye(2)) for kind in (*facts.KINDS, "men", "women")},
    plural={"trained": [0.6], "untrained": [0.0]},
    plural_chance=0.01,
    n_plurals=50,
    examples=[("name", "names 0.9")],
    text="a text",
)
KINDS = positions.KINDS
POSITIONS = positions.Measured(
    encoder={key: [1.0] for key in KINDS} | {"none": [0.1]},
    decoder={kind: {24: [1.0], 96: [0.9]} for kind in KINDS}
    | {"none": {24: [0.1], 96: [0.1]}, "learned": {24: [1.0], 96: [0.1]}},
    length=24,
)
WITH, WITHOUT = scale.WAYS
SCALE = scale.Measured(
    entropy={WITH: {8: [0.9], 512: [0.9]}, WITHOUT: {8: [0.5], 512: [0.1]}},
    largest={WITH: {8: [0.1], 512: [0.1]}, WITHOUT: {8: [0.4], 512: [0.9]}},
    slope={WITH: {8: [0.9], 512: [0.9]}, WITHOUT: {8: [0.7], 512: [0.1]}},
    accuracy={WITH: {16: [0.9], 64: [0.9]}, WITHOUT: {16: [0.8], 64: [0.1]}},
)


def head(place: str, previous: float, induction: float, without: float) -> heads.Head:
    return heads.Head(
        place, {"previous": previous, "first": 0.1, "induction": induction, "matching": 0.1}, without, 0.9
    )


HEADS = heads.Measured(
    right={1: [0.5], 2: [0.8], 4: [0.9], 8: [0.9]},
    steps={1: [300.0], 2: [300.0], 4: [200.0], 8: [100.0]},
    whole=(0.9, 0.9),
    silenced=0.1,
    heads=[head("layer 0, head 0", 0.9, 0.0, 0.5), head("layer 1, head 1", 0.1, 0.8, 0.3)],
)
MASKS = masks.Measured(
    rate=[1.1],
    loss={"causal": [1.1], "no mask": [0.1]},
    written={"causal": [1.0], "no mask": [0.2]},
    change={"causal": [0.0], "no mask": [4.0]},
    curves={"causal": [3.0, 1.1], "no mask": [3.0, 0.1]},
)
FIRST, AFTER, NONE, PLAIN = residuals.WAYS
RESIDUALS = residuals.Measured(
    loss={
        FIRST: {2: [0.1], 32: [0.1]},
        AFTER: {2: [0.1], 32: [2.7]},
        NONE: {2: [0.1], 32: [2.7]},
        PLAIN: {2: [0.1], 32: [2.7]},
    },
    gradient={way: {2: [1.0], 32: [1e-9]} for way in residuals.WAYS},
    known=2.77,
)
SHAPES = shapes.Measured(
    right={
        "backwards": {key: [1.0] for key in shapes.SHAPES},
        "either way": {"encoder": [0.0], "decoder": [0.9], "encoder-decoder": [0.9]},
    },
    params=dict.fromkeys(shapes.SHAPES, 1000),
    flops=dict.fromkeys(shapes.SHAPES, 1000),
)
RISE, SUDDEN = optimizers.WARMUPS
POST, PRE = optimizers.NORMS
OPTIMIZERS = optimizers.Measured(
    warmup={
        POST: {RISE: {1e-3: [0.3], 1e-2: [0.5]}, SUDDEN: {1e-3: [0.3], 1e-2: [2.5]}},
        PRE: {RISE: {1e-3: [0.3], 1e-2: [0.2]}, SUDDEN: {1e-3: [0.3], 1e-2: [0.2]}},
    },
    sgd={0.1: [2.0]},
    known=2.77,
)
CACHE = cache.Measured(
    with_cache={32: [1.0], 256: [8.0]},
    without={32: [1.5], 256: [80.0]},
    work={32: (100, 300), 256: (1000, 9000)},
    memory={32: 1000, 256: 8000},
    same=True,
)
COST = cost.Measured(
    width=64,
    seconds={name: {64: [1.0], 128: [4.0]} for name in cost.LAYERS} | {cost.LSTM: {64: [2.0], 128: [3.9]}},
    macs={name: {64: 100, 128: 400} for name in cost.LAYERS} | {cost.LSTM: {64: 200, 128: 390}},
    kept={name: {64: 100, 128: 400} for name in cost.LAYERS},
    params=dict.fromkeys(cost.LAYERS, 10),
)
LONG = long_range.Measured(
    right={
        task: {"Transformer": {50: [1.0], 200: [1.0]}, "LSTM": {50: [0.9], 200: [0.2]}} for task in long_range.TASKS
    },
    steps={task: {name: {50: [9.0], 200: [9.0]} for name in long_range.MODELS} for task in long_range.TASKS},
    most=10,
    params=dict.fromkeys(long_range.MODELS, 1000),
)
GEOMETRY = geometry.Measured(
    exact={128: 0.3, 12_288: 0.99},
    sampled={128: [0.3], 12_288: [0.99]},
    counts={128: (300.0, 400.0), 12_288: (1e5, 1e9)},
    trained_width=64,
    within={geometry.NAMES[0]: [0.8], geometry.NAMES[1]: [0.8], geometry.NAMES[2]: [0.8]},
    angles={name: [0.5, 0.5] for name in geometry.NAMES},
    mean={key: [90.0] for key in geometry.NAMES},
)
MODERN = modern.Measured(
    paper=[3.0, 3.01, 2.99], loss={key: [2.9] for key in modern.CHANGES}, everything=[3.0 - 0.1 * len(modern.CHANGES)]
)
NOT_LEARNT = {way: {1e-3: [2.7], 1e-2: [2.7]} for way in optimizers.WARMUPS}

# An experiment, its numbers, and the verdicts in the order of its findings.
CASES: dict[str, tuple[Any, Any, list[str]]] = {
    "related words are close": (embeddings, EMBEDDINGS, [AGREES, AGREES, AGREES]),
    "only the given words are near": (
        embeddings,
        replace(
            EMBEDDINGS,
            analogies={"given words left out": [0.8], "all words": [0.1]},
            kin={"trained": [0.2], "untrained": [0.1]},
        ),
        [OPEN, AGREES, CONTRADICTS],
    ),
    "plurals are far": (
        embeddings,
        replace(EMBEDDINGS, plural={"trained": [0.07], "untrained": [0.0]}),
        [AGREES, CONTRADICTS, AGREES],
    ),
    "positions are needed, and relative ones go on": (positions, POSITIONS, [AGREES] * 7),
    "a decoder sees order by its mask": (
        positions,
        replace(POSITIONS, decoder=POSITIONS.decoder | {"none": {24: [0.9], 96: [0.1]}}),
        [AGREES, CONTRADICTS, *[AGREES] * 5],
    ),
    "sinusoids end, rotary ends, t5 is not learnt": (
        positions,
        replace(
            POSITIONS,
            decoder=POSITIONS.decoder
            | {"sinusoidal": {24: [1.0], 96: [0.1]}, "rotary": {24: [1.0], 96: [0.2]}, "t5": {24: [0.3], 96: [0.3]}},
        ),
        [AGREES, AGREES, CONTRADICTS, AGREES, CONTRADICTS, AGREES, OPEN],
    ),
    "the scale matters": (scale, SCALE, [AGREES, AGREES, AGREES]),
    "the scale matters at the start and not in the end": (
        scale,
        replace(SCALE, accuracy={WITH: {16: [0.9], 64: [0.9]}, WITHOUT: {16: [0.9], 64: [0.9]}}),
        [AGREES, AGREES, OPEN],
    ),
    "nothing saturates": (
        scale,
        replace(
            SCALE,
            largest=dict.fromkeys(scale.WAYS, SCALE.largest[WITH]),
            slope=dict.fromkeys(scale.WAYS, SCALE.slope[WITH]),
        ),
        [CONTRADICTS, CONTRADICTS, AGREES],
    ),
    "eight heads are better": (heads, HEADS, [AGREES, AGREES, AGREES, AGREES]),
    "one head is as good, and no head is needed": (
        heads,
        replace(HEADS, right={key: [0.9] for key in heads.COUNTS}, heads=[head("layer 1, head 1", 0.1, 0.2, 0.9)]),
        [OPEN, CONTRADICTS, CONTRADICTS, OPEN],
    ),
    "induction heads are not needed": (heads, replace(HEADS, silenced=0.9), [AGREES, AGREES, AGREES, CONTRADICTS]),
    "repetitions are not learnt": (heads, replace(HEADS, whole=(0.1, 0.9)), [AGREES, OPEN, OPEN, OPEN]),
    "the future leaks": (masks, MASKS, [AGREES, AGREES, AGREES]),
    "nothing leaks": (
        masks,
        replace(MASKS, loss={"causal": [1.1], "no mask": [1.3]}, written={key: [1.0] for key in masks.WAYS}),
        [CONTRADICTS, OPEN, AGREES],
    ),
    "the mask itself leaks": (
        masks,
        replace(MASKS, change={"causal": [0.5], "no mask": [4.0]}),
        [AGREES, AGREES, CONTRADICTS],
    ),
    "depth needs residuals and norms": (residuals, RESIDUALS, [AGREES] * 4),
    "depth needs neither": (
        residuals,
        replace(RESIDUALS, loss={way: {2: [0.1], 32: [0.1]} for way in residuals.WAYS}),
        [OPEN, OPEN, OPEN, AGREES],
    ),
    "nothing is learnt at depth": (
        residuals,
        replace(RESIDUALS, loss={way: {2: [0.1], 32: [2.7]} for way in residuals.WAYS}),
        [OPEN, OPEN, OPEN, AGREES],
    ),
    "an encoder mixes answers": (shapes, SHAPES, [AGREES, AGREES]),
    "an encoder does as well": (
        shapes,
        replace(SHAPES, right={task: {key: [0.9] for key in shapes.SHAPES} for task in shapes.TASKS}),
        [AGREES, OPEN],
    ),
    "warm-up and Adam are needed": (optimizers, OPTIMIZERS, [AGREES, AGREES, AGREES]),
    "SGD is better, and norm first needs warm-up": (
        optimizers,
        replace(
            OPTIMIZERS,
            sgd={0.1: [0.01]},
            warmup={
                POST: OPTIMIZERS.warmup[POST],
                PRE: {RISE: {1e-3: [0.3], 1e-2: [0.2]}, SUDDEN: {1e-3: [0.3], 1e-2: [2.6]}},
            },
        ),
        [AGREES, CONTRADICTS, CONTRADICTS],
    ),
    "no optimizer has learnt": (
        optimizers,
        replace(OPTIMIZERS, warmup={POST: NOT_LEARNT, PRE: NOT_LEARNT}),
        [OPEN, OPEN, OPEN],
    ),
    "a cache saves": (cache, CACHE, [AGREES, AGREES, AGREES]),
    "a cache saves work but less time": (
        cache,
        replace(CACHE, without={32: [1.5], 256: [16.0]}),
        [AGREES, AGREES, CONTRADICTS],
    ),
    "a cache changes the text": (cache, replace(CACHE, same=False), [CONTRADICTS, AGREES, AGREES]),
    "attention is quadratic in all": (cost, COST, [AGREES, AGREES, AGREES]),
    "an LSTM is slow where it has less to do, and memory is linear": (
        cost,
        replace(
            COST,
            seconds=COST.seconds | {cost.LSTM: {64: [9.0], 128: [17.0]}},
            kept=COST.kept | {cost.FUSED: {64: 100, 128: 200}},
        ),
        [CONTRADICTS, AGREES, CONTRADICTS],
    ),
    "a Transformer reaches further": (long_range, LONG, [AGREES] * 4),
    "an LSTM reaches further": (
        long_range,
        replace(
            LONG,
            right={
                task: {"Transformer": {50: [1.0], 200: [0.2]}, "LSTM": {50: [0.9], 200: [0.9]}}
                for task in long_range.TASKS
            },
        ),
        [CONTRADICTS] * 4,
    ),
    "neither learns": (
        long_range,
        replace(
            LONG,
            right={task: {name: {50: [0.1], 200: [0.1]} for name in long_range.MODELS} for task in long_range.TASKS},
        ),
        [OPEN] * 4,
    ),
    "there is room": (geometry, GEOMETRY, [AGREES, AGREES, AGREES]),
    "there is no room, and words are close": (
        geometry,
        replace(
            GEOMETRY,
            counts={128: (144.0, 144.0), 12_288: (1e5, 1e9)},
            within=GEOMETRY.within | {geometry.NAMES[2]: [0.4]},
        ),
        [AGREES, CONTRADICTS, CONTRADICTS],
    ),
    "all changes help": (modern, MODERN, [AGREES, AGREES, AGREES]),
    "one change harms": (
        modern,
        replace(MODERN, loss=MODERN.loss | {"gelu": [3.5]}),
        [CONTRADICTS, AGREES, CONTRADICTS],
    ),
    "changes are within chance": (
        modern,
        replace(MODERN, paper=[2.5, 3.0, 3.5], everything=[3.1]),
        [OPEN, CONTRADICTS, CONTRADICTS],
    ),
}


@pytest.mark.parametrize(("experiment", "measured", "verdicts"), CASES.values(), ids=CASES.keys())
def test_what_is_found_follows_from_what_is_measured(experiment: Any, measured: Any, verdicts: list[str]) -> None:
    assert [finding.verdict for finding in experiment.conclude(measured).findings] == verdicts


def test_the_sentences_hold_the_numbers() -> None:
    first, second, third = masks.conclude(MASKS).findings
    assert "1.100 nats" in first.measured
    assert "0.100 without a mask" in first.measured
    assert "20% are allowed" in second.measured
    assert "100% with the mask" in second.measured
    assert "by 0.0 with the mask, by 4.0 without" in third.measured
    gains = modern.conclude(replace(MODERN, loss=MODERN.loss | {"gelu": [3.5]})).findings[0].measured
    assert "worse: gelu;" in gains
    assert "better: norm first, RMS norm, rotary positions, gated silu" in gains
    assert "(0.020 between seeds" in gains
