"""The three shapes: Encoder, Decoder, EncoderDecoder, from the same blocks and one config.

May import: errors, config, layers.
"""

from __future__ import annotations

import torch

from clearhead.config import Config
from clearhead.errors import ConfigError
from clearhead.models.decoder import Decoder
from clearhead.models.encoder import Encoder
from clearhead.models.encoder_decoder import EncoderDecoder
from clearhead.models.initialise import initialise

__all__ = ["Decoder", "Encoder", "EncoderDecoder", "Model", "build"]

Model = Decoder | Encoder | EncoderDecoder


def build(
    config: Config, *, seed: int = 0, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Model:
    """The model that the config describes, with random weights: the same ones for the same seed, device and dtype.

    `device="meta"` builds without memory: every shape is there, no number is.
    """
    check_config(config)
    shapes = {"decoder": Decoder, "encoder": Encoder, "encoder-decoder": EncoderDecoder}
    with torch.device("meta"):  # nothing is filled twice, and a model too large fails before memory is touched
        model = shapes[config.shape](config).to(dtype or torch.get_default_dtype())
    target = torch.device(device) if device is not None else torch.get_default_device()
    if target.type != "meta":
        model = model.to_empty(device=target)
        initialise(model, config, seed)
    return model


def check_config(config: object) -> None:
    if not isinstance(config, Config):
        raise ConfigError(f"build takes a Config, got {type(config).__name__}; make one with ch.preset(name)")
