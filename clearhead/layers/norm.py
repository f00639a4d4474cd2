"""Norms: what keeps the residual stream in range."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.errors import ConfigError, did_you_mean


def make_norm(kind: str, width: int, *, eps: float = 1e-5, bias: bool = True) -> nn.Module:
    """ "layer": (x - mean) / std * w + b (Ba et al. 2016). "rms": x / rms * w, no mean, no bias (Zhang & Sennrich 2019)."""
    match kind:
        case "layer":
            return nn.LayerNorm(width, eps=eps, bias=bias)
        case "rms":
            return RMSNorm(width, eps=eps)
        case "none":
            return nn.Identity()
        case _:
            raise ConfigError(f"norm={kind!r} is not known; {did_you_mean(kind, ['layer', 'rms', 'none'])}")


class RMSNorm(nn.RMSNorm):
    """torch's, with the weight in the input's type: under autocast they differ, and torch then leaves its fused kernel."""

    def forward(self, x: Float[Tensor, "*_ d"]) -> Float[Tensor, "*_ d"]:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
