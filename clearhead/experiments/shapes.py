"""Three shapes on one task: write the input backwards; and then one with two right answers, where guessing each place fails."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.config import Config
from clearhead.costs import cost
from clearhead.experiments.fitting import IGNORED, Batch, Batches, build, fit, small
from clearhead.experiments.result import Cell, Chart, Curve, Result, Table, if_learnt, judge, middle, percent
from clearhead.experiments.tasks import draw

SHAPES = ("encoder", "decoder", "encoder-decoder")
TASKS = ("backwards", "either way")
VOCAB, LENGTH = 10, 8  # token VOCAB separates, and begins what is written


@dataclass(frozen=True)
class Size:
    steps: int = 400
    rows: int = 32
    tests: int = 64


SIZES = {"quick": Size(steps=4, rows=4, tests=4), "usual": Size(), "full": Size(3_000, 64, 512)}


@dataclass(frozen=True)
class Measured:
    right: dict[str, dict[str, list[float]]]  # by task and shape: whole rows that are valid, one number a seed
    params: dict[str, int]
    flops: dict[str, int]  # to write one row


def measure(size: Size, seeds: range) -> Measured:
    right: dict[str, dict[str, list[float]]] = {task: {shape: [] for shape in SHAPES} for task in TASKS}
    for seed in seeds:
        for task in TASKS:
            for shape in SHAPES:
                model = make(shape, seed)
                fit(model, batches_for(shape, task, size.rows), steps=size.steps, seed=seed)
                right[task][shape].append(valid_rows(model, shape, task, size.tests))
    built = {shape: make(shape, 0) for shape in SHAPES}
    params = {shape: sum(p.numel() for p in model.parameters()) for shape, model in built.items()}
    return Measured(right, params, {shape: flops_of(shape) for shape in SHAPES})


def config_of(shape: str) -> Config:
    """About the same number of parameters: an encoder-decoder of 1+1 layers has two stacks, and attention across."""
    layers = 1 if shape == "encoder-decoder" else 2
    fields = dict(head="tokens") if shape == "encoder" else {}
    return small(
        shape=shape, n_layers=layers, vocab_size=VOCAB + 1, max_len=2 * LENGTH + 1, positions="learned", **fields
    )


def make(shape: str, seed: int) -> nn.Module:
    return build(config_of(shape), seed)


def answers(source: Tensor, task: str, generator: torch.Generator) -> Tensor:
    """The input backwards; "either way": backwards or as it is, at random."""
    if task == "backwards":
        return source.flip(1)
    return torch.where(torch.rand(len(source), 1, generator=generator) < 0.5, source, source.flip(1))


def batches_for(shape: str, task: str, rows: int) -> Batches:
    def batches(generator: torch.Generator) -> Batch:
        source = draw(generator, 0, VOCAB, rows, LENGTH)
        target = answers(source, task, generator)
        begin = torch.full((rows, 1), VOCAB)
        if shape == "encoder":
            return (source,), target
        if shape == "encoder-decoder":
            return (source, torch.cat([begin, target[:, :-1]], 1)), target
        tokens = torch.cat([source, begin, target], 1)
        asked = tokens[:, 1:].clone()
        asked[:, :LENGTH] = IGNORED
        return (tokens[:, :-1],), asked

    return batches


@torch.no_grad()
def valid_rows(model: nn.Module, shape: str, task: str, rows: int) -> float:
    """Greedy output for fresh inputs: the share of rows that are wholly right."""
    source = draw(torch.Generator().manual_seed(77), 0, VOCAB, rows, LENGTH)
    written = write(model, shape, source)
    valid = (written == source.flip(1)).all(1)
    if task == "either way":
        valid |= (written == source).all(1)
    return float(valid.float().mean())


def write(model: nn.Module, shape: str, source: Tensor) -> Tensor:
    if shape == "encoder":
        return model(source).argmax(-1)
    written = torch.full((len(source), 1), VOCAB)
    for _ in range(LENGTH):
        logits = model(source, written) if shape == "encoder-decoder" else model(torch.cat([source, written], 1))
        written = torch.cat([written, logits[:, -1:].argmax(-1)], 1)
    return written[:, 1:]


def flops_of(shape: str) -> int:
    """With a cache, as generation computes it: each token once."""
    config = config_of(shape)
    if shape == "encoder-decoder":
        return cost(config, batch=1, length=LENGTH, source_length=LENGTH).useful_flops
    return cost(config, batch=1, length=LENGTH if shape == "encoder" else 2 * LENGTH).useful_flops


def conclude(m: Measured) -> Result:
    rows: list[tuple[Cell, ...]] = [
        (shape, *(percent(m.right[task][shape]) for task in TASKS), m.params[shape], m.flops[shape]) for shape in SHAPES
    ]
    writers = {task: [min(m.right[task][shape]) for shape in SHAPES[1:]] for task in TASKS}
    said = {task: ", ".join(f"{shape} {percent(m.right[task][shape])}" for shape in SHAPES) for task in TASKS}
    shallow = SHAPES[0]
    return Result(
        tables=(
            Table(
                f"Whole rows of {LENGTH} tokens right",
                ("shape", "backwards", "either way", "parameters", "operations a row"),
                tuple(rows),
            ),
        ),
        charts=(
            Chart(
                "Whole rows right",
                "",
                "share",
                tuple(Curve(task, SHAPES, tuple(middle(m.right[task][shape]) for shape in SHAPES)) for task in TASKS),
            ),
        ),
        findings=(
            if_learnt(
                max(max(values) for values in m.right["backwards"].values()) > 0.5,
                judge(
                    "All three shapes can do a task of equal lengths.",
                    f"Whole rows right: {said['backwards']}.",
                    more=[min(min(values) for values in m.right["backwards"].values())],
                    less=[0.8],
                    margin=0.0,
                ),
            ),
            judge(
                "An encoder that answers all places at once fails where several answers are right: it mixes them.",
                f"Backwards or as it is, both right: {said['either way']}.",
                more=writers["either way"],
                less=m.right["either way"][shallow],
                margin=0.3,
            ),
        ),
    )
