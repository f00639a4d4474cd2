"""Prefetching: every row once, in order, on any number of processes. Errors of the thread are raised; no thread is left."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.training.distributed import Processes
from clearhead.training.prefetch import AHEAD, make_step_batch, prefetch, split_held_out, split_rows
from clearhead.training.recipe import Recipe, Train
from clearhead.training.tasks.task import Batch, Rows, Task

CPU = torch.device("cpu")


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5))
def test_all_pieces_together_are_the_rows_once(n: int, world: int, accumulate: int):
    rows = 3 * np.arange(n) + 1
    pieces = [split_rows(rows, rank, world, accumulate) for rank in range(world)]
    assert all(len(mine) == accumulate for mine in pieces)  # none waits for another in vain
    assert all(len(piece) for mine in pieces for piece, _ in mine)
    assert all(weight in (0, 1) for mine in pieces for _, weight in mine)
    real = [int(row) for mine in pieces for piece, weight in mine if weight for row in piece]
    assert sorted(real) == rows.tolist()
    sizes = [len(piece) * weight for mine in pieces for piece, weight in mine]
    assert max(sizes) - min(sizes) <= 2  # even, but for what does not divide


@given(st.lists(st.integers(1, 9), min_size=1, max_size=13), st.integers(0, 60))
def test_some_of_the_held_out_rows(sizes: list[int], limit: int):
    numbers = np.arange(sum(sizes))
    batches = np.split(numbers, np.cumsum(sizes)[:-1])
    kept = split_held_out(batches, limit)
    total = sum(map(len, kept))
    assert total == (min(limit, len(numbers)) if limit else len(numbers))
    assert all(len(rows) for rows in kept)
    found = np.concatenate(kept)
    assert len(np.unique(found)) == total
    if limit >= len(sizes):  # enough for some of nearly every batch
        assert len(kept) >= len(sizes) - 1 - sum(size * limit < sum(sizes) for size in sizes)


class Counting(Task):
    """A task whose batch holds its row numbers and its step."""

    def __init__(self, accumulate: int = 1, fail_at: int = -1) -> None:
        super().__init__(Recipe(task="language", train=Train(accumulate=accumulate)))
        self.fail_at, self.made = fail_at, list[int]()

    def rows(self, step: int) -> Rows:
        return np.arange(5) + 10 * step

    def batch(self, rows: Rows, step: int) -> Batch:
        if step == self.fail_at:
            raise ValueError(f"step {step} fails")
        self.made.append(step)
        return {"rows": torch.from_numpy(rows), "step": torch.tensor(step)}

    def predictions(self, rows: Rows, step: int) -> int:
        return 2 * len(rows)

    def tokens(self, rows: Rows, step: int) -> int:
        return 3 * len(rows)

    def losses(self, model: Any, batch: Batch) -> Any:
        raise NotImplementedError

    held_out = held_out_batch = write = losses  # type: ignore[assignment]


def test_steps_come_in_order():
    task = Counting(accumulate=2)
    found = list(prefetch(task, 3, 17, Processes(CPU)))
    assert len(found) == 14
    for step, batch in zip(range(3, 17), found, strict=True):
        assert (batch.predictions, batch.tokens) == (10, 15)  # the whole batch's
        assert [piece["rows"].tolist() for piece, _ in batch.parts] == [
            [10 * step, 10 * step + 2, 10 * step + 4],
            [10 * step + 1, 10 * step + 3],
        ]
        assert all(int(piece["step"]) == step for piece, _ in batch.parts)


def test_each_process_has_its_part():
    task = Counting()
    parts = [make_step_batch(task, 0, Processes(CPU, rank, 3)) for rank in range(3)]
    assert [part.parts[0][0]["rows"].tolist() for part in parts] == [[0, 3], [1, 4], [2]]
    assert {part.predictions for part in parts} == {10}
    idle = make_step_batch(task, 0, Processes(CPU, 6, 7))
    assert idle.parts[0][1] == 0
    assert idle.parts[0][0]["rows"].tolist() == [0]


def test_only_a_few_are_made_ahead():
    task = Counting()
    batches = prefetch(task, 0, 1000, Processes(CPU))
    next(batches)
    batches.close()
    assert len(task.made) <= AHEAD + 2


def test_a_failure_comes_out_at_its_step():
    batches = prefetch(Counting(fail_at=2), 0, 9, Processes(CPU))
    assert [int(next(batches).parts[0][0]["step"]) for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="step 2 fails"):
        next(batches)


def test_no_thread_is_left():
    before = threading.active_count()
    for take in (0, 1, 5):
        batches = prefetch(Counting(), 0, 50, Processes(CPU))
        for _ in range(take):
            next(batches)
        batches.close()
    list(prefetch(Counting(), 0, 3, Processes(CPU)))
    assert threading.active_count() == before


def test_nothing_to_do():
    assert list(prefetch(Counting(), 7, 7, Processes(CPU))) == []


def test_a_step_is_the_same_whenever_it_is_made():
    first, later = (
        [batch.parts[0][0]["rows"].tolist() for batch in prefetch(Counting(), start, 9, Processes(CPU))]
        for start in (0, 4)
    )
    assert first[4:] == later
