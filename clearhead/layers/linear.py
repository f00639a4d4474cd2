"""What acts on each position alone: linear maps (one, or several as one product), activations, norms."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from clearhead import kernels
from clearhead.errors import ConfigError, did_you_mean
from clearhead.kernels import Packed

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}


def linear(
    x: Float[Tensor, "*_ D"],
    weight: Float[Tensor, "N D"] | Packed,
    bias: Float[Tensor, " N"] | None = None,
    activation: str | None = None,
) -> Float[Tensor, "*_ N"]:
    """f(x W^T + b), with f one of ACTIVATIONS or none."""
    y = kernels.product(x, weight, bias, activation)
    if y is not None:
        return y
    if activation is not None:
        return ACTIVATIONS[activation](linear(x, weight, bias))
    assert isinstance(weight, Tensor), "a packed weight multiplies by itself"
    return F.linear(x, weight, bias)


def activated(layer: nn.Module, x: Float[Tensor, "*_ D"], activation: str) -> Float[Tensor, "*_ N"]:
    """f(layer(x)); in one product if no hook wants to see the value in between."""
    if type(layer) is Linear and not kernels.is_watched(layer):
        return linear(x, layer.weight, layer.bias, activation)
    return ACTIVATIONS[activation](layer(x))


class Linear(nn.Linear):
    """torch's, through `linear`."""

    def forward(self, input: Float[Tensor, "*_ d_in"]) -> Float[Tensor, "*_ d_out"]:
        return linear(input, self.weight, self.bias)


class FusedLinear(nn.Module):
    """One product where there would be two or three: x [W_q W_k W_v], split afterwards.

    In memory there is one weight; in a state dict each part stands under its own name beside this module, so that
    `attention.qkv` is saved as `attention.q_proj.weight` and so on. `bias` names the parts that carry one.
    The module that holds it calls `save_apart` once.
    """

    def __init__(self, d_in: int, parts: dict[str, int], *, bias: set[str]) -> None:
        super().__init__()
        self.parts = parts
        self.biased = [name for name in parts if name in bias]
        self.weight = nn.Parameter(torch.empty(sum(parts.values()), d_in))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear, for those who use this alone
        d_bias = sum(parts[name] for name in self.biased)
        self.bias = nn.Parameter(torch.zeros(d_bias)) if self.biased else None

    def forward(self, x: Float[Tensor, "*_ d_in"]) -> tuple[Float[Tensor, "*_ _"], ...]:
        return linear(x, self.weight, self.whole_bias()).split(list(self.parts.values()), -1)

    def whole_bias(self) -> Float[Tensor, " d_out"] | None:
        """The bias of every part, zeros where a part has none (Whisper's keys)."""
        bias = self.bias
        if bias is None or len(self.biased) == len(self.parts):
            return bias
        given = dict(zip(self.biased, bias.split([self.parts[name] for name in self.biased]), strict=True))
        return torch.cat([given.get(name, bias.new_zeros(size)) for name, size in self.parts.items()])


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
    """torch's, with the result in the input's type: autocast would widen it. The kernel computes in float32 either way."""

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
