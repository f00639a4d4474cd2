"""The training loop, from a recipe to a run folder. Read it from top to bottom.

Everything random is a function of (seed, step, process): a step's rows, its hidden tokens, its dropout.
So a run that is killed and resumed computes exactly what an uninterrupted one would have.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clearhead.checkpoint import save
from clearhead.checkpoint.durable_files import write_text
from clearhead.checkpoint.run_checkpoint import describe
from clearhead.errors import ConfigError
from clearhead.kernels.compiler import keep_compiled_code
from clearhead.training.auto_settings import keep_decided
from clearhead.training.callbacks import Callbacks, Row
from clearhead.training.checkpoints import Checkpoints, State
from clearhead.training.distributed import Processes, process_group
from clearhead.training.evaluation import is_better
from clearhead.training.initialization import guess_config
from clearhead.training.interrupts import Interrupted, Interrupts
from clearhead.training.lora import gather_model
from clearhead.training.memory_check import check_states
from clearhead.training.meter import Meter
from clearhead.training.metrics_log import MetricsLog
from clearhead.training.precision import check_fp8
from clearhead.training.prefetch import prefetch
from clearhead.training.recipe import Recipe, Train, find_recipe
from clearhead.training.report import write_report
from clearhead.training.run_folder import check_resumable, check_space, newest_saved, open_folder, read_run, run_folder
from clearhead.training.run_summary import summarise
from clearhead.training.schedules import lr_factor
from clearhead.training.tasks import make_task
from clearhead.training.tasks.task import Task
from clearhead.training.threads import num_threads, warn_of_threads
from clearhead.training.trainer import Trainer


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    step: int
    is_complete: bool  # False: interrupted; `resume` continues from here, at `step`
    metrics: dict[str, Any]  # of the result, on held-out data
    speed: Row = field(
        default_factory=dict
    )  # of the last process that trained: the row of kind "speed" in metrics.jsonl


def train(
    recipe: Recipe | str,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    show: Callbacks | bool | None = None,
) -> Result:
    """Train as a recipe says (or a shipped one, by its name), into the folder `out`; without it: runs/TASK-1, -2 ...

    With `resume`, continue the run that is in `out`. `show=True` prints what the command line prints, False nothing; None is True
    in a notebook. `Callbacks` of your own are called instead.
    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    if isinstance(show, Callbacks):
        return run(recipe, out, show, resume=resume)
    from clearhead.training.display import Display, in_notebook

    if not (in_notebook() if show is None else show):
        return run(recipe, out, Callbacks(), resume=resume)
    with Display() as display:
        result = run(recipe, out, display, resume=resume)
        display.report(result)
    return result


def run(recipe: Recipe, out: str | Path | None, show: Callbacks, *, resume: bool) -> Result:
    t = recipe.train
    with (
        process_group(t.device) as processes,
        run_folder(out, recipe.task, processes) as out,
        Interrupts(echo=processes.world_size > 1) as interrupts,
        num_threads(t.threads),
    ):
        show = show if processes.is_first else Callbacks()  # only one process reports
        try:
            configure_torch(t, processes.device)
            if resume:
                warn_of_threads(out, processes.device, show.note)
                recipe = replace(recipe, train=keep_decided(recipe.train, read_run(out).train))
            began = time.perf_counter()
            check_run(recipe, out, processes, resume=resume)
            task = make_task(recipe, out, processes, show)
            write_extra_files(task, out, processes)
            trainer = Trainer(recipe, task, processes, show)
            recipe = replace(recipe, train=trainer.options)
            if processes.is_first:  # what `auto` was decided to be: a resumed run does not decide again
                write_text(out / "recipe.toml", recipe.to_toml())
            return run_steps(recipe, trainer, out, interrupts, show, began)
        except Interrupted:  # nothing is lost: data that is prepared, the tokenizer and checkpoints are files
            return Result(out, newest_saved(out), False, {})


