"""From a config to the parts of a model: blocks, attentions, positions, the head."""

from __future__ import annotations

from functools import partial

from torch import nn

from clearhead.config import Config
from clearhead.layers.attention import MultiHeadAttention
from clearhead.layers.block import Block, FeedForward
from clearhead.layers.embedding import TokenHead
from clearhead.layers.linear import make_norm
from clearhead.layers.positions import Learned, Positions, Rotary, Sinusoidal
from clearhead.layers.relative_positions import Alibi, RelativeBuckets


def norm_of(config: Config) -> nn.Module:
    return make_norm(config.norm, config.d_model, eps=config.norm_eps, bias=config.bias)


def make_block(config: Config, stack: str, layer: int, *, cross: bool) -> Block:
    """Block `layer` of a stack; `stack` is the prefix of its names ("", "encoder." or "decoder.")."""
    place = f"{stack}blocks.{layer}"
    return Block(
        attention=make_attention(config, f"{place}.attention"),
        cross=make_attention(config, f"{place}.cross", cross=True) if cross else None,
        feedforward=FeedForward(
            d_model=config.d_model,
            d_ff=config.d_ff,
            activation=config.feedforward,
            gated=config.gated,
            bias=config.bias,
        ),
        norm=partial(norm_of, config),
        norm_first=config.norm_first,
        dropout=config.dropout,
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
        norm_eps=config.norm_eps,
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


def make_head(config: Config) -> TokenHead:
    transform = None
    if config.head_transform:
        transform = config.feedforward, norm_of(config)
    return TokenHead(
        d_model=config.d_model,
        vocab_size=config.vocab_size,
        tied=config.tie_embeddings,
        bias=config.head_bias,
        transform=transform,
        scale=config.d_model**-0.5 if config.head_scale else 1.0,
    )
