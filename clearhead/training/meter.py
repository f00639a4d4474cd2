"""The meter: tokens, losses and seconds between two logged steps, and over the whole run."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from clearhead.config import Config
from clearhead.costs.forecast import Cost, cost
from clearhead.costs.hardware import measure_peak
from clearhead.training.callbacks import Row
from clearhead.training.checkpoints import State
from clearhead.training.distributed import Processes
from clearhead.training.precision import uses_bfloat16
from clearhead.training.prefetch import StepBatch
from clearhead.training.tasks.task import Task

USUAL_UTILISATION = 0.3  # the share of the measured peak that training usually reaches


def step_cost(config: Config, task: Task, processes: Processes, shape: tuple[int, int, int] | None = None) -> Cost:
    """The forecast of one pass of one process: a batch (of the last step's shape) divided by processes and accumulated parts."""
    t, (rows, length, source) = task.recipe.train, shape or task.shape
    return cost(
        config,
        batch=max(1, rows // (t.accumulate * processes.world_size)),
        length=min(length, config.max_len),
        source_length=min(source, config.max_source_len) or None,
        mode="train",
        precision="bfloat16" if uses_bfloat16(t, processes.device) else "float32",
        checkpointing=t.checkpointing,
        optimizer=t.optimizer,
        shards=processes.world_size if t.parallel == "fsdp" else 1,
        accumulation=t.accumulate,
        device="cuda" if processes.device.type == "cuda" else "cpu",
    )


def step_seconds(config: Config, task: Task, processes: Processes) -> float:
    """The forecast of a training step at the usual utilisation, before anything is measured but a large product."""
    t = task.recipe.train
    peak = measure_peak(processes.device, torch.bfloat16 if uses_bfloat16(t, processes.device) else torch.float32)
    return step_cost(config, task, processes).useful_flops * t.accumulate / (USUAL_UTILISATION * peak)


@dataclass(frozen=True)
class Interval:
    """The steps of one row of metrics. Their losses and norms are on the way from the device."""

    step: int  # the last one
    more: Mapping[str, float]
    predictions: list[int]
    steps: int
    tokens: int
    all_tokens: int  # of the run
    n_counted: int  # so many of the first were looked at for skipped ones
    values: Tensor  # (2, n): losses, summed over all processes, and the gradients' norms
    arrived: torch.cuda.Event | None


class Meter:
    """Counts tokens, losses and seconds. `close` ends the interval of a row, `row` waits for its numbers.

    On a GPU the loop calls `row` when the next step has been started, so that the GPU is not idle while a row is written.
    """

    def __init__(self, config: Config, task: Task, processes: Processes) -> None:
        self.task, self.processes = task, processes
        t = task.recipe.train
        self.precision = "bfloat16" if uses_bfloat16(t, processes.device) else "float32"
        self.peak = measure_peak(processes.device, getattr(torch, self.precision))
        self.cost = step_cost(config, task, processes)
        # FLOPs of a step on all processes, for each shape that steps have, and the last one's.
        self.shapes = [
            (first, stop, step_cost(config, task, processes, shape).useful_flops * t.accumulate * processes.world_size)
            for first, stop, shape in task.shapes
        ]
        self.flops = self.shapes[-1][-1]
        self.closed: Interval | None = None
        self._clear()

    def work(self, start: int, stop: int) -> float:
        """FLOPs of the steps from `start` on, before `stop`, on all processes."""
        return float(sum(flops * max(0, min(stop, end) - max(start, first)) for first, end, flops in self.shapes))

    def _clear(self) -> None:
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []  # of the gradients
        self.predictions: list[int] = []
        self.tokens = self.steps = self.n_counted = 0

    def start(self, state: State) -> None:
        """Start the clock. A resumed run continues the sums of the last checkpoint."""
        self._clear()
        losses = [x * self.processes.is_first for x in state.losses]  # they are sums over all processes
        self.losses, self.norms = (list(self._tensor(x)) for x in (losses, state.lengths))
        self.predictions = [state.predictions, *[0] * len(losses)][: len(losses)]  # only their sum matters
        self.n_counted = len(losses)
        self.tokens_before, self.seconds_before = state.tokens, state.seconds
        self.all_tokens, self.idle = 0, 0.0
        self.first_tokens, self.first_seconds = 0, 0.0
        self.began = self.first = time.perf_counter()

    def add(self, batch: StepBatch, loss: Tensor, norm: Tensor) -> None:
        """Count one step. Nothing is read from the device here, but after the first step: that would wait for it."""
        self.losses.append(loss)
        self.norms.append(norm)
        self.predictions.append(batch.predictions)
        self.steps += 1
        self.tokens += batch.tokens
        self.all_tokens += batch.tokens
        if self.all_tokens == batch.tokens:
            float(norm)
            self.first_tokens, self.first_seconds = batch.tokens, time.perf_counter() - self.first

    def drop_skipped(self, state: State) -> int:
        """Leave out the steps that were skipped, and count them in the state. Returns how many there were since the last call."""
        if not self.norms:
            return 0
        is_kept: list[bool] = torch.stack(self.norms).isfinite().tolist()  # the same on all processes
        n = count_skipped(is_kept[self.n_counted :], state)
        self.losses, self.norms = list(compress(self.losses, is_kept)), list(compress(self.norms, is_kept))
        self.predictions = list(compress(self.predictions, is_kept))
        self.n_counted = len(self.norms)
        return n

    def stamp(self, state: State) -> None:
        """Write time, tokens, parts of a batch and the sums since the last row into the state that is saved."""
        state.tokens, state.seconds = self.tokens_before + self.all_tokens, self._seconds()
        state.accumulate = self.task.accumulate
        state.losses = self.processes.sum(torch.stack(self.losses)).tolist() if self.losses else []
        state.lengths, state.predictions = [float(x) for x in self.norms], sum(self.predictions)

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.first

    def _tensor(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.processes.device)

    def close(self, step: int, more: Mapping[str, float]) -> None:
        """End an interval: `row` is about the steps up to here. Its numbers start their way to the CPU, and nobody waits."""
        assert self.closed is None, "the row before was not written"
        values = torch.stack([self.processes.sum(torch.stack(self.losses)), torch.stack(self.norms)])
        arrived = None
        if values.is_cuda:
            values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        counts = self.predictions, self.steps, self.tokens, self.tokens_before + self.all_tokens, self.n_counted
        self.closed = Interval(step, more, *counts, values, arrived)
        self._clear()

    def row(self, state: State) -> tuple[Row | None, int]:
        """A line of metrics.jsonl about the interval that was closed, and how many of its steps were skipped. None: all were."""
        interval, self.closed = self.closed, None
        assert interval is not None, "no interval was closed"
        if interval.arrived is not None:
            interval.arrived.synchronize()
        now = time.perf_counter()
        seconds, self.began = now - self.began, now
        losses, norms = interval.values.tolist()
        is_kept = [math.isfinite(norm) for norm in norms]
        n = count_skipped(is_kept[interval.n_counted :], state)
        if not any(is_kept):
            return None, n
        loss = sum(compress(losses, is_kept)) / max(sum(compress(interval.predictions, is_kept)), 1)
        norm = sum(compress(norms, is_kept)) / sum(is_kept)
        row: Row = {"step": interval.step, "kind": "train", "loss": loss, "grad_norm": norm, **interval.more}
        row["tokens_per_second"] = interval.tokens / seconds
        flops = self.work(interval.step - interval.steps, interval.step)
        row["utilisation"] = flops / seconds / self.peak / self.processes.world_size
        row |= {"seconds": self._seconds(), "tokens": interval.all_tokens, "epoch": self.task.epoch(interval.step)}
        row["progress"] = self.work(0, interval.step) / self.work(0, self.task.recipe.train.steps)
        row |= {"skipped": state.skipped} if state.skipped else {}
        return row, n

    @contextmanager
    def paused(self) -> Generator[None]:
        """Time in here does not count as training time: an evaluation, a checkpoint."""
        start = time.perf_counter()
        yield
        passed = time.perf_counter() - start
        self.began += passed
        self.idle += passed

    def speed(self, step: int, before: float) -> Row:
        """The last line about the steps of this process: its speed, evaluations and checkpoints left out; the same without its
        first step, which compiles; and when that ended. `before`: seconds from the start to this meter's."""
        seconds = time.perf_counter() - self.first - self.idle
        row: Row = {"step": step, "kind": "speed", "tokens_per_second": self.all_tokens / seconds}
        if self.all_tokens > self.first_tokens:
            rest = (self.all_tokens - self.first_tokens) / (seconds - self.first_seconds)
            row["tokens_per_second_later"] = rest
        return row | {"first_step_seconds": before + self.first_seconds, "training_seconds": seconds}


def count_skipped(is_kept: list[bool], state: State) -> int:
    """Count the skipped ones of some steps in the state: all so far, and those of the last steps in a row."""
    for kept in is_kept:
        state.skips = 0 if kept else state.skips + 1
    n = is_kept.count(False)
    state.skipped += n
    return n
