"""The check of memory before a model is built: a run that can not fit is refused, with what would fit."""

from __future__ import annotations

import os
from dataclasses import replace

from clearhead.config import Config
from clearhead.costs.forecast import Cost, cost
from clearhead.families import preset, presets
from clearhead.kernels.memory import require_memory
from clearhead.training.distributed import Processes
from clearhead.training.meter import step_cost
from clearhead.training.recipe import Recipe
from clearhead.training.tasks.task import Task

ERROR = (
    0.9  # the forecast of activations may be some percent too high: what would just not fit is begun, with a warning
)
LEAST_VOCABULARY = 256


def check_states(config: Config, recipe: Recipe, processes: Processes) -> None:
    """Before any data is read: refuse a model whose weights, gradients and optimizer state do not fit.

    The vocabulary is not known yet, so it counts as a small one.
    """
    vocab_size = min(config.vocab_size, LEAST_VOCABULARY)
    config = replace(config, vocab_size=vocab_size, source_vocab_size=min(config.source_vocab_size, vocab_size))
    t = recipe.train
    shards = processes.world_size if t.parallel == "fsdp" else 1
    _require(config, recipe, processes, _count_states(_smallest(config, t.optimizer, shards), recipe))


def check_step(config: Config, task: Task, processes: Processes) -> None:
    """Before the model is built: refuse it if a training step does not fit."""
    found = step_cost(config, task, processes)
    states = _count_states(found, task.recipe)
    needed = max(
        states, int(ERROR * (found.peak_bytes if not task.recipe.train.lora_rank else states + found.activation_bytes))
    )
    _require(config, task.recipe, processes, needed, fits_alone=states)


def _smallest(config: Config, optimizer: str, shards: int = 1) -> Cost:
    return cost(
        config,
        batch=1,
        length=None if config.inputs == "patches" else 1,
        mode="train",
        optimizer=optimizer,
        shards=shards,
    )


def _count_states(found: Cost, recipe: Recipe) -> int:
    """The bytes that a run holds all the time; LoRA's own numbers are few."""
    learnt = 0 if recipe.train.lora_rank else found.gradient_bytes + found.optimizer_bytes
    return found.weight_bytes + learnt


def _require(config: Config, recipe: Recipe, processes: Processes, needed: int, fits_alone: int | None = None) -> None:
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if processes.device.type == "cpu" else 1

    def advise(free: int) -> str:
        if fits_alone is not None and fits_alone * sharing <= free:
            return "raise train.accumulate, lower train.batch_tokens, or set train.checkpointing=true"
        if "from" in recipe.model:
            return "start from a smaller model" + (
                "" if recipe.train.lora_rank else ", or train only additions: --lora rank=8"
            )
        return _name_smaller(config, recipe, free // sharing)

    what = f"training a model of width {config.d_model} and {config.depth} layers"
    require_memory(needed * sharing, processes.device, what, advise)


def _name_smaller(config: Config, recipe: Recipe, free: int) -> str:
    """The largest preset of this shape that fits, or advice without one."""
    sizes = {
        name: _count_states(_smallest(known, recipe.train.optimizer), recipe)
        for name in presets()
        if (known := preset(name)).shape == config.shape and known.inputs == config.inputs
    }
    fitting = [name for name in sizes if sizes[name] <= free // 2]  # the other half: activations
    largest = f", or take a preset: --set model.preset={max(fitting, key=sizes.__getitem__)}" if fitting else ""
    return f"lower model.d_model or model.n_layers{largest}"
