"""The trainer: a run's model and what a step of it needs, that is loss, gradients, optimizers, and the tensors to save."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.engine.cuda_graphs import Recorder
from clearhead.errors import ConfigError
from clearhead.quantization.float8 import Products
from clearhead.training.auto_settings import (
    CompileTimes,
    Machine,
    choose_compile,
    choose_stream,
    explain,
    program,
)
from clearhead.training.callbacks import Callbacks
from clearhead.training.checkpoints import Checkpoints, State
from clearhead.training.distributed import Processes, no_sync, parallelize
from clearhead.training.evaluation import evaluate
from clearhead.training.initialization import initial_model
from clearhead.training.lora import add_lora
from clearhead.training.memory_check import check_step
from clearhead.training.meter import step_seconds
from clearhead.training.optimizers import Optimizers
from clearhead.training.precision import make_autocast, set_residual_dtype
from clearhead.training.prefetch import StepBatch, make_step_batch
from clearhead.training.recipe import Recipe, Train
from clearhead.training.schedules import max_lr
from clearhead.training.tasks.task import Objective, Task
from clearhead.training.train_step import ROUNDING, ForwardBackward, Update

LONG_STEP = 1.0  # seconds


class Trainer:
    """Built once per run. It decides how the task's batches are laid out: padded to few shapes, packed, or as they are."""

    def __init__(self, recipe: Recipe, task: Task, processes: Processes, show: Callbacks) -> None:
        t, device = recipe.train, processes.device
        self.task, self.processes, self.note = task, processes, show.note
        self.progress = show.progress("evaluating")
        check = partial(check_step, task=task, processes=processes)
        self.model = initial_model(recipe, task.facts, check).to(device).train()
        if t.lora_rank:
            show.note(f"LoRA: {add_lora(self.model, t.lora_rank, t.lora_alpha, t.seed):,} numbers learn, the rest stay")
        self.objective = Objective(self.model, task)
        self.parallel = parallelize(self.objective, processes, t.parallel)
        self.autocast = make_autocast(t, device)
        self.options = t = self._settle(t)
        set_residual_dtype(self.model, t, self.autocast)
        recorder = Recorder(device) if self.records else None
        objective = torch.compile(self.parallel) if t.compile else self.parallel
        self.forward_backward = ForwardBackward(objective, self.autocast, recorder)
        self.max_lr = max_lr(t, self.model.config.d_model)
        self.optimizers = Optimizers(self.model, t, lr=self.max_lr, record=self.records)
        self.products = Products(self.model) if t.precision == "fp8" else None
        self.update = Update(self.optimizers, t.clip, self.products, recorder)

        self.weights = {f"model.{name}": p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        self.tensors = {**self.weights, **{f"optimizer.{k}": value for k, value in self.optimizers.tensors().items()}}
        if self.products is not None:
            self.tensors["products.history"] = self.products.history

    def _settle(self, t: Train) -> Train:
        """The options without `auto`; and how batches are laid out: in one shape, packed, padded to few shapes, or as they are."""
        task, machine = self.task, Machine.of(self.processes)
        is_cuda, bfloat16 = machine.device == "cuda", isinstance(self.autocast, torch.autocast)
        self.compile_times = CompileTimes(machine, program(self.model.config, task.recipe))
        step = step_seconds(self.model.config, task, self.processes) if is_cuda and t.compile == "auto" else 0.0
        compiled, why = choose_compile(t, machine, step, self.compile_times.forecast())

        one_gpu = is_cuda and machine.world_size == 1
        may_pack = one_gpu and not task.is_even and t.accumulate == 1 and bfloat16
        if compiled and t.compile == "auto" and not (task.is_even or (may_pack and self._pack())):
            compiled, why = False, "each shape of its batches would be compiled"
        # Compiled code for changing shapes is not recorded: each shape would be compiled and recorded.
        self.records = t.record and one_gpu and (task.is_even or not compiled)
        if self.records:
            task.rounding = ROUNDING
        elif may_pack:
            self._pack()
        stream = choose_stream(t, machine, compiled=compiled, bfloat16=bfloat16)
        settled = replace(t, compile=compiled, stream=stream)
        self.how = explain(t, settled, machine, why)
        return settled

    def _pack(self) -> bool:
        with self.autocast:
            return self.task.pack(self.model)

    def restore(self, checkpoints: Checkpoints) -> State:
        """Read the newest checkpoint, if there is one; else this is step 0."""
        found = checkpoints.newest()
        if found is not None:
            checkpoints.read(found[0], self.tensors)
            self.task.accumulate = max(self.task.accumulate, found[1].accumulate)
            if self.products is not None:
                self.products.settle()
            return found[1]
        if self.products is not None:  # the scales of fp8 start from one pass in bfloat16
            batch, plain = make_step_batch(self.task, 0, self.processes), ForwardBackward(self.parallel, self.autocast)
            self.products.calibrate(lambda: plain(batch.parts[0][0], 1 / batch.predictions))
            self.optimizers.zero_grad()
        return State()

    def step(self, batch: StepBatch, step: int) -> tuple[Tensor, Tensor]:
        """The gradient of the mean loss over the whole batch (all its parts, on all processes), then the update.

        If memory does not suffice, the batch is computed again in twice as many parts, this one and all later ones. Returns the
        sum of this process's losses, and the gradients' norm.
        """
        if len(batch.parts) < self.task.accumulate:  # made before the last one failed
            batch = make_step_batch(self.task, step, self.processes)
        while (total := self._try_gradients(batch, step)) is None:
            self._halve()
            batch = make_step_batch(self.task, step, self.processes)
        return total, self.update()

    def _try_gradients(self, batch: StepBatch, step: int) -> Tensor | None:
        """The gradients of a batch, and the sum of its losses; None if memory did not suffice."""
        try:
            return self._gradients(batch, step)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return None  # out here: the error holds the memory of the failed pass

    def _halve(self) -> None:
        """From now on batches are computed in twice as many parts."""
        self.optimizers.zero_grad()
        self.forward_backward.graphs.clear()
        if self.processes.device.type == "cuda":
            torch.cuda.empty_cache()
        n_parts = self.task.accumulate
        rows = max(1, self.task.shape[0] // n_parts)
        if self.processes.world_size > 1 or rows == 1:
            why = "one row is too much" if rows == 1 else "several processes can not change their parts while they run"
            raise ConfigError(
                f"memory does not suffice for a step in train.accumulate={n_parts} parts, of about {rows} rows each, and {why}; "
                f"raise train.accumulate, lower train.batch_tokens or data.length, or set train.checkpointing=true"
            )
        self.task.accumulate *= 2
        self.note(
            f"memory does not suffice for {n_parts} part{'s' * (n_parts > 1)} of a batch: from here on it is computed in "
            f"{self.task.accumulate}, whose gradients are added (train.accumulate)"
        )

    def _gradients(self, batch: StepBatch, step: int) -> Tensor:
        total = torch.zeros((), device=self.processes.device)
        for number, (part, weight) in enumerate(batch.parts):
            seed_dropout(self.options.seed, step, number, self.processes.rank)
            with no_sync(self.parallel, number < len(batch.parts) - 1):
                # Processes average their gradients; the mean over all predictions needs their sum.
                total += weight * self.forward_backward(part, weight * self.processes.world_size / batch.predictions)
        return total

    def evaluate(self, *, final: bool = False) -> dict[str, Any]:
        """The metrics on held-out data; `final`: on all of it."""
        return evaluate(
            self.objective, self.task, self.processes, self.options, self.autocast, self.progress, final=final
        )

    def time_step(self) -> float | None:
        """Seconds of the last step, measured: one pass whose gradients are dropped. None where it says little about the rest.

        (A GPU's first passes compile and record. Several processes would have to agree.)
        """
        if self.processes.device.type != "cpu" or self.processes.world_size > 1 or self.options.compile:
            return None
        step, seconds = self.options.steps - 1, 0.0
        batch = make_step_batch(self.task, step, self.processes)
        batch = replace(batch, parts=batch.parts[:1])
        for _ in range(2):  # the first pass also takes memory, and is enough if it was long
            began = time.perf_counter()
            total = self._try_gradients(batch, step)
            self.optimizers.zero_grad()
            if total is None:
                return None  # the first step will be computed in smaller parts
            seconds = time.perf_counter() - began
            if seconds > LONG_STEP:
                break
        return seconds * self.task.accumulate


def seed_dropout(seed: int, step: int, part: int, rank: int) -> None:
    """Another seed for each part of each step on each process."""
    torch.manual_seed(hash((seed, step, part, rank)) & (2**63 - 1))


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory did not suffice; on the CPU torch has no type of its own for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
