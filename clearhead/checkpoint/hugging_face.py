"""A model in a layout that Hugging Face transformers loads: its own family's, or that of any family that can express it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

from torch import Tensor

from clearhead.checkpoint.sentence_transformers import write_modules
from clearhead.checkpoint.tensor_names import expand, write_all
from clearhead.config import Config, Generation
from clearhead.errors import CheckpointError
from clearhead.families import FAMILIES, family_of
from clearhead.families.config_translation import Keys, NoPlaceError, refuse_to_write
from clearhead.models import Model
from clearhead.quantization.model_weights import example_weight

# Fields that do not change what a finished model computes, and `sinusoid_halves`, which a layout's names undo.
FREE = ("family", "dropout", "attention_dropout", "kernel", "init", "init_std", "init_residual", "sinusoid_halves")


def write_hugging_face(model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON files of the folder by name, and the tensors by their names there."""
    config = model.config
    if config.pruned_heads:
        raise CheckpointError(
            f"transformers has no layers of unequal heads, and this model has lost {len(config.pruned_heads)}, such as "
            f"{config.pruned_heads[0]!r}; save with format='clearhead'"
        )
    refuse_to_write(config, "transformers' layout of any family", sparsity="")
    module, theirs = _find_layout(config)
    named = _name_tensors(model, module)
    if module is not FAMILIES.get(config.family):
        _compare(config, theirs, named)
    theirs |= _write_generation(model.generation)
    files = write_modules(theirs.pop("modules", []))
    files["config.json"] = {**theirs, "dtype": str(example_weight(model).dtype).removeprefix("torch.")}
    if config.shape != "encoder":
        files["generation_config.json"] = _write_generation(model.generation)
    return files, named


def _find_layout(config: Config) -> tuple[ModuleType, dict[str, Any]]:
    """The family that can express the config, its own first, and the config as that family writes it."""
    refusals: list[CheckpointError] = []
    for name in sorted(FAMILIES, key=lambda name: name != config.family):
        try:
            return FAMILIES[name], FAMILIES[name].write(config)
        except CheckpointError as error:
            refusals.append(error)
    if config.family in FAMILIES:
        raise refusals[0]
    fits = [
        error
        for error in refusals
        if isinstance(error, NoPlaceError) and not {"shape", "inputs"} & error.misfits.keys()
    ]
    nearest = min(fits, key=lambda error: len(error.misfits))
    raise CheckpointError(
        f"no layout of transformers can hold this model; {nearest.target}, the nearest, has no place for "
        f"{', '.join(nearest.misfits.values())}; save with format='clearhead'"
    )


def _name_tensors(model: Model, module: ModuleType) -> dict[str, Tensor]:
    config = model.config
    state = write_all(model.state_dict(), expand(module.NAMES, config))
    prefix = module.PREFIX if config.head != "none" else ""
    added: Callable[[Config], dict[str, Tensor]] = getattr(module, "added", lambda _: {})
    kept = {key.removeprefix("extras.").removeprefix(module.PREFIX): tensor for key, tensor in model.extras.items()}
    whole = {**state, **added(config), **kept}
    return {key if key.startswith(module.HEADS) else prefix + key: tensor for key, tensor in whole.items()}


def _compare(config: Config, theirs: dict[str, Any], named: dict[str, Tensor]) -> None:
    """Refuse a layout of another family whose config, read again, is not this one.

    A family's `write` refuses what models of its own family may have; this holds for every config.
    """
    family = family_of(theirs["model_type"])
    assert family is not None
    module = FAMILIES[family]
    keys = Keys({key.removeprefix(module.PREFIX): key for key in named}, named.__getitem__)
    back = Config.from_dict({"family": family, **module.BASE, **module.read(theirs, keys)})
    for field in fields(Config):
        if field.name not in FREE and getattr(config, field.name) != getattr(back, field.name):
            raise CheckpointError(
                f"no layout of transformers can hold this model; {theirs['model_type']}'s, the nearest, has no place for "
                f"{field.name}={getattr(config, field.name)!r}; save with format='clearhead'"
            )


def _write_generation(generation: Generation) -> dict[str, Any]:
    eos = generation.eos[0] if len(generation.eos) == 1 else list(generation.eos) or None
    values = {
        "bos_token_id": generation.bos,
        "eos_token_id": eos,
        "pad_token_id": generation.pad,
        "decoder_start_token_id": generation.decoder_start,
        "forced_bos_token_id": generation.forced_bos,
        "forced_decoder_ids": [[place, token] for place, token in enumerate(generation.forced_start, 1)] or None,
        "forced_eos_token_id": generation.forced_eos,
        "max_length": generation.max_length,
        "suppress_tokens": list(generation.suppress) or None,
        "begin_suppress_tokens": list(generation.begin_suppress) or None,
        "alignment_heads": [list(pair) for pair in generation.alignment_heads] or None,
    }
    return {name: value for name, value in values.items() if value is not None}
