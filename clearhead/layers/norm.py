"""Norms: what keeps the residual stream in range."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.errors import ConfigError, did_you_mean


def make_norm(kind: str, width: int, *, eps: float = 1e-5, bias: bool = True) -> nn.Module:
    """ "layer": (x - mean) / std * w + b (Ba et al. 2016). "rms": x / rms * w, no mean, no bias (Zhang & Sennrich 2019)."""
    match kind:
        case "layer":
            return LayerNorm(width, eps=eps, bias=bias)
        case "rms":
            return RMSNorm(width, eps=eps)
        case "none":
            return nn.Identity()
        case _:
            raise ConfigError(f"norm={kind!r} is not known; {did_you_mean(kind, ['layer', 'rms', 'none'])}")


class LayerNorm(nn.LayerNorm):
    """torch's, which gives what it gets: autocast would widen a narrow stream. Inside, the kernel counts in float32 anyway."""

    def forward(self, input: Float[Tensor, "*_ d"]) -> Float[Tensor, "*_ d"]:
        if input.dtype == self.weight.dtype:
            return super().forward(input)
        bias = self.bias.to(input.dtype) if isinstance(self.bias, Tensor) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        with torch.autocast(input.device.type, enabled=False):
            return F.layer_norm(input, self.normalized_shape, self.weight.to(input.dtype), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """torch's, with the weight in the input's type: under autocast they differ, and torch then leaves its fused kernel."""

    def forward(self, x: Float[Tensor, "*_ d"]) -> Float[Tensor, "*_ d"]:
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
