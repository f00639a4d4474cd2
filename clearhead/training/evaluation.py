"""Evaluation: loss, metrics and samples on held-out data."""

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

from clearhead import kernels
from clearhead.errors import ConfigError
from clearhead.training.callbacks import Callbacks
from clearhead.training.distributed import Processes, process_group, reshard
from clearhead.training.initialization import initial_model
from clearhead.training.lora import gather_model
from clearhead.training.prefetch import split_held_out, split_rows, to_device
from clearhead.training.recipe import Recipe, Train
from clearhead.training.schedules import mean_batch
from clearhead.training.tasks import make_task
from clearhead.training.tasks.task import Objective, Task

SHARE = 0.1  # of the time of training, for evaluations, if the recipe does not say how many rows they take
FORWARD = 1 / 3  # of the time of a training step: the pass without gradients


def rows_to_evaluate(task: Task) -> int:
    """At most how many held-out rows an evaluation during training takes; 0: all. By the recipe alone: resuming stays exact."""
    t, rows = task.recipe.train, task.shape[0]
    if t.evaluate_rows >= 0:
        return t.evaluate_rows
    return max(rows, int(SHARE / FORWARD * t.evaluate_every * rows * mean_batch(t)))


def evaluation_steps(task: Task) -> float:
    """The time of all evaluations of a run, in training steps: those between, and the last one, which takes all rows."""
    t, rows = task.recipe.train, task.shape[0]
    held = sum(map(len, task.held_out()))
    some = min(held, rows_to_evaluate(task) or held)
    # A row that is decoded token by token takes about as long as one that is trained on.
    scored, all_scored = (min(t.score_rows, held), held) if task.recipe.task == "translate" and t.score_rows else (0, 0)
    count = -(-t.steps // t.evaluate_every)
    return (count * (FORWARD * some + scored) + FORWARD * held + all_scored) / rows


@torch.no_grad()
def evaluate(
    objective: Objective,
    task: Task,
    processes: Processes,
    train: Train,
    autocast: AbstractContextManager[Any],
    progress: Callable[[int, int], None],
    *,
    final: bool = False,
) -> dict[str, Any]:
    """Loss and the task's other metrics over the held-out rows, which are divided among the processes.

    `progress` gets the number of batches done, and of all.
    """
    training = objective.training
    objective.eval()
    sums = kernels.to_float64(torch.zeros(3, device=processes.device))  # loss, correct, predictions
    batches = split_held_out(task.held_out(), 0 if final else rows_to_evaluate(task))
    for done, rows in enumerate(batches):
        progress(done, len(batches))
        for part, weight in split_rows(rows, processes.rank, processes.world_size, 1):
            batch = to_device(task.held_out_batch(part), processes.device)
            with autocast:
                _, loss, correct = objective(batch)
            sums += weight * torch.stack([kernels.to_float64(x) for x in (loss, correct, task.count(batch))])
    progress(len(batches), len(batches))
    loss, correct, count = processes.sum(sums).tolist()
    if not math.isfinite(loss):
        raise ConfigError(
            f"the loss on held-out data is no number (got {loss}): the weights are spoilt; in training, train.lr={train.lr} may be "
            f"too high: lower it, or set train.clip (now {train.clip}); the checkpoints before are unharmed"
        )
    row: dict[str, Any] = task.metrics(loss, correct, count)
    # A sharded model can not generate in one process: the first process generates with a whole copy.
    writer = objective.model if processes.world_size == 1 else gather_model(objective.model)
    if processes.is_first:
        with autocast:
            scores, samples = task.write(writer, final=final)
        row |= scores
        row["samples"] = [asdict(sample) for sample in samples]
    row = processes.broadcast(row)
    objective.train(training)
    reshard(objective)
    if train.best not in row:
        measured = ", ".join(name for name, value in row.items() if isinstance(value, float))
        raise ConfigError(f"train.best={train.best!r} is not measured here; choose one of: {measured}")
    return row


def evaluate_checkpoint(
    recipe: Recipe, show: Callbacks, change: Callable[[nn.Module], object] | None = None
) -> dict[str, Any]:
    """The metrics of the recipe's `model.from` on all of the recipe's data. `change`, if any, is applied to the model first."""
    d, files = recipe.data, ("files", "source", "target")
    held = {("valid" if name == "files" else f"valid_{name}"): getattr(d, name) for name in files}
    recipe = replace(recipe, data=replace(d, **held))
    with process_group(recipe.train.device) as processes, tempfile.TemporaryDirectory() as folder:
        task = make_task(recipe, Path(folder), processes, show)
        model = initial_model(recipe, task.facts).to(processes.device)
        if change is not None:
            change(model)
        objective = Objective(model, task).eval()
        return evaluate(
            objective, task, processes, recipe.train, nullcontext(), show.progress("evaluating"), final=True
        )


def is_better(value: float, best: float | None, metric: str) -> bool:
    """Whether a value is the best so far. Lower is better for losses, higher for accuracy, BLEU and the like."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value < best if metric in ("loss", "perplexity", "bits_per_byte") else value > best
