"""The next steps' batches, made by a thread while the current step computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch

from clearhead.training.processes import Processes
from clearhead.training.tasks.task import Batch, Rows, Task

AHEAD = 3


@dataclass(frozen=True)
class StepBatch:
    """One process's part of a step's batch, in `accumulate` pieces; the counts are the whole batch's."""

    pieces: list[tuple[Batch, float]]  # a weight of 0: there was no row left, and this one stands in for it
    predictions: int
    tokens: int


def share(rows: Rows, rank: int, world: int, accumulate: int) -> list[tuple[Rows, float]]:
    """This process's rows, in pieces: every process has as many pieces, so that none waits for another in vain."""
    pieces = [rows[part::accumulate][rank::world] for part in range(accumulate)]
    return [(piece, 1.0) if len(piece) else (rows[:1], 0.0) for piece in pieces]


def make_step(task: Task, step: int, processes: Processes) -> StepBatch:
    rows = task.rows(step)
    pieces = share(rows, processes.rank, processes.world, task.recipe.train.accumulate)
    batches = [(to_device(task.batch(piece, step), processes.device), weight) for piece, weight in pieces]
    return StepBatch(batches, task.predictions(rows), task.tokens(rows))


def to_device(batch: Batch, device: torch.device) -> Batch:
    if device.type != "cuda":
        return batch
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def prefetch(task: Task, start: int, stop: int, processes: Processes) -> Generator[StepBatch]:
    """The batches of steps start .. stop - 1, a few of them made ahead. What goes wrong in the thread is raised here."""
    ready: queue.Queue[StepBatch | BaseException] = queue.Queue(maxsize=AHEAD)
    closed = threading.Event()

    def put(item: StepBatch | BaseException) -> None:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for step in range(start, stop):
                if closed.is_set():
                    return
                put(make_step(task, step, processes))
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        for _ in range(start, stop):
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()


def split_held_out(batches: list[Rows], limit: int) -> list[Rows]:
    """At most `limit` rows of the held-out batches (0: all), spread over all of them."""
    total = sum(map(len, batches))
    if not limit or total <= limit:
        return batches
    ends = np.cumsum([len(rows) for rows in batches]) * limit // total
    return [rows[:n] for rows, n in zip(batches, np.diff(ends, prepend=0), strict=True) if n]
