"""The metrics of a run: measured between two logged steps, written to metrics.jsonl, and to TensorBoard if it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead import kernels
from clearhead.checkpoint.durable_files import NOT_A_LINK, write_text
from clearhead.config import Config
from clearhead.costs.forecast import Cost, cost
from clearhead.costs.hardware import measure_peak
from clearhead.training.callbacks import Row
from clearhead.training.checkpoints import State
from clearhead.training.distributed import Processes
from clearhead.training.precision import uses_bfloat16
from clearhead.training.prefetch import StepBatch
from clearhead.training.tasks.task import Task


def step_cost(config: Config, task: Task, processes: Processes) -> Cost:
    """The forecast of one pass of one process: a step's batch divided by processes and accumulated parts."""
    t, (rows, length, source) = task.recipe.train, task.shape
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


class Meter:
    """Counts tokens, losses and seconds between two logged steps."""

    def __init__(self, config: Config, task: Task, processes: Processes) -> None:
        self.task, self.processes = task, processes
        t = task.recipe.train
        self.precision = "bfloat16" if uses_bfloat16(t, processes.device) else "float32"
        self.peak = measure_peak(processes.device, getattr(torch, self.precision))
        self.cost = step_cost(config, task, processes)
        # FLOPs of a step of the usual shape, on all processes.
        self.flops = self.cost.useful_flops * t.accumulate * processes.world_size
        self._clear()

    def _clear(self) -> None:
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []  # of the gradients
        self.predictions: list[int] = []
        self.tokens = self.steps = self.n_counted = 0
        self.began = time.perf_counter()

    def start(self, state: State) -> None:
        """Start the clock. A resumed run continues the sums of the last checkpoint."""
        self._clear()
        losses = [x * self.processes.is_first for x in state.losses]  # they are sums over all processes
        self.losses, self.norms = (list(self._tensor(x)) for x in (losses, state.lengths))
        self.predictions = [state.predictions, *[0] * len(losses)][: len(losses)]  # only their sum matters
        self.n_counted = len(losses)
        self.tokens_before, self.seconds_before = state.tokens, state.seconds
        self.all_tokens, self.first = 0, time.perf_counter()

    def add(self, batch: StepBatch, loss: Tensor, norm: Tensor) -> None:
        """Count one step. Nothing is read from the device here: that would wait for it."""
        self.losses.append(loss)
        self.norms.append(norm)
        self.predictions.append(batch.predictions)
        self.steps += 1
        self.tokens += batch.tokens
        self.all_tokens += batch.tokens

    def drop_skipped(self, state: State) -> int:
        """Leave out the steps that were skipped, and count them in the state. Returns how many there were since the last call."""
        if not self.norms:
            return 0
        is_kept: list[bool] = torch.stack(self.norms).isfinite().tolist()  # the same on all processes
        for kept in is_kept[self.n_counted :]:
            state.skips = 0 if kept else state.skips + 1
        self.losses, self.norms = list(compress(self.losses, is_kept)), list(compress(self.norms, is_kept))
        self.predictions = list(compress(self.predictions, is_kept))
        self.n_counted, n = len(self.norms), is_kept.count(False)
        state.skipped += n
        return n

    def stamp(self, state: State) -> None:
        """Write time, tokens, parts of a batch and the sums since the last row into the state that is saved."""
        self._clock(state)
        state.accumulate = self.task.accumulate
        state.losses = self.processes.sum(torch.stack(self.losses)).tolist() if self.losses else []
        state.lengths, state.predictions = [float(x) for x in self.norms], sum(self.predictions)

    def _clock(self, state: State) -> None:
        state.tokens = self.tokens_before + self.all_tokens
        state.seconds = self.seconds_before + time.perf_counter() - self.first

    def _tensor(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.processes.device)

    def row(self, state: State, more: Mapping[str, float]) -> Row:
        """A line of metrics.jsonl about the steps since the last one."""
        loss = kernels.to_float64(torch.stack(self.losses).sum())
        loss = float(self.processes.sum(loss)) / max(sum(self.predictions), 1)
        norm = float(torch.stack(self.norms).mean())
        seconds = time.perf_counter() - self.began
        self._clock(state)
        row: Row = {"step": state.step, "kind": "train", "loss": loss, "grad_norm": norm, **more}
        row["tokens_per_second"] = self.tokens / seconds
        row["utilisation"] = self.steps * self.flops / seconds / self.peak / self.processes.world_size
        row |= {"seconds": state.seconds, "tokens": state.tokens, "epoch": self.task.epoch(state.step)}
        row |= {"skipped": state.skipped} if state.skipped else {}
        self._clear()
        return row

    @contextmanager
    def paused(self) -> Generator[None]:
        """Time in here does not count as training time: an evaluation, a checkpoint."""
        start = time.perf_counter()
        yield
        self.began += time.perf_counter() - start


class MetricsLog:
    """Appends rows to metrics.jsonl. Only the first process writes; the others have `folder=None`."""

    def __init__(self, folder: Path | None, *, step: int, tensorboard: bool) -> None:
        self.file = None if folder is None else folder / "metrics.jsonl"
        self.tensorboard: Any = None
        if self.file is None or folder is None:
            return
        self._truncate(self.file, step)  # from here on there is a run to resume
        if tensorboard and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            _silence_writer()
            self.tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def _truncate(self, file: Path, step: int) -> None:
        """Drop what a resumed run writes again: lines after its first step, the result, a line that a kill cut off."""
        # A kill may have cut a character in two.
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        kept = [line for line in text.split("\n") if _step(line) <= step]
        write_text(file, "".join(line + "\n" for line in kept))

    def write(self, row: dict[str, Any]) -> None:
        if self.file is None:
            return
        handle = os.open(self.file, os.O_CREAT | os.O_WRONLY | os.O_APPEND | NOT_A_LINK, 0o666)
        with os.fdopen(handle, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        if self.tensorboard is not None:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step":
                    self.tensorboard.add_scalar(f"{row['kind']}/{name}", value, row["step"])
            self.tensorboard.flush()

    def close(self) -> None:
        if self.tensorboard is not None:
            self.tensorboard.close()


def _silence_writer() -> None:
    """A full disk ends TensorBoard's own thread with a traceback. `flush` raises the same error in ours, which becomes one line."""
    before = threading.excepthook
    if getattr(before, "is_ours", False):
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__name__ == "_AsyncWriterThread"):
            before(args)

    hook.is_ours = True  # type: ignore[attr-defined]
    threading.excepthook = hook


def _step(line: str) -> float:
    """The step of a line; infinity for the result and for what is no whole line."""
    try:
        row = json.loads(line)
        return float("inf") if row["kind"] == "result" else float(row["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
