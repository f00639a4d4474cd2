"""The three shapes: Encoder, Decoder, EncoderDecoder, from the same blocks and one config.

May import: errors, config, kernels, layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clearhead import kernels
from clearhead.config import Config
from clearhead.errors import ConfigError
from clearhead.layers.block import Block
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
    A model that does not fit into free memory is refused.
    """
    check_config(config)
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ConfigError(f"dtype={dtype!r} is no floating-point type of torch's; pass one such as torch.float32")
    shapes = {"decoder": Decoder, "encoder": Encoder, "encoder-decoder": EncoderDecoder}
    # Nothing is filled twice, and a model too large fails before memory is touched.
    with torch.device("meta"), Undrawn():
        model = shapes[config.shape](config).to(dtype or torch.get_default_dtype())
    target = torch.device(device) if device is not None else torch.get_default_device()
    if target.type != "meta":
        take_memory(model, target)
        initialise(model, config, seed)
    return model


def take_memory(model: Model, device: torch.device, advice: str = 'device="meta" builds it without memory') -> None:
    """What has only a shape gets memory; what is in it is anybody's guess. torch's `to_empty` would load sympy first.

    `advice` ends the error if there is not enough; before it come a smaller dtype and fewer layers, where those would fit.
    """
    shapes = [x for x in (*model.parameters(), *model.buffers()) if x.is_meta]
    needed, half = sum(x.nbytes for x in shapes), sum(min(2, x.element_size()) * x.numel() for x in shapes)
    layers = [
        sum(p.nbytes for p in block.parameters() if p.is_meta) for block in model.modules() if isinstance(block, Block)
    ]

    def advise(free: int) -> str:
        smaller = ["dtype=torch.bfloat16 fits"] if half <= free and half < needed else []
        fitting = int((free - needed + sum(layers)) / (sum(layers) or 1) * model.config.n_layers)
        return "; ".join(
            [*smaller, *([f"n_layers={fitting} would fit"] if 0 < fitting < model.config.n_layers else []), advice]
        )

    kernels.require_memory(
        needed, device, f"a model of {sum(p.numel() for p in model.parameters()):,} parameters", advise
    )
    model._apply(  # pyright: ignore[reportPrivateUsage]
        lambda x: torch.empty(x.shape, dtype=x.dtype, device=device) if x.is_meta else x
    )


class Undrawn(TorchFunctionMode):
    """No first values. The meta device holds none, but its way to draw none loads torch's compiler, which takes a second."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is Tensor.normal_ or getattr(func, "__module__", "") == "torch.nn.init":
            return (*args, *given.values())[0]
        return func(*args, **given)


def check_config(config: object) -> None:
    if not isinstance(config, Config):
        raise ConfigError(f"build takes a Config, got {type(config).__name__}; make one with ch.preset(name)")
