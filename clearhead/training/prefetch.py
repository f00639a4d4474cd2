"""The batches of the next steps, made by a thread while the current step runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch

from clearhead.training.distributed import Processes
from clearhead.training.tasks.task import Batch, Rows, Task

AHEAD = 3


@dataclass(frozen=True)
class StepBatch:
    """One process's rows of a step's batch, in `accumulate` parts."""

    parts: list[tuple[Batch, float]]  # each with its weight: 1, or 0 for a filler where there were too few rows
    predictions: int  # of the whole batch, on all processes
    tokens: int  # likewise


def split_rows(rows: Rows, rank: int, world_size: int, accumulate: int) -> list[tuple[Rows, float]]:
    """This process's rows in parts, each with a weight. All processes have the same number of parts: they exchange gradients.

    A part without rows gets one row at weight 0.
    """
    parts = [rows[part::accumulate][rank::world_size] for part in range(accumulate)]
    return [(part, 1.0) if len(part) else (rows[:1], 0.0) for part in parts]


def make_step_batch(task: Task, step: int, processes: Processes) -> StepBatch:
    rows = task.rows(step)
    parts = split_rows(rows, processes.rank, processes.world_size, task.accumulate)
    batches = [(to_device(task.batch(part, step), processes.device), weight) for part, weight in parts]
    return StepBatch(batches, task.predictions(rows, step), task.tokens(rows, step))


def to_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    if device.type != "cuda":  # pinned memory is CUDA's
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def prefetch(task: Task, start: int, stop: int, processes: Processes) -> Generator[StepBatch]:
    """The batches of steps start .. stop - 1, a few of them made ahead. An error in the thread is raised here."""
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
                put(make_step_batch(task, step, processes))
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
