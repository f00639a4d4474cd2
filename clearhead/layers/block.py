"""One block of the paper's figure 1: attention, cross-attention in a decoder that has an encoder, feed-forward."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.engine.kv_cache import AnyLayerCache
from clearhead.layers.attention import MultiHeadAttention
from clearhead.layers.feedforward import FeedForward
from clearhead.layers.masks import Mask
from clearhead.layers.positions import Angles, Bias


class Block(nn.Module):
    """Look around, look at the source, then think; each step adds to the residual stream (section 3.1).

    Post-norm, as in the paper: x = norm(x + step(x)). Pre-norm, as in most models since: x = x + step(norm(x)).
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
        mask: Mask | None = None,
        *,
        angles: Angles | None = None,
        bias: Bias | None = None,
        memory: Float[Tensor, "B _ D"] | None = None,
        memory_mask: Mask | None = None,
        cache: AnyLayerCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """x in, x out; `angles` and `bias` are what the model's kind of positions gives to self-attention."""
        attention, cross = self.attention, self.cross
        x = self.step(x, self.attention_norm, lambda y: attention(y, mask, angles=angles, bias=bias, cache=cache))
        if cross is not None and self.cross_norm is not None:
            x = self.step(x, self.cross_norm, lambda y: cross(y, memory_mask, memory=memory, cache=cache))
        return self.step(x, self.feedforward_norm, self.feedforward)

    def step(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return x + F.dropout(sublayer(norm(x)), self.dropout, self.training)
        return norm(x + F.dropout(sublayer(x), self.dropout, self.training))
