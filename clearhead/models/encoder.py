"""The encoder alone: BERT, ESM, Vision Transformers. Every position sees every other."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.config import Config
from clearhead.errors import InputError
from clearhead.layers.embedding import TokenEmbedding, TokenHead, check_ids
from clearhead.layers.masks import ABSENT, Mask
from clearhead.layers.media import PatchEmbedding
from clearhead.models.parts import make_head
from clearhead.models.stack import Padding, Stack
from clearhead.viewers import Described


class Encoder(Described, Stack):
    """`model(tokens) -> states`; with `head="tokens"` logits for each position, with `head="classes"` for each row.

    Over pictures (`inputs="patches"`) it is called with (batch, channels, height, width) instead of tokens.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config, n_layers=config.n_layers, max_len=config.max_len, causal=False)
        self.tokens: nn.Module
        if config.inputs == "patches":
            self.tokens = PatchEmbedding(
                d_model=config.d_model,
                image_size=config.image_size,
                patch_size=config.patch_size,
                n_channels=config.n_channels,
            )
        else:
            self.tokens = TokenEmbedding(config.vocab_size, config.d_model, scale=config.embedding_scale)
        self.segments = nn.Embedding(config.n_segments, config.d_model) if config.n_segments else None
        self.pool = Pooling(d_model=config.d_model, kind=config.pool, dense=config.pooler, normed=config.pool_normed)
        self.head: nn.Module | None = None
        if config.head == "tokens":
            self.head = make_head(config)
        elif config.head == "classes":
            self.head = nn.Linear(config.d_model, config.n_classes)

    def forward(
        self,
        tokens: Int[Tensor, "B T"] | Float[Tensor, "B c h w"],
        mask: Padding = None,
        *,
        segments: Int[Tensor, "B T"] | None = None,
        positions: Int[Tensor, "*B T"] | None = None,
        checkpointing: bool = False,
    ) -> Float[Tensor, "B T D"] | Float[Tensor, "B T V"] | Float[Tensor, "B C"]:
        """States, or what the config's head makes of them.

        `mask` is True for real tokens; padding on either side changes nothing for them. `segments` says which sentence a
        token is of (BERT; all 0 if not given). `checkpointing` trades time for memory in training.
        """
        states = self.states(tokens, mask, segments=segments, positions=positions, checkpointing=checkpointing)
        match self.config.head:
            case "tokens":
                return self.project(states)
            case "classes":
                assert self.head is not None
                return self.head(self.pooled(states, mask))
            case _:
                return states

    def states(
        self,
        tokens: Int[Tensor, "B T"] | Float[Tensor, "B c h w"],
        mask: Padding = None,
        *,
        segments: Int[Tensor, "B T"] | None = None,
        positions: Int[Tensor, "*B T"] | None = None,
        checkpointing: bool = False,
    ) -> Float[Tensor, "B T D"]:
        """The final states, before any head."""
        x = self.tokens(tokens)
        if self.config.dropped_token >= 0:
            x = drop(x, tokens == self.config.dropped_token, real_of(mask))
        if self.segments is not None:
            shape = x.shape[0], x.shape[1]
            zeros = torch.zeros(shape, dtype=torch.int64, device=x.device) if segments is None else segments
            x = x + self.segments(check_ids(zeros, shape, self.config.n_segments, "segments", "n_segments"))
        elif segments is not None:
            raise InputError("this model has no segments (n_segments=0), but segments were given; leave them out")
        return self.run(x, mask, positions=positions, checkpointing=checkpointing)

    def pooled(self, states: Float[Tensor, "B T D"], mask: Padding = None) -> Float[Tensor, "B D"]:
        """One vector a row, as the config's `pool` and `pooler` say."""
        return self.pool(states, real_of(mask))

    def project(self, states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """From final states to logits over the vocabulary."""
        if not isinstance(self.head, TokenHead):
            raise InputError(
                f"this model has head={self.config.head!r}, no vocabulary to score; build it with head='tokens'"
            )
        return self.head(states, self.tokens.weight if isinstance(self.tokens, TokenEmbedding) else None)


class Pooling(nn.Module):
    """One vector for the whole sequence: the first real state, or the mean or the maximum of the real ones; BERT adds dense + tanh.

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


def real_of(mask: Padding) -> Bool[Tensor, "B T"] | None:
    """Which tokens are real; None: all."""
    if isinstance(mask, Mask):
        return None if mask.keys is None else mask.keys != ABSENT
    return mask


def drop(
    x: Float[Tensor, "B T D"], dropped: Bool[Tensor, "B T"], real: Bool[Tensor, "B T"] | None = None
) -> Float[Tensor, "B T D"]:
    """Token dropout (ESM-2): masked tokens enter as zeros, and the rest are scaled so that their sum is as in training.

    There 80 % of 15 % of a row were masked: x (1 - 0.12) / (1 - the share masked here). Packed documents count as one row.
    """
    real = torch.ones_like(dropped) if real is None else real
    exact = torch.promote_types(x.dtype, torch.float32)  # bfloat16 can not count to 1,000
    kept = 1 - (dropped & real).sum(1).to(exact) / real.sum(1)
    # Of a row of nothing but masks only zeros are left, whatever they are divided by.
    scale = (1 - 0.15 * 0.8) / kept.clamp(min=1 / x.shape[1])
    return (x * scale[:, None, None]).masked_fill(dropped[..., None], 0.0).to(x.dtype)
