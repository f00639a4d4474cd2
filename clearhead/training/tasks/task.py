"""What a task is: rows of data in, a batch; a batch in, a loss and the numbers that metrics are made of."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from clearhead.config import Generation
from clearhead.data import Tokenizer
from clearhead.data.batch_order import RowOrder, TokenOrder
from clearhead.layers.linear import Packed
from clearhead.models import Model
from clearhead.training.losses import IGNORED, cross_entropy
from clearhead.training.recipe import Recipe
from clearhead.training.report import AttentionPicture

Batch = dict[str, Tensor]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Losses:
    """Sums over the predictions of a batch."""

    goal: Float[Tensor, ""]  # what is minimised: with label smoothing, if there is any
    loss: Float[Tensor, ""]  # - log p(right)
    correct: Int[Tensor, ""]


@dataclass(frozen=True)
class Sample:
    """One held-out example, as the model writes it."""

    input: str
    output: str
    wanted: str


@dataclass(frozen=True)
class Facts:
    """What the data tells: fields of the config, how the model starts and stops, and what a user should know."""

    fields: dict[str, Any]
    generation: Generation
    table: dict[str, str]  # shown before the first step
    notes: list[str]  # what was dropped, cut or replaced


class Task(ABC):
    """A task with its data. `order` says which rows a step takes; everything about a row is a function of (seed, step, row)."""

    facts: Facts
    tokenizer: Tokenizer | None = None
    beside: Mapping[str, Any] = MappingProxyType({})  # what else a finished model's folder holds: JSON files by name
    rounding: tuple[int, int] = (1, 1)  # batches are filled up to multiples of so many rows, and of such a length
    is_even = False  # whether all batches have one shape by themselves
    order: RowOrder | TokenOrder
    shape: tuple[int, int, int]  # rows, length and source length of a usual batch

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def pack(self, model: Model) -> bool:
        """From now on lay a batch's texts one after the other in place of padding them, where task and model can."""
        return False

    def rows(self, step: int) -> Rows:
        """The rows of a step, of all processes."""
        return self.order.rows(step)

    def epoch(self, step: int) -> float:
        """How often all rows were seen before this step."""
        return self.order.epoch(step)

    @abstractmethod
    def batch(self, rows: Rows, step: int) -> Batch:
        """The tensors of these rows, as step `step` sees them."""

    @abstractmethod
    def predictions(self, rows: Rows) -> int:
        """How many predictions the rows hold: what a sum of losses is divided by."""

    @abstractmethod
    def tokens(self, rows: Rows) -> int:
        """How many tokens the rows hold, padding left out."""

    @abstractmethod
    def losses(self, model: Model, batch: Batch) -> Losses:
        """The losses of a batch. The one place where a task meets the model."""

    @abstractmethod
    def held_out(self) -> list[Rows]:
        """Batches of held-out rows, each row once."""

    @abstractmethod
    def held_out_batch(self, rows: Rows) -> Batch:
        """The tensors of held-out rows."""

    def count(self, batch: Batch) -> Tensor:
        """How many predictions a batch holds."""
        return (batch["targets"] != IGNORED).sum()

    def metrics(self, loss: float, correct: float, count: float) -> dict[str, float]:
        """What the sums over all held-out predictions say."""
        mean = loss / max(count, 1)
        return {"loss": mean, "perplexity": math.exp(min(mean, 700.0)), "accuracy": correct / max(count, 1)}

    @abstractmethod
    def write(self, model: Model, *, final: bool) -> tuple[dict[str, float], list[Sample]]:
        """What the model writes for held-out examples: scores of it, and some to read. `model` is in eval mode."""

    def pictures(self, model: Model) -> list[AttentionPicture]:
        """Attention of the finished model on held-out examples, for the report."""
        return []


class Objective(nn.Module):
    """The model and its loss as one module: what is compiled, copied and spread over processes."""

    def __init__(self, model: Model, task: Task) -> None:
        super().__init__()
        self.model = model
        self.task = task

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        losses = self.task.losses(self.model, batch)
        return losses.goal, losses.loss, losses.correct


def token_losses(model: Any, states: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"], smoothing: float) -> Losses:
    """Losses of a model that ends in a vocabulary, from its final states."""
    x, weight, bias = model.head.parts(states, model.tokens.weight)
    if isinstance(weight, Packed):  # measured, not trained
        weight = weight.rows(torch.arange(weight.shape[0], device=x.device))
    smoothing = smoothing if model.training else 0.0
    loss, goal, correct = cross_entropy(x, weight, targets, bias=bias, smoothing=smoothing, eight=model.head.eight)
    return Losses(goal, loss, correct)


def row_generator(seed: int, step: int, row: int) -> np.random.Generator:
    """Random numbers for one row at one step, the same whatever else is in the batch and whichever process asks."""
    return np.random.Generator(np.random.Philox(key=[seed, 0x9E3779B97F4A7C15], counter=[step + 1, row, 0, 0]))


def pad(
    rows: list[NDArray[Any]], value: int, rounding: tuple[int, int] = (1, 1)
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Rows of different lengths as one tensor, filled up on the right; and which are real.

    Rows that are added to make a round number have one real token, since no row may have none.
    """
    lengths = [len(row) for row in rows]
    height, width = (-(-size // to) * to for size, to in zip((len(rows), max(lengths)), rounding, strict=True))
    out = np.full((height, width), value, dtype=np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    real = torch.arange(width) < torch.tensor(lengths + [1] * (height - len(rows)))[:, None]
    return torch.from_numpy(out), real


def piece_name(tokenizer: Tokenizer, id: int) -> str:
    """A token as a person reads it."""
    return tokenizer.decode([id]) or tokenizer.token(id)
