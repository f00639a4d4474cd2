"""Small tasks on random data, and models for them in which every parameter has an effect."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models.tiny import stir

from clearhead.models import Model
from clearhead.training.callbacks import Callbacks
from clearhead.training.distributed import Processes
from clearhead.training.initialization import initial_model
from clearhead.training.recipe import Recipe
from clearhead.training.tasks import make_task
from clearhead.training.tasks.task import Losses, Rows, Task

ALONE = Processes(torch.device("cpu"))
# Distinct primes where they can be; rotary wants an even head.
MODEL = dict(n_layers=2, d_model=22, n_heads=3, d_head=10, d_ff=37, positions="rotary", norm="rms", norm_first=True)


def words(count: int, seed: int = 0) -> str:
    """Words of two to five letters, of a small alphabet."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdeg", k=draw.randint(2, 5))) for _ in range(count))


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def recipe_of(task: str, *, model: dict[str, Any] | None = None, data: dict[str, Any], **train: Any) -> Recipe:
    data = {"tokenizer": "chars", **data}
    return Recipe.from_tables({"task": task, "model": MODEL if model is None else model, "data": data, "train": train})


def make(recipe: Recipe, folder: Path, show: Callbacks | None = None) -> Any:
    """The recipe's task, as a run in `folder` would make it."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    return make_task(recipe, folder / "run", ALONE, show or Callbacks())


def model_for(task: Task, *, dtype: torch.dtype = torch.float64) -> Model:
    """A model in eval mode; float64, so that only a real difference is larger than 1e-9."""
    model = initial_model(task.recipe, task.facts)
    stir(model)
    return model.to(dtype).eval()


def sums(losses: Losses) -> torch.Tensor:
    return torch.stack([losses.goal.double(), losses.loss.double(), losses.correct.double()]).detach()


def one_by_one(task: Task, model: Model, rows: Rows, step: int | None = None) -> torch.Tensor:
    """The sums over a batch, from batches of one row each."""
    made = [
        task.held_out_batch(rows[i : i + 1]) if step is None else task.batch(rows[i : i + 1], step)
        for i in range(len(rows))
    ]
    return torch.stack([sums(task.losses(model, batch)) for batch in made]).sum(0)


def all_held_out(task: Task) -> Rows:
    return np.concatenate(task.held_out())
