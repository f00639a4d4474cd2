"""clearhead: the Transformer as one library, to read and to use.

    import clearhead as ch
    model = ch.build(ch.preset("gpt2", n_layers=4))

Names are looked up when first used, so that importing this, and `clearhead --help`, loads no torch.
"""

from __future__ import annotations

import gc
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from clearhead import viewers
from clearhead.version import __version__

if TYPE_CHECKING:
    from clearhead.checkpoint import load, save
    from clearhead.config import Config, Generation
    from clearhead.costs import cost, draw
    from clearhead.data import load_tokenizer, train_tokenizer
    from clearhead.errors import (
        CheckpointError,
        ClearheadError,
        ConfigError,
        InputError,
        MissingExtraError,
    )
    from clearhead.families import preset, presets
    from clearhead.generation import generate, translate
    from clearhead.inside import probe
    from clearhead.models import Decoder, Encoder, EncoderDecoder, build
    from clearhead.training import Recipe, find_recipe, train

# Each public name, and the room it lives in.
_ROOMS = {
    "Config": "config",
    "Generation": "config",
    "CheckpointError": "errors",
    "ClearheadError": "errors",
    "ConfigError": "errors",
    "InputError": "errors",
    "MissingExtraError": "errors",
    "Decoder": "models",
    "Encoder": "models",
    "EncoderDecoder": "models",
    "build": "models",
    "load": "checkpoint",
    "load_tokenizer": "data",
    "save": "checkpoint",
    "train_tokenizer": "data",
    "preset": "families",
    "presets": "families",
    "probe": "inside",
    "cost": "costs",
    "draw": "costs",
    "generate": "generation",
    "translate": "generation",
    "Recipe": "training",
    "find_recipe": "training",
    "train": "training",
}

__all__ = [
    "CheckpointError",
    "ClearheadError",
    "Config",
    "ConfigError",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "Generation",
    "InputError",
    "MissingExtraError",
    "Recipe",
    "__version__",
    "build",
    "cost",
    "draw",
    "find_recipe",
    "generate",
    "load",
    "load_tokenizer",
    "preset",
    "presets",
    "probe",
    "save",
    "train",
    "train_tokenizer",
    "translate",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"clearhead has no {name!r}; it has {', '.join(__all__)}")
    value = getattr(_import(_ROOMS[name]), name)
    globals()[name] = value
    return value


def _import(room: str) -> ModuleType:
    """A room, while Python does not look for garbage: torch makes half a million objects that stay, and each look takes longer."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(f"clearhead.{room}")
    finally:
        if gc.get_freeze_count() == 0:
            gc.freeze()  # and back again: they now count as old, and the next look is not at them
            gc.unfreeze()
        if was_on:
            gc.enable()


def _show_seen(*given: Any, **options: Any) -> Any:
    return _import("explorer").show_seen(*given, **options)


def _describe_model(model: Any) -> str:
    return _import("quantization.model_weights").describe_model(model)


viewers.show_seen, viewers.describe_model = _show_seen, _describe_model


def __dir__() -> list[str]:
    return list(__all__)
