"""The summary of a run before its first step: model, data, device, forecast of time and memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from clearhead.kernels.memory import available_memory
from clearhead.models import Model
from clearhead.training.evaluation import evaluation_steps
from clearhead.training.meter import USUAL_UTILISATION, Meter
from clearhead.training.recipe import Recipe
from clearhead.training.schedules import spell_batch
from clearhead.training.tasks.task import Task


def summarise(
    recipe: Recipe,
    task: Task,
    model: Model,
    meter: Meter,
    tensors: Mapping[str, Tensor],
    measured: float | None = None,
    done: int = 0,
    how: str = "",
) -> dict[str, str]:
    """What a user should know before the first step, as names and values. `measured`: seconds of the last step; `done`: steps so
    far; `how`: whether the step is compiled, and why."""
    t, config = recipe.train, model.config
    n = sum(p.numel() for p in model.parameters())
    learnt = sum(p.numel() for p in model.parameters() if p.requires_grad)
    layers = config.depth
    usual = meter.flops / (USUAL_UTILISATION * meter.peak * meter.processes.world_size)
    basis = f" at {USUAL_UTILISATION:.0%} of that" if measured is None else ""
    left = meter.work(done, t.steps) / meter.flops  # in steps like the last one
    seconds = (usual if measured is None else measured) * left
    evaluations = (usual if measured is None else measured) * evaluation_steps(task) * (t.steps - done) / t.steps
    free = available_memory(meter.processes.device)
    peak, size = meter.cost.peak_bytes, sum(tensor.nbytes for tensor in tensors.values())
    spread = f", {meter.processes.world_size} processes ({t.parallel})" if meter.processes.world_size > 1 else ""
    table = {
        "model": f"{config.shape}, {layers} layers of width {config.d_model}, {n:,} parameters"
        + ("" if learnt == n else f", {learnt:,} of them learn"),
        **task.facts.table,
        "training": f"{t.steps:,} steps of {spell_batch(t)} tokens, {task.epoch(t.steps):.1f} epochs; "
        f"{t.optimizer}, {t.schedule}",
        "device": f"{meter.processes.device}, {meter.precision} products at {meter.peak / 1e9:,.0f} GFLOP/s{spread}",
        **({"speed": how} if how else {}),
        "forecast": f"about {format_seconds(seconds + evaluations)}{basis}, {format_seconds(evaluations)} of it for evaluations; "
        f"{peak / 1e9:.2f} GB of memory ({free / 1e9:.1f} GB free)",
        "checkpoints": f"every {t.checkpoint_every:,} steps, {size / 1e6:,.1f} MB each",
    }
    if peak > free:
        table["warning"] = "this may not fit in memory: raise train.accumulate, or set train.checkpointing=true"
    return table


def format_seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