def run_steps(
    recipe: Recipe, trainer: Trainer, out: Path, interrupts: Interrupts, show: Callbacks, began: float
) -> Result:
    """The steps that are left, and the result. `began`: when the run did, by the performance counter."""
    t, task, processes = recipe.train, trainer.task, trainer.processes
    checkpoints = make_checkpoints(trainer, out, show)
    check_space(out, 3 * sum(tensor.nbytes for tensor in trainer.tensors.values()))
    state = trainer.restore(checkpoints)
    log = MetricsLog(out if processes.is_first else None, step=state.step, tensorboard=t.tensorboard)
    meter = Meter(trainer.model.config, task, processes)
    measured = trainer.time_step()
    summary = summarise(recipe, task, trainer.model, meter, trainer.tensors, measured, state.step, trainer.how)
    show.begin(summary, state.step, t.steps)

    batches, stop = prefetch(task, state.step, t.steps, processes), False
    write_row = partial(write_rows, meter, state, t, out, log, show)
    meter.start(state)
    before = time.perf_counter() - began
    with interrupts.held():
        while state.step < t.steps and not is_out_of_patience(state, t) and not stop:
            lr = lr_factor(state.step, t)
            trainer.optimizers.scale(lr)
            batch = next(batches)
            meter.add(batch, *trainer.step(batch, state.step))
            write_row()  # of steps before: meanwhile a GPU computes this one
            state.step += 1

            if is_due(state.step, t.log_every, t):
                meter.close(state.step, {"lr": lr * trainer.max_lr})
            if processes.device.type != "cuda":
                write_row()
            is_best = False
            if is_due(state.step, t.evaluate_every, t):
                write_row()
                with meter.paused():
                    row = {"step": state.step, "kind": "valid"} | trainer.evaluate()
                is_best = update_best(state, float(row[t.best]), t)
                log.write(row)
                show.evaluated(row)
            stop = should_stop(interrupts, processes, state, t)
            if is_best or stop or is_due(state.step, t.checkpoint_every, t):
                write_row()
                report_skips(meter.drop_skipped(state), state, state.step, t, out, show)
                meter.stamp(state)
                with meter.paused():
                    checkpoints.write(state, trainer.tensors)

    batches.close()
    write_row()
    speed = meter.speed(state.step, before) if meter.all_tokens else {}
    if speed:
        log.write(speed)
    if speed and t.compile:
        trainer.compile_times.keep(meter.first_seconds)
    show.end()
    row = {} if stop else finish(trainer, checkpoints, state, out, log, show)
    log.close()
    return Result(out, state.step, not stop, row, speed)


def configure_torch(t: Train, device: torch.device) -> None:
    torch.set_float32_matmul_precision("high")  # on a GPU: products of float32 on the tensor cores
    # Reading this flag costs nothing; setting it loads the compiler.
    if t.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(t.deterministic)
    if t.compile is True or (t.compile == "auto" and device.type == "cuda"):
        keep_compiled_code()  # now: torch chooses a folder of its own when it first compiles anything


def check_run(recipe: Recipe, out: Path, processes: Processes, *, resume: bool) -> None:
    """Refuse what can not work before any data is read, and make the folder."""
    if resume:
        check_resumable(read_run(out), recipe)
    if "from" not in recipe.model:
        check_states(guess_config(recipe), recipe, processes)
    check_fp8(recipe.train, processes)
    if processes.is_first:
        open_folder(out, recipe, resume=resume, device=processes.device)
    processes.barrier()


def make_checkpoints(trainer: Trainer, out: Path, show: Callbacks) -> Checkpoints:
    t = trainer.options
    lora = dict(rank=t.lora_rank, scale=t.lora_alpha / t.lora_rank, seed=t.seed) if t.lora_rank else None
    if lora is not None:
        lora["from"] = trainer.task.recipe.model["from"]
    return Checkpoints(
        out / "checkpoints",
        trainer.processes,
        keep=t.average,
        averaged=partial(is_due, every=t.checkpoint_every, t=t),
        describes=describe(trainer.model, lora),
        note=show.note,
    )


