"""The feed-forward step: the same two-layer network at every position."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.errors import ConfigError, did_you_mean
from clearhead.layers.linear import FusedLinear, Linear, activated, save_apart

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}


class FeedForward(nn.Module):
    """down(f(up(x))) (section 3.3: f is relu); gated, down(f(gate(x)) * up(x)) (Shazeer 2020: SwiGLU and its kin)."""

    def __init__(
        self, *, d_model: int, d_ff: int, activation: str = "relu", gated: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"feedforward={activation!r} is not known; {did_you_mean(activation, ACTIVATIONS)}")
        self.activation = activation
        self.gated = gated
        if gated:
            self.gate_up = FusedLinear(d_model, {"gate": d_ff, "up": d_ff}, bias={"gate", "up"} if bias else set())
            save_apart(self, "gate_up")
        else:
            self.up = Linear(d_model, d_ff, bias=bias)
        self.down = Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        act = ACTIVATIONS[self.activation]
        if self.gated:
            gate, up = self.gate_up(x)
            return self.down(act(gate) * up)
        if self.down.product8 is not None and torch.is_grad_enabled():
            from clearhead.quantization import float8 as fp8

            return fp8.feedforward(x, self.up, self.down, self.activation)
        hidden = activated(self.up, x, self.activation)
        return self.down(act(self.up(x)) if hidden is None else hidden)
