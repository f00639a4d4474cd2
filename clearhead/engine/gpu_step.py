"""One token a row through a stack, by kernels that do many small steps at once.

A step of decoding is hundreds of operations on a few numbers each. This is `Block.forward` for every block. On a GPU it is
written with the kernels of layers/gpu/: each sublayer's sum with the residual stream and the norm after it are one, and so are
turning queries and keys and putting them in their blocks.

Prompts that are read in one packed row on a GPU go the same way: but for attention, their tokens too are rows of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.engine.kv_cache import AnyCache, PagedCache, PagedLayer
from clearhead.layers.attend import attend
from clearhead.layers.attention import MultiHeadAttention
from clearhead.layers.block import Block
from clearhead.layers.feedforward import ACTIVATIONS, FeedForward
from clearhead.layers.linear import Packed, has_triton, is_bare, linear, recording
from clearhead.layers.masks import Mask, Pages
from clearhead.layers.norm import RMSNorm
from clearhead.layers.positions import Angles, Bias


def fits(blocks: Sequence[Block], last: nn.Module, x: Tensor, mask: Mask, bias: Bias | None, cache: AnyCache) -> bool:
    """Whether this step can go this way: one token a row, keys in blocks, and nobody who looks on."""
    if not (
        isinstance(cache, PagedCache)
        and ((x.shape[1] == 1 and mask.pages is not None) or (cache.packed is not None and blocks[0].cross is None))
        and bias is None
        and mask.dense is None
        and not torch.is_grad_enabled()
        and is_bare(x)
    ):
        return False
    return (
        x.is_cuda
        and has_triton()
        and all(isinstance(norm, RMSNorm | nn.LayerNorm) for block in blocks for norm in _norms(block))
        and not any(watched for block in blocks for watched in _watched(block))
    )


def run(
    blocks: Sequence[Block],
    last: nn.Module,
    x: Float[Tensor, "B T D"],
    mask: Mask,
    angles: Angles | None,
    cache: PagedCache,
) -> Float[Tensor, "B T D"]:
    """From embeddings to final states; `last` is the norm after the last block, if blocks norm first."""
    norm_first = blocks[0].norm_first
    turns = None if angles is None else (angles[0].flatten(0, 2), angles[1].flatten(0, 2))
    norms = [norm for block in blocks for norm in _norms(block)]
    after = [*norms[1:], last] if norm_first else norms
    stream = x.flatten(0, 1).contiguous()
    y = norms[0](stream) if norm_first else stream
    at = 0
    for block, layer in zip(blocks, cache.layers, strict=True):
        stream, y = _add(_attend(block.attention, y, layer, mask, turns), stream, after[at], norm_first)
        at += 1
        if block.cross is not None:
            assert cache.source is not None
            stream, y = _add(_look(block.cross, y, layer, cache.source), stream, after[at], norm_first)
            at += 1
        stream, y = _add(_think(block.feedforward, y), stream, after[at], norm_first)
        at += 1
    return y.view(x.shape)


def _add(out: Tensor, stream: Tensor, norm: nn.Module, norm_first: bool) -> tuple[Tensor, Tensor]:
    """What a sublayer says joins the stream; the stream, and what the next sublayer hears."""
    from clearhead.kernels.gpu import add_norm

    assert isinstance(norm, RMSNorm | nn.LayerNorm)
    is_rms = isinstance(norm, RMSNorm)
    eps = norm.eps if norm.eps is not None else torch.finfo(out.dtype).eps
    total, normed = add_norm(out, stream, norm.weight, None if is_rms else norm.bias, eps, "rms" if is_rms else "layer")
    return (total if norm_first else normed), normed


def _attend(
    attention: MultiHeadAttention,
    y: Float[Tensor, "R D"],
    layer: PagedLayer,
    mask: Mask,
    turns: tuple[Tensor, Tensor] | None,
) -> Float[Tensor, "R D"]:
    from clearhead.kernels.gpu import paged_attention, rotate, rotate_store, store

    q, k, v = (part.unflatten(-1, (-1, attention.d_head)) for part in attention.qkv(y))
    q, k = attention.q_norm(q), attention.k_norm(k)
    call, pages = layer.call, mask.pages
    where = (layer.k, layer.v, call.table, call.counts)
    if pages is None:
        if turns is not None:
            q, k = rotate(q, *turns), rotate(k, *turns)
        store(k, v, *where)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        out = attend(q, k, v, mask, scale=attention.heads.scale)
        return attention.o_proj(out[0].transpose(0, 1).flatten(1))
    if turns is None:
        store(k, v, *where)
    else:
        q = rotate_store(q, k, v, *turns, *where)
    told = (pages.table, pages.counts, _scale(attention), mask.window)
    out = paged_attention(q, layer.k, layer.v, *told, each=pages.block == 1)
    return attention.o_proj(out.flatten(1))


def _look(
    attention: MultiHeadAttention, y: Float[Tensor, "B D"], layer: PagedLayer, source: Pages
) -> Float[Tensor, "B D"]:
    from clearhead.kernels.gpu import paged_attention

    q = attention.q_norm(attention.q_proj(y).unflatten(-1, (-1, attention.d_head)))
    out = paged_attention(q, layer.k, layer.v, source.table, source.counts, _scale(attention), 0)
    return attention.o_proj(out.flatten(1))


def _think(feedforward: FeedForward, y: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
    from clearhead.kernels.gpu import gated

    if feedforward.gated:
        both = feedforward.gate_up
        return feedforward.down(gated(linear(y, both.weight, both.whole_bias()), feedforward.activation))
    return feedforward.down(_activated(feedforward.up, y, feedforward.activation))


def _activated(layer: nn.Linear, y: Float[Tensor, "R D"], activation: str) -> Float[Tensor, "R F"]:
    """f(layer(y)); of a few rows, in a step that is recorded, by one kernel."""
    from clearhead.kernels import gpu

    weight: Tensor | Packed = layer.weight
    if (
        recording.is_on
        and not isinstance(weight, Packed)
        and (y.dtype, weight.is_contiguous()) == (weight.dtype, True)
        and gpu.linear_plan(len(y), weight.shape[0], weight.shape[1], weight.dtype) is not None
    ):
        return gpu.linear(y, weight, layer.bias, activation=activation)
    return ACTIVATIONS[activation](layer(y))


def _scale(attention: MultiHeadAttention) -> float:
    return 1 / math.sqrt(attention.d_head) if attention.heads.scale is None else attention.heads.scale


def _norms(block: Block) -> list[nn.Module]:
    """In the order of the sublayers."""
    return [norm for norm in (block.attention_norm, block.cross_norm, block.feedforward_norm) if norm is not None]


def _watched(block: Block) -> list[bool]:
    """Whether somebody hooked into the places that this way does not pass."""
    inner = [block, block.attention, block.attention.heads, block.feedforward, block.feedforward.down]
    inner += [] if block.cross is None else [block.cross, block.cross.heads]
    return [bool(module._forward_hooks or module._forward_pre_hooks) for module in inner]  # pyright: ignore[reportPrivateUsage]
