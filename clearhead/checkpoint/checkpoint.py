"""Checkpoint: what the readers of all formats return to `load`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clearhead.checkpoint.tensor_names import Match
from clearhead.checkpoint.weight_files import Weights
from clearhead.config import Config, Generation
from clearhead.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is open: the config to build, the weights, and which tensor of the file is which of the model."""

    config: Config
    weights: Weights
    matches: list[Match]
    keys: Mapping[str, str]  # a name in `matches` -> the key in the file
    generation: Generation = field(default_factory=Generation)
    unused: tuple[str, ...] = ()  # patterns of keys that hold no weights
    extras: tuple[str, ...] = ()  # patterns of keys that are kept for saving but not computed with
    note: str = ""  # what a user should know about this model


def make_config(path: Path, fields: Mapping[str, Any], weights: Weights) -> Config:
    """The config of the fields that a file gave. Fields that can not be built are an error of the file."""
    try:
        config = Config.from_dict(dict(fields))
    except ConfigError as error:
        raise CheckpointError(f"{path} describes a model that can not be built: {error}") from None
    check_layers(config, weights)
    return config


def check_layers(config: Config, weights: Weights) -> None:
    """Refuse more layers than there are tensors, before names are made for all of them."""
    n_layers, n_tensors = config.n_layers + config.n_decoder_layers, len(weights.shapes)
    if n_layers > n_tensors:
        raise CheckpointError(
            f"the config asks for {n_layers} layers, but the file holds only {n_tensors} tensors; do they belong together?"
        )
