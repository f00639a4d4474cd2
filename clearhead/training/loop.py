"""The training loop, from a recipe to a run folder. Read it from top to bottom.

Everything random is a function of (seed, step, process): a step's rows, its hidden tokens, its dropout.
So a run that is killed and resumed computes exactly what an uninterrupted one would have.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clearhead.checkpoint import save
from clearhead.checkpoint.durable_files import write_text
from clearhead.checkpoint.run_checkpoint import describe
from clearhead.errors import ConfigError
from clearhead.kernels.compiler import keep_compiled_code
from clearhead.training.callbacks import Callbacks
from clearhead.training.checkpoints import Checkpoints, State
from clearhead.training.distributed import Processes, process_group
from clearhead.training.evaluation import is_better
from clearhead.training.initialization import guess_config
from clearhead.training.interrupts import Interrupted, Interrupts
from clearhead.training.lora import gather_model
from clearhead.training.memory_check import check_states
from clearhead.training.metrics_log import Meter, MetricsLog
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
            configure_torch(t)
            if resume:
                warn_of_threads(out, processes.device, show.note)
            check_run(recipe, out, processes, resume=resume)
            task = make_task(recipe, out, processes, show)
            write_extra_files(task, out, processes)
            trainer = Trainer(recipe, task, processes, show)
            return run_steps(recipe, trainer, out, interrupts, show)
        except Interrupted:  # nothing is lost: data that is prepared, the tokenizer and checkpoints are files
            return Result(out, newest_saved(out), False, {})


def run_steps(recipe: Recipe, trainer: Trainer, out: Path, interrupts: Interrupts, show: Callbacks) -> Result:
    """The steps that are left, and the result."""
    t, task, processes = recipe.train, trainer.task, trainer.processes
    checkpoints = make_checkpoints(trainer, out, show)
    check_space(out, 3 * sum(tensor.nbytes for tensor in trainer.tensors.values()))
    state = trainer.restore(checkpoints)
    log = MetricsLog(out if processes.is_first else None, step=state.step, tensorboard=t.tensorboard)
    meter = Meter(trainer.model.config, task, processes)
    measured = trainer.time_step(state.step)
    summary = summarise(recipe, task, trainer.model, meter, trainer.tensors, measured, state.step)
    show.begin(summary, state.step, t.steps)

    batches, stop = prefetch(task, state.step, t.steps, processes), False
    meter.start(state)
    with interrupts.held():
        while state.step < t.steps and not is_out_of_patience(state, t) and not stop:
            lr = lr_factor(state.step, t)
            trainer.optimizers.scale(lr)
            batch = next(batches)
            meter.add(batch, *trainer.step(batch, state.step))
            state.step += 1

            if is_due(state.step, t.log_every, t) and count_skips(meter, state, t, out, show):
                row = meter.row(state, {"lr": lr * trainer.max_lr})
                log.write(row)
                show.step(row)
            is_best = False
            if is_due(state.step, t.evaluate_every, t):
                with meter.paused():
                    row = {"step": state.step, "kind": "valid"} | trainer.evaluate()
                is_best = update_best(state, float(row[t.best]), t)
                log.write(row)
                show.evaluated(row)
            stop = should_stop(interrupts, processes, state, t)
            if is_best or stop or is_due(state.step, t.checkpoint_every, t):
                count_skips(meter, state, t, out, show)
                meter.stamp(state)
                with meter.paused():
                    checkpoints.write(state, trainer.tensors)

    batches.close()
    show.end()
    row = {} if stop else finish(trainer, checkpoints, state, out, log, show)
    log.close()
    return Result(out, state.step, not stop, row)


def configure_torch(t: Train) -> None:
    torch.set_float32_matmul_precision("high")  # on a GPU: products of float32 on the tensor cores
    # Reading this flag costs nothing; setting it loads the compiler.
    if t.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(t.deterministic)
    if t.compile:
        keep_compiled_code()


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


def count_skips(meter: Meter, state: State, t: Train, out: Path, show: Callbacks) -> bool:
    """Report the steps that were skipped since the last call; end the run if there were too many in a row.

    Returns whether there are others to write a row about.
    """
    n = meter.drop_skipped(state)
    if state.skips > t.max_skips:
        raise ConfigError(
            f"the gradients of the last {state.skips:,} steps are no number (NaN or infinite), at step {state.step:,}; "
            f"train.lr={t.lr} may be too high: lower it, or set train.clip (now {t.clip}); the checkpoints are unharmed: {out}"
        )
    if n:
        show.note(
            f"{n:,} step{'s' * (n > 1)} up to step {state.step:,} changed nothing: the gradient was NaN or infinite (more than "
            f"train.max_skips={t.max_skips} in a row end the run)"
        )
    return bool(meter.norms)


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
