"""A stack of blocks over the residual stream: what an encoder and a decoder have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clearhead.config import Config, Generation
from clearhead.engine import gpu_step as one_token
from clearhead.engine.kv_cache import AnyCache, PagedCache
from clearhead.errors import InputError
from clearhead.layers.attend import check_mask, settle
from clearhead.layers.attention import MultiHeadAttention
from clearhead.layers.block import Block
from clearhead.layers.embedding import check_ids
from clearhead.layers.feedforward import FeedForward
from clearhead.layers.masks import Mask, check_real, padding
from clearhead.layers.norm import make_norm
from clearhead.layers.positions import Alibi, Learned, Positions, RelativeBuckets, Rotary, Sinusoidal, check_length

Padding = Bool[Tensor, "B T"] | Mask | None  # what a model's `mask=` takes; True = a real token


class Stack(nn.Module):
    """Positions, then blocks, then (pre-norm) a last norm. `causal` makes it a decoder's, `cross` one with an encoder."""

    generation = Generation()  # replaced by what a checkpoint says
    extras: Mapping[str, Tensor] = MappingProxyType({})  # tensors of a checkpoint that are kept, but not computed with

    def __init__(self, config: Config, *, n_layers: int, max_len: int, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        norm = partial(make_norm, config.norm, config.d_model, eps=config.norm_eps, bias=config.bias)
        self.positions = make_positions(config, max_len=max_len, causal=causal)
        self.embedding_norm = norm() if config.embedding_norm else nn.Identity()
        stack = ("decoder." if cross else "encoder.") if config.shape == "encoder-decoder" else ""
        self.blocks = nn.ModuleList(
            Block(
                attention=make_attention(config, f"{stack}blocks.{i}.attention"),
                cross=make_attention(config, f"{stack}blocks.{i}.cross", cross=True) if cross else None,
                feedforward=FeedForward(
                    d_model=config.d_model,
                    d_ff=config.d_ff,
                    activation=config.feedforward,
                    gated=config.gated,
                    bias=config.bias,
                ),
                norm=norm,
                norm_first=config.norm_first,
                dropout=config.dropout,
            )
            for i in range(n_layers)
        )
        self.norm = norm() if config.norm_first else nn.Identity()
        self.stream: torch.dtype | None = None  # under autocast, what blocks hand on; None: what the embedding gives

    def run(
        self,
        x: Float[Tensor, "B T D"],
        mask: Padding = None,
        *,
        positions: Int[Tensor, "*B T"] | None = None,
        memory: Float[Tensor, "B S D"] | None = None,
        memory_mask: Mask | None = None,
        cache: AnyCache | None = None,
        checkpointing: bool = False,
    ) -> Float[Tensor, "B T D"]:
        """From embeddings to final states. With a cache, x is what comes after the tokens already in it."""
        if checkpointing and cache is not None:
            raise InputError("checkpointing is for training and a cache for generating; got both; leave one out")
        T = x.shape[1]
        stands, mask = self._place(x, mask, cache, given=positions is not None)
        at = stands.clamp(min=0) if positions is None else self._check_positions(positions, x)
        x = F.dropout(self.embedding_norm(self.positions.enter(x, at)), self.config.dropout, self.training)
        if self.stream is not None and torch.is_autocast_enabled(x.device.type):
            x = x.to(self.stream)
        mask, bias = settle(
            *(mask, self.positions.bias),
            T=T,
            S=T + (0 if cache is None else cache.length),
            like=x,
            kernel=self.config.kernel,
            dropout=self.config.attention_dropout if self.training else 0.0,
        )
        angles = self.positions.angles(at)
        even = not self.config.pruned_heads  # what does many layers' steps at once takes them to be alike
        if even and isinstance(cache, PagedCache) and one_token.fits(self.layers, self.norm, x, mask, bias, cache):
            return one_token.run(self.layers, self.norm, x, mask, angles, cache)
        for i, block in enumerate(self.blocks):
            layer = partial(block, angles=angles, bias=bias, memory=memory, memory_mask=memory_mask)
            if checkpointing:
                x = checkpoint(layer, x, mask, use_reentrant=False)
            else:
                x = layer(x, mask, cache=None if cache is None else cache.layers[i])
        if cache is not None:
            cache.advance(stands)
        return self.norm(x)

    @property
    def layers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def _check_positions(self, positions: Tensor, x: Tensor) -> Tensor:
        shape = tuple(x.shape[:2]) if positions.ndim == 2 else (x.shape[1],)
        return check_ids(positions, shape, self.positions.max_len or 2**31, "positions", "max_len")

    def _place(
        self, x: Tensor, mask: Padding, cache: AnyCache | None, *, given: bool
    ) -> tuple[Int[Tensor, "*B T"], Mask]:
        """Where each token stands (padding counts for nothing), and what it may look at. Positions that are given may start
        anew, so that a row may be longer than any position."""
        B, T = x.shape[:2]
        if isinstance(mask, Tensor):
            check_padding(mask, (B, T), whole=cache is None)
        if cache is None:
            told = padding(mask) if isinstance(mask, Tensor) else check_mask(mask)
            told.check(B, T, T)
            if not given:
                check_length(T, self.positions)
            stands = torch.arange(T, device=x.device) if told.keys is None else told.keys
            return stands, told & Mask(causal=self.causal, window=self.config.window)
        if isinstance(mask, Mask):
            raise InputError(
                "with a cache, mask is a boolean tensor (True = a real token); got a Mask; pass the padding alone"
            )
        cache.check(B, T)
        check_length(cache.length + T, self.positions)
        stands, where = cache.place(T, mask)
        return stands, replace(where, causal=self.causal, window=self.config.window)


def check_padding(real: Tensor, shape: tuple[int, int], *, whole: bool = True) -> None:
    """Refuse a padding mask of the wrong type or shape, and one that looks inverted: a whole row without a real token."""
    check_real(real, shape)
    if whole and real.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(real.any(1).all()):
        row = int((~real.any(1)).nonzero()[0])
        raise InputError(
            f"row {row} of the mask holds no real token; True = a real token, False = padding; "
            f"if yours says True for padding, pass mask=~mask"
        )


def make_attention(config: Config, place: str, *, cross: bool = False) -> MultiHeadAttention:
    kept = config.kept_heads(place)
    return MultiHeadAttention(
        d_model=config.d_model,
        n_heads=len(kept),
        n_kv_heads=len(kept) * config.n_kv_heads // config.n_heads,
        d_head=config.d_head,
        bias=config.attention_bias,
        cross=cross,
        qk_norm=config.qk_norm,
        scale=config.attention_scale or None,
        dropout=config.attention_dropout,
        kernel=config.kernel,
        kept=kept if len(kept) < config.n_heads else (),
    )


def make_positions(config: Config, *, max_len: int, causal: bool) -> Positions:
    match config.positions:
        case "sinusoidal":
            return Sinusoidal(d_model=config.d_model, halves=config.sinusoid_halves)
        case "learned":
            return Learned(d_model=config.d_model, max_len=max_len)
        case "rotary":
            return Rotary(
                d_head=config.d_head,
                base=config.rotary_base,
                interleaved=config.rotary_interleaved,
                scaling=config.rotary_scaling,
                factor=config.rotary_factor,
                low=config.rotary_low,
                high=config.rotary_high,
                original_len=config.rotary_original_len,
                precision=config.rotary_precision,
            )
        case "alibi":
            return Alibi(n_heads=config.n_heads)
        case "t5":
            return RelativeBuckets(
                n_heads=config.n_heads,
                n_buckets=config.t5_buckets,
                max_distance=config.t5_max_distance,
                both_ways=not causal,
            )
        case "none":
            return Positions()