def write_extra_files(task: Task, out: Path, processes: Processes) -> None:
    """Before the first step: a run that goes on is a model, too."""
    for name, content in task.extra_files.items() if processes.is_first else ():
        write_text(out / name, json.dumps(content, indent=2) + "\n")


def finish(
    trainer: Trainer, checkpoints: Checkpoints, state: State, out: Path, log: MetricsLog, show: Callbacks
) -> dict[str, Any]:
    """Choose the weights of the result, evaluate them, and write model, tokenizer and report. Returns the metrics."""
    task, processes = trainer.task, trainer.processes
    choose_weights(trainer, checkpoints, state, show)
    row = {"step": state.step, "kind": "result"} | trainer.evaluate(final=True)
    model = gather_model(trainer.model)
    if processes.is_first:
        save(model, out)
        if task.tokenizer is not None:
            task.tokenizer.save(out)
        log.write(row)
        write_report(out, attention=task.attention_pictures(model))
    processes.barrier()
    return row


def is_due(step: int, every: int, t: Train) -> bool:
    return step % every == 0 or step == t.steps


def write_rows(meter: Meter, state: State, t: Train, out: Path, log: MetricsLog, show: Callbacks) -> None:
    """The row of the steps up to the last logged one, if it is not written yet."""
    if meter.closed is None:
        return
    step = meter.closed.step
    row, n_skipped = meter.row(state)
    report_skips(n_skipped, state, step, t, out, show)
    if row is not None:
        log.write(row)
        show.step(row)


def report_skips(n: int, state: State, step: int, t: Train, out: Path, show: Callbacks) -> None:
    """Say how many steps up to this one were skipped since the last time; end the run if there were too many in a row."""
    if state.skips > t.max_skips:
        raise ConfigError(
            f"the gradients of the last {state.skips:,} steps are no number (NaN or infinite), at step {step:,}; "
            f"train.lr={t.lr} may be too high: lower it, or set train.clip (now {t.clip}); the checkpoints are unharmed: {out}"
        )
    if n:
        show.note(
            f"{n:,} step{'s' * (n > 1)} up to step {step:,} changed nothing: the gradient was NaN or infinite (more than "
            f"train.max_skips={t.max_skips} in a row end the run)"
        )


def is_out_of_patience(state: State, t: Train) -> bool:
    """Early stopping: too many evaluations in a row without a better one."""
    return bool(t.patience) and state.misses >= t.patience


def update_best(state: State, value: float, t: Train) -> bool:
    """Count this evaluation; returns whether it is the best so far."""
    if not is_better(value, state.best, t.best):
        state.misses += 1
        return False
    state.best, state.best_step, state.misses = value, state.step, 0
    return True


def should_stop(interrupts: Interrupts, processes: Processes, state: State, t: Train) -> bool:
    """Whether a user interrupted. Several processes stop at the same step: they ask each other at logged steps."""
    if processes.world_size == 1:
        return interrupts.raised
    return is_due(state.step, t.log_every, t) and processes.any(interrupts.raised)


def choose_weights(trainer: Trainer, checkpoints: Checkpoints, state: State, show: Callbacks) -> None:
    """Load the weights of the result: the mean of the last checkpoints, the best, or the last."""
    t = trainer.options
    if is_out_of_patience(state, t) and state.step < t.steps:
        show.note(
            f"stopped at step {state.step:,} of {t.steps:,}: no better for {t.patience} evaluation{'s' * (t.patience > 1)} "
            f"(train.patience)"
        )
    if t.average and (n := checkpoints.average(t.average, trainer.weights)):
        mean = f"the mean of the last {n} checkpoints" if n > 1 else "the last checkpoint, the only one to average"
        show.note(f"the result is {mean}")
    elif t.keep == "best" and state.best_step not in (0, state.step):
        best = checkpoints.at(state.best_step)
        if checkpoints.check(best) is None:
            return
        checkpoints.read(best, trainer.weights)
        show.note(f"the result is step {state.best_step}, the best on held-out data")
