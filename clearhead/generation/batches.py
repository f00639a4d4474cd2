"""Lists of ids on their way in and out: checked, sorted by length, cut into batches, padded."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.errors import InputError

Ids = Sequence[Sequence[int]]  # several texts


@dataclass(frozen=True)
class Hypothesis:
    """One text and what the model thinks of it.

    `tokens` are the new ids, without the one that ended them. `score` is the sum of their log-probabilities, the end's
    included, in beam search divided by length**length_penalty. `finished`: the text was ended, not cut by its limit.
    """

    tokens: list[int]
    score: float
    finished: bool


def check_rows(rows: Sequence[object], vocab_size: int, what: str) -> list[list[int]]:
    """Lists of ids of this vocabulary, and nothing else."""
    checked: list[list[int]] = []
    for place, row in enumerate(rows):
        ids: list[Any] = list(row) if isinstance(row, Sequence) else [None]
        if not all(type(token) is int for token in ids):
            raise InputError(
                f"{what}s are a list of lists of ids; got {what} {place} = {str(row)[:40]!r}; encode text with the model's "
                f"tokenizer, and put a single {what} in a list of its own"
            )
        check_ids(ids, vocab_size, f"{what} {place}")
        checked.append(ids)
    return checked


def check_ids(ids: Sequence[int], vocab_size: int, what: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise InputError(
            f"{what} holds ids from {min(ids)} to {max(ids)}; the vocabulary has 0 .. {vocab_size - 1}; "
            f"is this the model's own tokenizer?"
        )


def check_least(value: object, least: int, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} is a whole number of at least {least}; got {value!r}; raise it")


def check_shape(model: nn.Module, shape: str) -> None:
    config = getattr(model, "config", None)
    found, inputs = getattr(config, "shape", type(model).__name__), getattr(config, "inputs", None)
    if (found, inputs) != (shape, "tokens"):
        raise InputError(
            f"this takes a model of shape={shape!r} over tokens; got shape={found!r}, inputs={inputs!r}; "
            f"generate is for decoders, translate for encoder-decoders"
        )


def batches(costs: Sequence[tuple[int, int]], budget: int) -> Iterator[list[int]]:
    """Places grouped so that rows of one batch are about as long and, padded to the longest, stay within the budget.

    Each cost is a row's length, by which it is sorted, and what it holds in tokens at its largest. The longest come first:
    what does not fit in memory fails at once. A row larger than the budget is a batch of its own.
    """
    group: list[int] = []
    for place in sorted(range(len(costs)), key=lambda place: costs[place], reverse=True):
        if group and (len(group) + 1) * max(costs[one][1] for one in (group[0], place)) > budget:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def pad(rows: Ids, device: torch.device) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"] | None]:
    """Rows side by side, filled up on the right; which tokens are real, or None where all are."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    if all(len(row) == longest for row in rows):
        return tokens, None
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(longest, device=device) < lengths[:, None]


def worth_dropping(n_done: int, n_rows: int) -> bool:
    """Dropping rows copies the others, so it waits until an eighth is done: the copies then cost little in all."""
    return n_done > 0 and 8 * n_done >= n_rows


@contextmanager
def evaluating(model: nn.Module) -> Generator[None, None, None]:
    """Without dropout or gradients inside; each module's mode is put back after."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def widen(logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    """At least float32: 8 or 11 bits tell too few tokens apart."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
