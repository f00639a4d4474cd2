"""How good the model is, on data that it does not learn from."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead.errors import ConfigError
from clearhead.training.prefetch import share, split_held_out, to_device
from clearhead.training.processes import Processes, join, reshard
from clearhead.training.recipe import Recipe, Train
from clearhead.training.show import Show
from clearhead.training.starting import export, start
from clearhead.training.tasks import make_task
from clearhead.training.tasks.task import Objective, Task


@torch.no_grad()
def evaluate(
    objective: Objective,
    task: Task,
    processes: Processes,
    train: Train,
    autocast: AbstractContextManager[Any],
    *,
    final: bool = False,
) -> dict[str, Any]:
    """Loss and what else the task measures, over the held-out rows; every process takes its share of them."""
    training = objective.training
    objective.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=processes.device)  # loss, correct, predictions
    for rows in split_held_out(task.held_out(), 0 if final else train.evaluate_rows):
        for piece, weight in share(rows, processes.rank, processes.world, 1):
            batch = to_device(task.held_out_batch(piece), processes.device)
            with autocast:
                _, loss, correct = objective(batch)
            sums += weight * torch.stack([loss.double(), correct.double(), task.count(batch).double()])
    loss, correct, count = processes.sum(sums).tolist()
    row: dict[str, Any] = task.metrics(loss, correct, count)
    # A model spread over processes can not write by itself: its whole copy does, in the first process.
    writer = objective.model if processes.world == 1 else export(objective.model)
    if processes.is_first:
        with autocast:
            scores, samples = task.write(writer, final=final)
        row |= scores
        row["samples"] = [asdict(sample) for sample in samples]
    row = processes.agree(row)
    objective.train(training)
    reshard(objective)
    if train.best not in row:
        measured = ", ".join(name for name, value in row.items() if isinstance(value, float))
        raise ConfigError(f"train.best={train.best!r} is not measured here; choose one of: {measured}")
    return row


def measure(recipe: Recipe, show: Show, change: Callable[[nn.Module], object] | None = None) -> dict[str, Any]:
    """What a finished model (the recipe's `model.from`) reaches, after a `change` if any, on the recipe's data, all held out."""
    d, files = recipe.data, ("files", "source", "target")
    held = {("valid" if name == "files" else f"valid_{name}"): getattr(d, name) for name in files}
    recipe = replace(recipe, data=replace(d, **held))
    with join(recipe.train.device) as processes, tempfile.TemporaryDirectory() as place:
        task = make_task(recipe, Path(place), processes, show)
        model = start(recipe, task.facts).to(processes.device)
        if change is not None:
            change(model)
        objective = Objective(model, task).eval()
        return evaluate(objective, task, processes, recipe.train, nullcontext(), final=True)


def is_better(value: float, best: float | None, metric: str) -> bool:
    """Whether a value is the best so far. Losses fall; accuracy, BLEU and their like rise."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value < best if metric in ("loss", "perplexity", "bits_per_byte") else value > best
