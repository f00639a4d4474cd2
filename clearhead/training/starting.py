"""The model a run starts from and the one it ends with: built or loaded, with LoRA additions or without, whole and on the CPU."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.checkpoint import load
from clearhead.config import Config
from clearhead.errors import ConfigError
from clearhead.families import preset
from clearhead.layers.linear import FusedLinear
from clearhead.models import Encoder, Model, build
from clearhead.training.processes import whole
from clearhead.training.recipe import Recipe
from clearhead.training.tasks.classify import are_pictures
from clearhead.training.tasks.task import Facts


def start(recipe: Recipe, facts: Facts) -> Model:
    """The model of a recipe, ready to learn."""
    model = _make(recipe, facts)
    if isinstance(model, Encoder) and model.config.head == "tokens":
        model.pool.requires_grad_(False)  # nothing is pooled, and processes would wait for its gradient
    return model


def check_model(recipe: Recipe) -> None:
    """Refuse a model that could never be built before any data is read; the data may still refuse it."""
    if "from" in recipe.model:
        return
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
    make_config(recipe, guessed)


def _make(recipe: Recipe, facts: Facts) -> Model:
    """The weights drawn from the seed, or taken from a checkpoint."""
    if "from" not in recipe.model:
        config = make_config(recipe, facts.fields)
        _refuse_small(facts.fields, config)
        model = build(config, seed=recipe.train.seed)
        model.generation = facts.generation
        return model
    loaded = load(recipe.model["from"], dtype=torch.float32)
    given = {name: value for name, value in recipe.model.items() if name != "from"}
    changes = {**_refuse_sizes(given, loaded.config), **_changed(facts.fields, loaded.config)}
    config = replace(loaded.config, **changes)
    _refuse_small(facts.fields, config)
    model = build(config, seed=recipe.train.seed)
    # What the checkpoint has and the new model has not, and the other way round, may only be the head.
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
    for name in ("shape", "inputs", "head", "n_classes"):  # what the task is, and not a wish
        if name in facts and given.get(name, facts[name]) != facts[name]:
            raise ConfigError(f"model.{name}={given[name]!r}, but this task needs {facts[name]!r}; leave it out")
    given = {**facts, **given}
    if "preset" in recipe.model:
        return preset(recipe.model["preset"], **given)
    return Config.from_dict(given)


def _refuse_small(facts: dict[str, Any], config: Config) -> None:
    """A model that could not read its data."""
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
    """Fields that a loaded model can still change; its sizes are what they are."""
    free = ("dropout", "attention_dropout", "kernel", "head", "n_classes", "labels", "pool", "pooler", "max_len")
    for name, value in given.items():
        if name not in free and getattr(config, name) != value:
            raise ConfigError(
                f"model.{name}={value!r}, but the checkpoint has {getattr(config, name)!r}; leave it out, or change one of: "
                + ", ".join(free)
            )
    return {name: value for name, value in given.items() if name in free}


def _changed(facts: dict[str, Any], config: Config) -> dict[str, Any]:
    """Facts a checkpoint must bow to: its head and labels. Its shape and vocabulary must agree with the data's."""
    names = {field.name for field in fields(Config)}
    changed: dict[str, Any] = {}
    for name, value in facts.items():
        assert name in names, name
        if name in ("head", "n_classes", "labels", "tie_embeddings", "head_transform", "head_bias"):
            changed[name] = value
            if name == "head" and value != "tokens":  # what only a vocabulary's head has
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


def add_lora(model: nn.Module, rank: int, alpha: float, seed: int) -> int:
    """Freeze every weight, and add to each product W x of the blocks a product B A x of a low rank (Hu et al. 2021).

    A starts random and B at zero, so that the model starts as it was. A head for classes, which may be new, still learns whole.
    Returns how many numbers learn now.
    """
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    if isinstance(model, Encoder) and model.config.head == "classes" and model.head is not None:
        model.head.requires_grad_(True)
    for name, module in model.named_modules():
        if "blocks." in name and isinstance(module, nn.Linear | FusedLinear):
            d_out, d_in = module.weight.shape
            a = torch.randn(rank, d_in, generator=generator) / math.sqrt(d_in)
            module.register_parameter("lora_a", nn.Parameter(a.to(module.weight)))
            module.register_parameter("lora_b", nn.Parameter(torch.zeros(d_out, rank).to(module.weight)))
            module.lora_scale = alpha / rank  # type: ignore[assignment]
            module.register_forward_hook(_add)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _add(module: Any, inputs: tuple[Tensor, ...], out: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    added = F.linear(F.linear(inputs[0], module.lora_a), module.lora_b) * module.lora_scale
    if isinstance(out, Tensor):
        return out + added
    return tuple(x + y for x, y in zip(out, added.split([x.shape[-1] for x in out], -1), strict=True))


@torch.no_grad()
def export(model: Model) -> Model:
    """A whole copy on the CPU: gathered from all processes (which must all call this), LoRA's additions merged in."""
    fresh = build(model.config, device="meta").to_empty(device="cpu")
    modules = dict(model.named_modules())
    for name, tensor in [*fresh.named_parameters(), *fresh.named_buffers()]:
        holder = modules[name.rpartition(".")[0]]
        value = whole(getattr(holder, name.rpartition(".")[2])).detach().cpu()
        if name.endswith(".weight") and hasattr(holder, "lora_a"):
            a, b = (whole(getattr(holder, part)).cpu().double() for part in ("lora_a", "lora_b"))
            value = (value.double() + b @ a * holder.lora_scale).to(value.dtype)  # type: ignore[operator]
        tensor.data = value.clone()
    fresh.generation, fresh.extras = model.generation, model.extras
    return fresh.eval()
