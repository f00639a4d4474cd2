"""The model that a run starts from: built from the recipe's config, or loaded from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from clearhead.checkpoint import load
from clearhead.checkpoint.loading import open_checkpoint
from clearhead.config import Config
from clearhead.errors import ConfigError
from clearhead.families import preset
from clearhead.models import Encoder, Model, build
from clearhead.training.recipe import Recipe
from clearhead.training.tasks.classification import are_pictures
from clearhead.training.tasks.task import Facts


def initial_model(recipe: Recipe, facts: Facts, check: Callable[[Config], None] = lambda config: None) -> Model:
    """The model of a recipe, with random weights or those of a checkpoint. `check` sees its config before memory is taken."""
    model = _make(recipe, facts, check)
    if isinstance(model, Encoder) and model.config.head == "tokens":
        model.pool.requires_grad_(False)  # it is not used, and DDP would wait for its gradient
    return model


def guess_config(recipe: Recipe) -> Config:
    """The config as far as it is known before any data is read; the data may need changes. Refuses one that can not be built."""
    if "from" in recipe.model:
        return open_checkpoint(Path(recipe.model["from"])).config
    shape = {"language": "decoder", "translate": "encoder-decoder"}.get(recipe.task, "encoder")
    guessed: dict[str, Any] = dict(shape=shape, vocab_size=recipe.data.vocab_size)
    if recipe.task == "mask":
        guessed["head"] = "tokens"
    elif recipe.task == "classify":
        guessed |= dict(
            head="classes", n_classes=len(recipe.model.get("labels", ())) or recipe.model.get("n_classes", 2)
        )
    if not are_pictures(recipe):
        guessed["max_len"] = recipe.data.length
    return make_config(recipe, guessed)


def _make(recipe: Recipe, facts: Facts, check: Callable[[Config], None]) -> Model:
    if "from" not in recipe.model:
        config = make_config(recipe, facts.fields)
        _refuse_small(facts.fields, config)
        check(config)
        model = build(config, seed=recipe.train.seed)
        model.generation = facts.generation
        return model
    loaded = load(recipe.model["from"], dtype=torch.float32)
    given = {name: value for name, value in recipe.model.items() if name != "from"}
    changes = {**_refuse_sizes(given, loaded.config), **_changed(facts.fields, loaded.config)}
    config = replace(loaded.config, **changes)
    _refuse_small(facts.fields, config)
    check(config)
    model = build(config, seed=recipe.train.seed)
    # Only the head may differ between the checkpoint and the new model.
    ours = model.state_dict()
    taken = {name: tensor.to(ours[name].dtype) for name, tensor in loaded.state_dict().items() if name in ours}
    taken = {name: tensor for name, tensor in taken.items() if tensor.shape == ours[name].shape}
    if absent := [name for name in ours if name not in taken and not name.startswith(("head.", "pool."))]:
        raise ConfigError(f"{recipe.model['from']!r} has no {', '.join(absent[:3])} of this shape; leave model.* out")
    model.load_state_dict(taken, strict=False)
    model.generation, model.extras = loaded.generation, loaded.extras
    return model


def make_config(recipe: Recipe, facts: dict[str, Any]) -> Config:
    given = {name: value for name, value in recipe.model.items() if name not in ("preset", "from")}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    for name in ("shape", "inputs", "head", "n_classes"):  # fixed by the task
        if name in facts and given.get(name, facts[name]) != facts[name]:
            raise ConfigError(f"model.{name}={given[name]!r}, but this task needs {facts[name]!r}; leave it out")
    given = {**facts, **given}
    if "preset" in recipe.model:
        return preset(recipe.model["preset"], **given)
    return Config.from_dict(given)


def _refuse_small(facts: dict[str, Any], config: Config) -> None:
    """Refuse a model whose vocabulary or length is too small for the data."""
    for name, field in (
        ("vocab_size", "data.vocab_size"),
        ("max_len", "data.length"),
        ("max_source_len", "data.length"),
    ):
        if facts.get(name, 0) > getattr(config, name):
            raise ConfigError(
                f"the data needs {name}={facts[name]}, but the model has {getattr(config, name)}; lower {field}, or raise "
                f"model.{name}"
            )


def _refuse_sizes(given: dict[str, Any], config: Config) -> dict[str, Any]:
    """The given fields that a loaded model can change; refuse others, such as sizes."""
    free = ("dropout", "attention_dropout", "kernel", "head", "n_classes", "labels", "pool", "pooler", "max_len")
    for name, value in given.items():
        if name not in free and getattr(config, name) != value:
            raise ConfigError(
                f"model.{name}={value!r}, but the checkpoint has {getattr(config, name)!r}; leave it out, or change one of: "
                + ", ".join(free)
            )
    return {name: value for name, value in given.items() if name in free}


def _changed(facts: dict[str, Any], config: Config) -> dict[str, Any]:
    """The fields that the data changes in a checkpoint's config: head and labels. Refuse it if shape or vocabulary do not fit."""
    names = {field.name for field in fields(Config)}
    changed: dict[str, Any] = {}
    for name, value in facts.items():
        assert name in names, name
        if name == "head":
            changed["problem"] = "auto"  # the checkpoint's labels may have had another meaning
        if name in ("head", "n_classes", "labels", "tie_embeddings", "head_transform", "head_bias"):
            changed[name] = value
            if name == "head" and value != "tokens":  # only a head over the vocabulary has these
                changed |= dict(tie_embeddings=False, head_transform=False, head_bias="none", head_scale=False)
        elif name in ("shape", "inputs", "image_size", "n_channels") and getattr(config, name) != value:
            raise ConfigError(
                f"the data needs {name}={value!r}, but the checkpoint has {getattr(config, name)!r}; start from another"
            )
        elif name == "vocab_size" and value > config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {value} tokens, the checkpoint's vocabulary {config.vocab_size}; use the checkpoint's tokenizer"
            )
    return changed
