"""What a run will take, before its first step; and how fast it goes, while it goes."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from clearhead.config import Config
from clearhead.costs.forecast import cost
from clearhead.costs.machine import available_memory, measure_peak
from clearhead.models import Model
from clearhead.training.checkpoints import State
from clearhead.training.prefetch import StepBatch
from clearhead.training.processes import Processes
from clearhead.training.recipe import Recipe
from clearhead.training.show import Row
from clearhead.training.tasks.task import Task

USUAL_SHARE = 0.3  # of the measured peak that training reaches, where nothing is known yet


class Meter:
    """Counts tokens, losses and seconds between two logged steps."""

    def __init__(self, config: Config, task: Task, processes: Processes) -> None:
        self.task, self.processes = task, processes
        t, (rows, length, source) = task.recipe.train, task.shape
        self.low = t.precision in ("bfloat16", "fp8") or (t.precision == "auto" and processes.device.type == "cuda")
        self.peak = measure_peak(processes.device, torch.bfloat16 if self.low else torch.float32)
        self.cost = cost(
            config,
            batch=max(1, rows // (t.accumulate * processes.world)),
            length=min(length, config.max_len),
            source_length=min(source, config.max_source_len) or None,
            mode="train",
            precision="bfloat16" if self.low else "float32",
            checkpointing=t.checkpointing,
            optimizer=t.optimizer,
            shards=processes.world if t.parallel == "fsdp" else 1,
            accumulation=t.accumulate,
            device="cuda" if processes.device.type == "cuda" else "cpu",
        )
        # Operations that a step of the usual shape needs, on all processes.
        self.flops = self.cost.useful_flops * t.accumulate * processes.world
        self.usual = max(1, rows * (length + source))  # tokens of such a step, padding counted
        self._clear()

    def _clear(self) -> None:
        self.losses: list[Tensor] = []
        self.lengths: list[Tensor] = []
        self.predictions = self.tokens = self.steps = 0
        self.began = time.perf_counter()

    def start(self, state: State) -> None:
        """The first step comes next."""
        self._clear()
        # What was learnt since the last row before a kill: the first process goes on with it.
        kept = [x * self.processes.is_first for x in state.losses]
        self.losses, self.lengths = (list(self._tensor(x)) for x in (kept, state.lengths))
        self.predictions = state.predictions
        self.tokens_before, self.seconds_before = state.tokens, state.seconds
        self.all_tokens, self.first = 0, time.perf_counter()

    def add(self, learnt: tuple[Tensor, Tensor, StepBatch]) -> None:
        """One step. Nothing is read from the device here, which would wait for it."""
        loss, length, batch = learnt
        self.losses.append(loss)
        self.lengths.append(length)
        self.predictions += batch.predictions
        self.steps += 1
        self.tokens += batch.tokens
        self.all_tokens += batch.tokens

    def is_finite(self) -> bool:
        """Whether every gradient since the last row was."""
        return not self.lengths or bool(torch.stack(self.lengths).isfinite().all())

    def stamp(self, state: State) -> None:
        """Time and tokens so far, and what the next row will tell, into the state that is saved."""
        self._clock(state)
        state.losses = self.processes.sum(torch.stack(self.losses)).tolist() if self.losses else []
        state.lengths, state.predictions = [float(x) for x in self.lengths], self.predictions

    def _clock(self, state: State) -> None:
        state.tokens = self.tokens_before + self.all_tokens
        state.seconds = self.seconds_before + time.perf_counter() - self.first

    def _tensor(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.processes.device)

    def row(self, state: State, more: Mapping[str, float]) -> Row:
        """The line of metrics.jsonl since the last one."""
        loss = float(self.processes.sum(torch.stack(self.losses).sum().double())) / max(self.predictions, 1)
        norm = float(torch.stack(self.lengths).mean())
        seconds = time.perf_counter() - self.began
        speed = self.tokens / seconds
        self._clock(state)
        row: Row = {"step": state.step, "kind": "train", "loss": loss, "grad_norm": norm, **more}
        row["tokens_per_second"] = speed
        row["utilisation"] = self.steps * self.flops / seconds / self.peak / self.processes.world
        row |= {"seconds": state.seconds, "tokens": state.tokens, "epoch": self.task.epoch(state.step)}
        self._clear()
        return row

    @contextmanager
    def paused(self) -> Generator[None]:
        """Time in here is not training's: an evaluation, a checkpoint."""
        start = time.perf_counter()
        yield
        self.began += time.perf_counter() - start


def summarise(recipe: Recipe, task: Task, model: Model, meter: Meter, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name and value of what a user should see before anything runs for long."""
    t, config = recipe.train, model.config
    n = sum(p.numel() for p in model.parameters())
    learnt = sum(p.numel() for p in model.parameters() if p.requires_grad)
    layers = config.depth
    seconds = t.steps * meter.flops / (USUAL_SHARE * meter.peak * meter.processes.world)
    free = available_memory(meter.processes.device)
    peak, size = meter.cost.peak_bytes, sum(tensor.nbytes for tensor in tensors.values())
    spread = f", {meter.processes.world} processes ({t.parallel})" if meter.processes.world > 1 else ""
    kind = "bfloat16" if meter.low else "float32"
    table = {
        "model": f"{config.shape}, {layers} layers of width {config.d_model}, {n:,} parameters"
        + ("" if learnt == n else f", {learnt:,} of them learn"),
        **task.facts.table,
        "training": f"{t.steps:,} steps of {t.batch_tokens:,} tokens, {task.epoch(t.steps):.1f} epochs; "
        f"{t.optimizer}, {t.schedule}",
        "device": f"{meter.processes.device}, {kind} products at {meter.peak / 1e9:,.0f} GFLOP/s{spread}",
        "forecast": f"about {spell(seconds)} at {USUAL_SHARE:.0%} of that, {peak / 1e9:.2f} GB of memory "
        f"({free / 1e9:.1f} GB free)",
        "checkpoints": f"every {t.checkpoint_every:,} steps, {size / 1e6:,.1f} MB each",
    }
    if peak > free:
        table["warning"] = "this may not fit in memory: raise train.accumulate, or set train.checkpointing=true"
    return table


def spell(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
