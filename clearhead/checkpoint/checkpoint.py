"""What the readers of checkpoints hand to `load`."""

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
    """A checkpoint, described: what to build, where its weights are, and which is which."""

    config: Config
    weights: Weights
    matches: list[Match]
    spelling: Mapping[str, str]  # a table's name -> the file's key
    generation: Generation = field(default_factory=Generation)
    unused: tuple[str, ...] = ()  # patterns of keys that are no weights
    extras: tuple[str, ...] = ()  # patterns of keys that are kept for saving, but not computed with


def make_config(path: Path, fields: Mapping[str, Any], weights: Weights) -> Config:
    """The config of the fields that a file gave; ones that can not be built are the file's fault."""
    try:
        config = Config.from_dict(dict(fields))
    except ConfigError as error:
        raise CheckpointError(f"{path} describes a model that can not be built: {error}") from None
    check_layers(config, weights)
    return config


def check_layers(config: Config, weights: Weights) -> None:
    """Refuse more layers than there are tensors, before a name is made for each of them."""
    n_layers, n_tensors = config.n_layers + config.n_decoder_layers, len(weights.shapes)
    if n_layers > n_tensors:
        raise CheckpointError(
            f"the config asks for {n_layers} layers, but the file holds only {n_tensors} tensors; do they belong together?"
        )
