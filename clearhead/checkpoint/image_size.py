"""A model of pictures for pictures of another size."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.config import Config
from clearhead.errors import ConfigError
from clearhead.models import Model, build


def resize_pictures(model: Model, image_size: int) -> Model:
    """The same weights for pictures of `image_size`: learned positions are interpolated, all else is as it is."""
    config = model.config
    if config.inputs != "patches":
        raise ConfigError(f"image_size={image_size} is for models of pictures; this one has inputs={config.inputs!r}")
    resized = build(
        Config.from_dict({**config.to_dict(), "image_size": image_size, "max_len": 0, "max_source_len": 0}),
        device="meta",
    )
    state = model.state_dict()
    if config.positions == "learned":
        state["positions.weight"] = interpolate(state["positions.weight"], resized.config.n_patches)
    resized.load_state_dict(state, assign=True)
    resized.generation, resized.extras = model.generation, model.extras
    return resized.train(model.training)


def interpolate(table: Float[Tensor, "P D"], n_patches: int) -> Float[Tensor, "Q D"]:
    """The class token's position as it is, and those of a square of patches drawn out to another square, bicubically."""
    old, new = math.isqrt(len(table) - 1), math.isqrt(n_patches)
    square = table[1:].unflatten(0, (old, old)).movedim(-1, 0)[None]  # (1, D, side, side), as a picture of D channels
    exact = square.to(torch.promote_types(table.dtype, torch.float32))
    drawn = F.interpolate(exact, size=(new, new), mode="bicubic", align_corners=False)
    return torch.cat([table[:1], drawn[0].flatten(1).T.to(table)])
