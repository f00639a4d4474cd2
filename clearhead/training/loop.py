"""The training loop, from a recipe to a run folder. Read it from top to bottom.

Everything random is a function of (seed, step, process): which rows a step takes, which tokens are hidden, what dropout drops.
So a run that is killed and resumed computes exactly what an uninterrupted one would have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.checkpoint import save
from clearhead.engine.cuda_graphs import Recorder
from clearhead.errors import ConfigError
from clearhead.kernels.native import cache_folder
from clearhead.models.stack import Stack
from clearhead.quantization import float8 as fp8
from clearhead.quantization.float8 import Products
from clearhead.training.checkpoints import Checkpoints, State
from clearhead.training.evaluation import evaluate, is_better
from clearhead.training.folder import check_resumable, check_space, open_folder, read_run, settle, write_text
from clearhead.training.journal import Journal
from clearhead.training.optimizers import Optimizers
from clearhead.training.prefetch import make_step, prefetch
from clearhead.training.processes import Processes, join, spread
from clearhead.training.recipe import Recipe, Train, find_recipe
from clearhead.training.report import write_report
from clearhead.training.schedules import highest, rate
from clearhead.training.show import Interrupts, Show
from clearhead.training.starting import add_lora, check_model, export, start
from clearhead.training.summary import Meter, summarise
from clearhead.training.tasks import make_task
from clearhead.training.tasks.task import Objective
from clearhead.training.train_step import ROUNDING, ForwardBackward, Update, train_step


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    step: int
    is_complete: bool  # False: interrupted; resumed, the run goes on from here
    metrics: dict[str, Any]  # of the result, on held-out data


def train(
    recipe: Recipe | str, out: str | Path | None = None, *, resume: bool = False, show: Show | None = None
) -> Result:
    """Train as a recipe says (or a shipped one, by its name), into the folder `out`; without it: runs/TASK-1, -2 ...

    With `resume`, go on with the run that is in `out`.
    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    t = recipe.train
    with (
        join(t.device) as processes,
        settle(out, recipe.task, processes) as out,
        Interrupts(echo=processes.world > 1) as interrupts,
    ):
        show = show if show is not None and processes.is_first else Show()  # one process speaks
        set_up(t)
        if resume:
            check_resumable(read_run(out), recipe)
        check_model(recipe)
        check_products(t, processes)
        if processes.is_first:
            open_folder(out, recipe, resume=resume, device=processes.device)
        processes.wait()

        task = make_task(recipe, out, processes, show)
        model = start(recipe, task.facts).to(processes.device).train()
        if t.lora_rank:
            show.note(f"LoRA: {add_lora(model, t.lora_rank, t.lora_alpha, t.seed):,} numbers learn, the rest stay")
        objective = Objective(model, task)
        called = spread(objective, processes, t.parallel)
        autocast = make_autocast(t, processes.device)
        narrow(model, t, autocast)
        record = t.record and processes.device.type == "cuda" and processes.world == 1
        record &= task.is_even or not t.compile  # what is compiled for changing shapes is not recorded for each
        task.rounding = ROUNDING if record else task.rounding
        if not record and is_alone(processes, t) and isinstance(autocast, torch.autocast):
            task.pack(model)
        recorder = Recorder(processes.device) if record else None
        forward_backward = ForwardBackward(torch.compile(called) if t.compile else called, autocast, recorder)
        optimizers = Optimizers(model, t, lr=highest(t, model.config.d_model), record=record)
        products = Products(model) if t.precision == "fp8" else None
        update = Update(optimizers, t.clip, products, recorder)

        weights = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
        tensors = {**weights, **{f"optimizer.{name}": value for name, value in optimizers.tensors().items()}}
        tensors |= {} if products is None else {"products.history": products.history}
        regular = partial(is_due, every=t.checkpoint_every, t=t)
        checkpoints = Checkpoints(out / "checkpoints", processes, kept=t.average, counts=regular, say=show.note)
        check_space(out, 3 * sum(tensor.nbytes for tensor in tensors.values()))
        state = State()
        if (found := checkpoints.newest()) is not None:
            checkpoints.read(found[0], tensors)
            state = found[1]
        if products is not None and found is not None:
            products.settle()
        elif products is not None:
            batch, wide = make_step(task, 0, processes), ForwardBackward(called, autocast)
            products.calibrate(lambda: wide(batch.pieces[0][0], 1 / batch.predictions))
            optimizers.zero_grad()
        journal = Journal(out if processes.is_first else None, step=state.step, tensorboard=t.tensorboard)
        meter = Meter(model.config, task, processes)
        show.begin(summarise(recipe, task, model, meter, tensors), state.step, t.steps)

        batches = prefetch(task, state.step, t.steps, processes)
        meter.start(state)
        while state.step < t.steps and not is_stuck(state, t):
            share = rate(state.step, t)
            optimizers.scale(share)
            batch = next(batches)
            done = train_step(
                forward_backward, update, batch, seed=t.seed, step=state.step, processes=processes, objective=called
            )
            meter.add((*done, batch))
            state.step += 1

            if is_due(state.step, t.log_every, t):
                check_finite(meter, state, t, out)
                row = meter.row(state, {"lr": share * highest(t, model.config.d_model)})
                journal.write(row)
                show.step(row)
            better = False
            if is_due(state.step, t.evaluate_every, t):
                with meter.paused():
                    row = {"step": state.step, "kind": "valid"} | evaluate(objective, task, processes, t, autocast)
                better = watch(state, float(row[t.best]), t)
                journal.write(row)
                show.evaluated(row)
            stop = interrupts.raised if processes.world == 1 else stop_together(interrupts, processes, state, t)
            if better or stop or is_due(state.step, t.checkpoint_every, t):
                check_finite(meter, state, t, out)
                meter.stamp(state)
                with meter.paused():
                    checkpoints.write(state, tensors)
            if stop:
                batches.close()
                journal.close()
                show.end()
                return Result(out, state.step, False, {})

        batches.close()
        show.end()
        choose_weights(checkpoints, state, weights, t, show)
        row = {"step": state.step, "kind": "result"} | evaluate(objective, task, processes, t, autocast, final=True)
        result = export(model)
        if processes.is_first:
            save(result, out)
            if task.tokenizer is not None:
                task.tokenizer.save(out)
            for name, told in task.beside.items():
                write_text(out / name, json.dumps(told, indent=2) + "\n")
            journal.write(row)
            write_report(out, attention=task.pictures(result))
        journal.close()
        processes.wait()
        return Result(out, state.step, True, row)


