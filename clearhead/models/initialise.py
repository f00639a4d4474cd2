"""Random weights, as the config's fields ask: one pass, one generator, the same result for the same seed."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from clearhead.config import Config
from clearhead.layers.embedding import TokenEmbedding
from clearhead.layers.linear import FusedLinear
from clearhead.layers.positions import Learned
from clearhead.layers.relative_positions import RelativeBuckets

RESIDUAL = ("o_proj.weight", "down.weight")  # the projections that write to the residual stream


@torch.no_grad()
def initialise(model: nn.Module, config: Config, seed: int) -> None:
    """Fill every parameter and buffer of a model that has none yet.

    `init` says how matrices are drawn: "normal" and "truncated" with `init_std` (GPT-2, BERT, ViT), "xavier" uniform by
    fan-in and fan-out, with embeddings of variance 1 / d_model (the original), "fan_in" with variance 1 / fan-in (T5).
    `init_residual` shrinks ("scaled": by sqrt of the number of steps, GPT-2) or zeroes what is added to the stream.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for place, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 1 and name != "class_token":
                parameter.fill_(1.0 if name == "weight" else 0.0)
            elif isinstance(module, FusedLinear):
                for part, piece in zip(module.parts, parameter.split(list(module.parts.values())), strict=True):
                    _draw(piece, config, generator, 1 / math.sqrt(config.d_head) if _is_unscaled(part, config) else 1.0)
            elif isinstance(module, TokenEmbedding | nn.Embedding | Learned | RelativeBuckets):
                _draw_table(parameter, config, generator, relative=isinstance(module, RelativeBuckets))
            else:
                _draw(
                    parameter, config, generator, 1 / math.sqrt(config.d_head) if _is_unscaled(place, config) else 1.0
                )
        for buffer in module.buffers(recurse=False):
            buffer.zero_()
    for name, parameter in model.named_parameters():
        if name.endswith(RESIDUAL) and config.init_residual != "same":
            parameter.mul_(1 / math.sqrt(2 * config.n_layers) if config.init_residual == "scaled" else 0.0)
    if config.inputs == "frames" and config.positions == "learned":
        _fix_sound_positions(model.get_parameter("encoder.positions.weight"))


def _is_unscaled(part: str, config: Config) -> bool:
    """T5 does not divide scores by sqrt(d_head); its queries start smaller by that factor instead."""
    return part.endswith("q_proj") and config.init == "fan_in" and config.attention_scale == 1.0


def _draw(x: Tensor, config: Config, generator: torch.Generator, factor: float) -> None:
    if config.init == "xavier" and x.ndim > 1:
        nn.init.xavier_uniform_(x, generator=generator)
    elif config.init == "truncated":
        nn.init.trunc_normal_(
            x, std=config.init_std, a=-2 * config.init_std, b=2 * config.init_std, generator=generator
        )
    else:
        fan_in = x[0].numel() if x.ndim > 1 else x.numel()
        x.normal_(std=factor / math.sqrt(fan_in) if config.init == "fan_in" else config.init_std, generator=generator)


def _draw_table(x: Tensor, config: Config, generator: torch.Generator, *, relative: bool) -> None:
    if config.init in ("normal", "truncated"):
        return _draw(x, config, generator, 1.0)
    small = config.init == "xavier" or relative
    x.normal_(std=1 / math.sqrt(config.d_model) if small else 1.0, generator=generator)
    return None


def _fix_sound_positions(table: nn.Parameter) -> None:
    """Whisper's encoder positions: sinusoids of wavelengths 2 pi to exactly 10,000 of that, in a table, never trained."""
    half = table.shape[1] // 2
    steps = torch.exp(torch.arange(half, device=table.device) * (-math.log(10_000.0) / max(half - 1, 1)))
    angles = torch.arange(table.shape[0], device=table.device)[:, None] * steps
    table.copy_(torch.cat([angles.sin(), angles.cos()], 1))
