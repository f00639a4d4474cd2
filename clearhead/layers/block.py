"""One block of the paper's figure 1: attention, cross-attention in a decoder that has an encoder, feed-forward, and their norms."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.errors import ConfigError, did_you_mean
from clearhead.layers.attention import Lowered, MultiHeadAttention
from clearhead.layers.cache import AnyLayerCache
from clearhead.layers.linear import ACTIVATIONS, FusedLinear, Linear, activated
from clearhead.layers.masks import Mask
from clearhead.layers.positions import Angles
from clearhead.layers.state_names import save_apart


class Block(nn.Module):
    """Self-attention, cross-attention over the source, feed-forward; each adds its result to the residual stream (section 3.1).

    Post-norm, as in the paper: x = norm(x + sublayer(x)). Pre-norm, as in most models since: x = x + sublayer(norm(x)).
    """

    def __init__(
        self,
        *,
        attention: MultiHeadAttention,
        feedforward: FeedForward,
        norm: Callable[[], nn.Module],
        cross: MultiHeadAttention | None = None,
        norm_first: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.cross_norm = norm() if cross is not None else None
        self.cross = cross
        self.feedforward_norm = norm()
        self.feedforward = feedforward
        self.norm_first, self.dropout = norm_first, dropout

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        mask: Mask | Lowered | None = None,
        *,
        angles: Angles | None = None,
        memory: Float[Tensor, "B _ D"] | None = None,
        memory_mask: Mask | None = None,
        cache: AnyLayerCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """x in, x out. `angles` are the rotary positions' for self-attention; a bias on the scores comes with the lowered mask."""
        attention, cross = self.attention, self.cross
        x = self.step(x, self.attention_norm, lambda y: attention(y, mask, angles=angles, cache=cache))
        if cross is not None and self.cross_norm is not None:
            x = self.step(x, self.cross_norm, lambda y: cross(y, memory_mask, memory=memory, cache=cache))
        return self.step(x, self.feedforward_norm, self.feedforward)

    def step(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return x + F.dropout(sublayer(norm(x)), self.dropout, self.training)
        return norm(x + F.dropout(sublayer(x), self.dropout, self.training))


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
        if self.gated:
            gate, up = self.gate_up(x)
            return self.down(ACTIVATIONS[self.activation](gate) * up)
        return self.down(activated(self.up, x, self.activation))
