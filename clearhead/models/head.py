"""What stands at the end of a model: scores for tokens, or for classes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.config import Config
from clearhead.layers.embedding import TokenHead
from clearhead.layers.norm import make_norm


def make_head(config: Config) -> TokenHead:
    transform = None
    if config.head_transform:
        transform = config.feedforward, make_norm(config.norm, config.d_model, eps=config.norm_eps, bias=config.bias)
    return TokenHead(
        d_model=config.d_model,
        vocab_size=config.vocab_size,
        tied=config.tie_embeddings,
        bias=config.head_bias,
        transform=transform,
        scale=config.d_model**-0.5 if config.head_scale else 1.0,
    )


class Pool(nn.Module):
    """One vector for the whole sequence: its first state, or the mean or the largest values of the real ones; BERT adds
    dense + tanh.

    `normed` brings it to length 1, so that a dot product of two is their cosine.
    """

    def __init__(self, *, d_model: int, kind: str = "first", dense: bool = False, normed: bool = False) -> None:
        super().__init__()
        self.kind, self.normed = kind, normed
        self.dense = nn.Linear(d_model, d_model) if dense else None

    def forward(self, states: Float[Tensor, "B T D"], real: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, "B D"]:
        rows = torch.arange(len(states), device=states.device)
        if self.kind == "mean":
            weight = states.new_ones(states.shape[:2]) if real is None else real.to(states)
            pooled = (states * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
        elif self.kind == "max":
            pooled = (states if real is None else states.masked_fill(~real[..., None], -math.inf)).amax(1)
        else:  # the first real state, wherever the padding is
            pooled = states[:, 0] if real is None else states[rows, real.int().argmax(1)]
        return self.finish(pooled)

    def packed(self, states: Float[Tensor, "T D"], starts: Int[Tensor, " n"]) -> Float[Tensor, "_ D"]:
        """The same for texts one after the other, from where each starts; the last of `starts` is the end."""
        if self.kind == "first":
            return self.finish(states[starts[:-1]])
        reduce = "mean" if self.kind == "mean" else "max"
        wide = states.float()  # sums in more than 8 bits
        return self.finish(torch.segment_reduce(wide, reduce, offsets=starts.long(), axis=0).to(states))

    def finish(self, pooled: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        pooled = pooled if self.dense is None else torch.tanh(self.dense(pooled))
        return F.normalize(pooled, dim=-1) if self.normed else pooled