def set_up(t: Train) -> None:
    torch.set_float32_matmul_precision("high")  # on a GPU: products of float32 on the matrix units
    # Asking costs nothing; setting loads the compiler.
    if t.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(t.deterministic)
    if t.compile:  # kept for the next run; torch's own place is among temporary files
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
        # Nor does it keep what holds a function with a backward of its own, as our loss is, unless asked.
        from torch._functorch import config

        config.autograd_cache_allow_custom_autograd_functions = True


def make_autocast(t: Train, device: torch.device) -> AbstractContextManager[Any]:
    low = t.precision in ("bfloat16", "fp8") or (
        t.precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()
    )
    return torch.autocast(device.type, torch.bfloat16) if low else nullcontext()


def narrow(model: nn.Module, t: Train, autocast: AbstractContextManager[Any]) -> None:
    """Let blocks hand on bfloat16, where products are bfloat16 too."""
    if t.stream == "bfloat16":
        if not isinstance(autocast, torch.autocast):
            raise ConfigError(
                "train.stream=bfloat16 needs products in bfloat16; got float32; set train.precision=bfloat16"
            )
        for stack in (module for module in model.modules() if isinstance(module, Stack)):
            stack.stream = torch.bfloat16


def check_products(t: Train, processes: Processes) -> None:
    """Whether products in 8 bits, if they are asked for, can be had; before there is work to lose."""
    if t.precision != "fp8":
        return
    if processes.world > 1 or t.lora_rank:
        got = f"{processes.world} processes" if processes.world > 1 else f"train.lora_rank={t.lora_rank}"
        raise ConfigError(
            f"train.precision=fp8 is for one process in which all weights learn; got {got}; set train.precision=bfloat16"
        )
    fp8.check_device(processes.device)


def is_alone(processes: Processes, t: Train) -> bool:
    """A CUDA GPU that takes each batch whole."""
    return processes.device.type == "cuda" and processes.world == 1 and t.accumulate == 1


def is_due(step: int, every: int, t: Train) -> bool:
    return step % every == 0 or step == t.steps


def check_finite(meter: Meter, state: State, t: Train, out: Path) -> None:
    """Before anything is written: the gradient's length, which all processes share, tells of every loss that is no number."""
    if not meter.is_finite():
        raise ConfigError(
            f"the loss or its gradient is no number any more, at step {state.step} or shortly before; train.lr={t.lr} may be too "
            f"high: lower it, or set train.clip (now {t.clip}); the last checkpoint is unharmed: {out}"
        )


def is_stuck(state: State, t: Train) -> bool:
    """Early stopping: too many evaluations in a row without a better one."""
    return bool(t.patience) and state.misses >= t.patience


def watch(state: State, value: float, t: Train) -> bool:
    """Note whether this evaluation is the best."""
    if not is_better(value, state.best, t.best):
        state.misses += 1
        return False
    state.best, state.best_step, state.misses = value, state.step, 0
    return True


def stop_together(interrupts: Interrupts, processes: Processes, state: State, t: Train) -> bool:
    """Several processes stop at the same step: they ask each other where they meet anyway, at logged steps."""
    return is_due(state.step, t.log_every, t) and processes.any(interrupts.raised)


def choose_weights(checkpoints: Checkpoints, state: State, weights: Mapping[str, Tensor], t: Train, show: Show) -> None:
    """Which weights are the result: the mean of the last checkpoints, the best, or the last."""
    if t.average and (n := checkpoints.average(t.average, weights)):
        show.note(f"the result is the mean of the last {n} checkpoints")
    elif t.keep == "best" and state.best_step not in (0, state.step):
        if checkpoints.check(checkpoints.at(state.best_step)) is None:
            return
        checkpoints.read(checkpoints.at(state.best_step), weights)
        show.note(f"the result is step {state.best_step}, the best on held-out data")
