"""The interface of a task: makes batches from rows of data, and losses and metrics from batches."""

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
from clearhead.kernels import Packed
from clearhead.kernels.cross_entropy import IGNORED, cross_entropy
from clearhead.models import Model
from clearhead.quantization.float8 import Float8Head
from clearhead.sampling import token_ids
from clearhead.training.recipe import Recipe
from clearhead.training.report_figures import AttentionPicture

Batch = dict[str, Tensor]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Losses:
    """Sums over the predictions of a batch."""

    goal: Float[Tensor, ""]  # what is minimised: the loss, with label smoothing if there is any
    loss: Float[Tensor, ""]  # - log p(target)
    correct: Int[Tensor, ""]


@dataclass(frozen=True)
class Sample:
    """One held-out example, and the model's output for it."""

    input: str
    output: str
    wanted: str


@dataclass(frozen=True)
class Facts:
    """What is known from the data: fields of the model's config, its start and end tokens, and what a user should know."""

    fields: dict[str, Any]
    generation: Generation
    table: dict[str, str]  # for the summary before the first step
    notes: list[str]  # what was dropped, cut or replaced


class Task(ABC):
    """A task with its data. `order` gives the rows of a step; all randomness is a function of (seed, step, row)."""

    facts: Facts
    tokenizer: Tokenizer | None = None
    extra_files: Mapping[str, Any] = MappingProxyType({})  # JSON files to write beside the model, by name
    rounding: tuple[int, int] = (1, 1)  # rows and length of a batch are padded to multiples of these
    is_even = False  # whether all batches have one shape without padding
    order: RowOrder | TokenOrder
    shape: tuple[int, int, int]  # rows, length and source length of a typical batch

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.accumulate = recipe.train.accumulate  # the trainer doubles it when memory does not suffice

    @property
    def shapes(self) -> list[tuple[int, int, tuple[int, int, int]]]:
        """The shape of a typical batch, from a first step on and before another; `shape` is that of the last step."""
        return [(0, self.recipe.train.steps, self.shape)]

    def pack(self, model: Model) -> bool:
        """From now on pack a batch's texts one after the other instead of padding them. Returns False if task or model can not."""
        return False

    def rows(self, step: int) -> Rows:
        """The rows of a step, for all processes together."""
        return self.order.rows(step)

    def epoch(self, step: int) -> float:
        """How many times all rows were seen before this step."""
        return self.order.epoch(step)

    @abstractmethod
    def batch(self, rows: Rows, step: int) -> Batch:
        """The tensors of these rows at this step."""

    @abstractmethod
    def predictions(self, rows: Rows, step: int) -> int:
        """The number of predictions in these rows at this step: a sum of losses is divided by it."""

    @abstractmethod
    def tokens(self, rows: Rows, step: int) -> int:
        """The number of tokens in these rows at this step, without padding."""

    @abstractmethod
    def losses(self, model: Model, batch: Batch) -> Losses:
        """The losses of a batch. Only here a task calls the model in training."""

    @abstractmethod
    def held_out(self) -> list[Rows]:
        """Batches of held-out rows, each row once."""

    @abstractmethod
    def held_out_batch(self, rows: Rows) -> Batch:
        """The tensors of held-out rows."""

    def count(self, batch: Batch) -> Tensor:
        """The number of predictions in a batch."""
        return (batch["targets"] != IGNORED).sum()

    def metrics(self, loss: float, correct: float, count: float) -> dict[str, float]:
        """Metrics from the sums over all held-out predictions."""
        mean = loss / max(count, 1)
        return {"loss": mean, "perplexity": math.exp(min(mean, 700.0)), "accuracy": correct / max(count, 1)}

    @abstractmethod
    def write(self, model: Model, *, final: bool) -> tuple[dict[str, float], list[Sample]]:
        """The model's outputs for held-out examples: scores over them, and some samples. `model` is in eval mode."""

    def attention_pictures(self, model: Model) -> list[AttentionPicture]:
        """Attention maps of the finished model on held-out examples, for the report."""
        return []


class Objective(nn.Module):
    """The model and its loss as one module, to be compiled and parallelized."""

    def __init__(self, model: Model, task: Task) -> None:
        super().__init__()
        self.model = model
        self.task = task

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        losses = self.task.losses(self.model, batch)
        return losses.goal, losses.loss, losses.correct


def token_losses(model: Any, states: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"], smoothing: float) -> Losses:
    """Losses of a model with a vocabulary head, from its final states."""
    x, weight, bias = model.head.parts(states, model.tokens.weight)
    if isinstance(weight, Packed):  # a quantized model is evaluated, not trained
        weight = weight.rows(torch.arange(weight.shape[0], device=x.device))
    smoothing = smoothing if model.training else 0.0
    loss, goal, correct = cross_entropy(
        x, weight, targets, bias=bias, smoothing=smoothing, eight=isinstance(model.head, Float8Head)
    )
    return Losses(goal, loss, correct)


def row_generator(seed: int, step: int, row: int) -> np.random.Generator:
    """Random numbers for one row at one step: independent of the rest of the batch and of the process."""
    return np.random.Generator(np.random.Philox(key=[seed, 0x9E3779B97F4A7C15], counter=[step + 1, row, 0, 0]))


def pad(
    rows: list[NDArray[Any]], value: int, rounding: tuple[int, int] = (1, 1)
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Rows of different lengths as one tensor, padded on the right; and which tokens are real.

    Rows that are added for `rounding` have one real token, since attention needs at least one.
    """
    tokens, real = token_ids.pad(rows, value, rounding)
    return torch.from_numpy(tokens), torch.from_numpy(real)
