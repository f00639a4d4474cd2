"""The decode step on a GPU: one token a row through a stack, by Triton kernels that each do several small operations.

A step of decoding is hundreds of operations on a few numbers each. This computes what `Stack.run` does. A sublayer's sum with the
residual stream and the norm after it are one kernel, and so are rotating queries and keys and storing them in their blocks.

Prompts that are read in one packed row go the same way: except in attention, each of their tokens is a row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead import kernels
from clearhead.engine.kv_cache import BlockTable, PagedCache, PagedLayer
from clearhead.layers.attention import Attend, MultiHeadAttention, attend
from clearhead.layers.block import Block, FeedForward
from clearhead.layers.linear import RMSNorm, activated, linear
from clearhead.layers.masks import Mask
from clearhead.models import Decoder, EncoderDecoder
from clearhead.models.stack import Stack
from clearhead.quantization.float8 import Float8FeedForward

# The modules whose forward is written out here; any other runs by the plain forward.
KNOWN = (Block, MultiHeadAttention, Attend, FeedForward, Float8FeedForward)

Turns = tuple[Float[Tensor, "R e"], Float[Tensor, "R e"]]  # cosines and sines of the rotary angles


def run_model(
    model: Decoder | EncoderDecoder, tokens: Int[Tensor, "B T"], cache: PagedCache
) -> Float[Tensor, "B T D"] | None:
    """From tokens to final states; None: not done, call `model.states`."""
    if not tokens.is_cuda or "states" in vars(model):  # a replaced method wants to be called
        return None
    return run(model if isinstance(model, Decoder) else model.decoder, model.tokens(tokens), cache)


def run(stack: Stack, x: Float[Tensor, "B T D"], cache: PagedCache) -> Float[Tensor, "B T D"] | None:
    """From embeddings to final states. None: not done, call `Stack.run`."""
    gpu: Any = kernels.gpu_kernels() if x.is_cuda else None
    if gpu is None or not fits(stack, x, cache, gpu):
        return None
    at = cache.counts[:, None] if cache.packed is None else cache.counts[None]
    angles = stack.positions.angles(at)
    turns = None if angles is None else (angles[0].flatten(0, 2), angles[1].flatten(0, 2))
    return GpuStep(stack, cache, turns, gpu).run(stack.enter(x, at))


def fits(stack: Stack, x: Tensor, cache: PagedCache, gpu: Any) -> bool:
    """Whether the kernels compute this stack: one token a row or packed prompts, no score bias, no hooks, known modules."""
    blocks = stack.layers
    one = x.shape[1] == 1 and cache.packed is None and not cache.fresh and not cache.reads
    return (
        (one or (cache.packed is not None and blocks[0].cross is None))
        and stack.positions.bias is None
        and not stack.config.sparsity
        and stack.config.kernel in ("auto", "fused")
        and not stack.training
        and not torch.is_grad_enabled()
        and kernels.is_plain(x)
        and all(isinstance(norm, RMSNorm | nn.LayerNorm) for block in blocks for norm in norms_of(block))
        and len({block.norm_first for block in blocks}) == 1
        and all(gpu.knows(block.feedforward.activation) for block in blocks)
        and all(_is_plain(module) for block in blocks for module in _written_out(block))
    )


class GpuStep:
    """One call: the kernels, the cache, and the angles of each row."""

    def __init__(self, stack: Stack, cache: PagedCache, turns: Turns | None, gpu: Any) -> None:
        self.stack, self.cache, self.turns, self.gpu = stack, cache, turns, gpu
        self.held = cache.append(1) if cache.packed is None else None
        self.window, self.norm_first = stack.config.window, stack.layers[0].norm_first

    def run(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        blocks, norm_first = self.stack.layers, self.norm_first
        norms = [norm for block in blocks for norm in norms_of(block)]
        after = iter([*norms[1:], self.stack.norm] if norm_first else norms)
        stream = x.flatten(0, 1).contiguous()
        y = norms[0](stream) if norm_first else stream
        for block, layer in zip(blocks, self.cache.layers, strict=True):
            stream, y = self.add(self.self_attention(block.attention, y, layer), stream, next(after))
            if block.cross is not None:
                stream, y = self.add(self.cross_attention(block.cross, y, layer), stream, next(after))
            stream, y = self.add(self.feed_forward(block.feedforward, y), stream, next(after))
        return y.view(x.shape)

    def add(self, out: Tensor, stream: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """Add a sublayer's result to the stream; the stream, and the input of the next sublayer."""
        assert isinstance(norm, RMSNorm | nn.LayerNorm)
        is_rms = isinstance(norm, RMSNorm)
        eps = norm.eps if norm.eps is not None else torch.finfo(out.dtype).eps
        bias = None if is_rms else norm.bias
        total, normed = self.gpu.add_norm(out, stream, norm.weight, bias, eps, "rms" if is_rms else "layer")
        return (total if self.norm_first else normed), normed

    def self_attention(
        self, attention: MultiHeadAttention, y: Float[Tensor, "R D"], layer: PagedLayer
    ) -> Float[Tensor, "R D"]:
        q, k, v = (part.unflatten(-1, (-1, attention.d_head)) for part in attention.qkv(y))
        q, k = attention.q_norm(q), attention.k_norm(k)
        where = (*layer.heads(k.shape[1]), self.cache.table, self.cache.counts)
        if self.held is None:
            return attention.o_proj(self.packed_attention(attention, q, k, v, where))
        if self.turns is None:
            self.gpu.store(k, v, *where)
        else:
            q = self.gpu.rotate_store(q, k, v, *self.turns, *where)
        return attention.o_proj(self.paged_attention(attention, q, where[:2], self.held, self.window))

    def packed_attention(
        self, attention: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, where: tuple[Tensor, ...]
    ) -> Float[Tensor, "R _"]:
        """Each prompt's tokens over its own."""
        if self.turns is not None:
            q, k = self.gpu.rotate(q, *self.turns), self.gpu.rotate(k, *self.turns)
        self.gpu.store(k, v, *where)
        assert isinstance(self.cache.packed, Mask)
        mask = replace(self.cache.packed, causal=self.stack.causal, window=self.window)
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        return attend(q, k, v, mask, scale=attention.heads.scale)[0].transpose(0, 1).flatten(1)

    def cross_attention(
        self, attention: MultiHeadAttention, y: Float[Tensor, "R D"], layer: PagedLayer
    ) -> Float[Tensor, "R D"]:
        assert self.cache.source is not None
        q = attention.q_norm(attention.q_proj(y).unflatten(-1, (-1, attention.d_head)))
        pool = layer.heads(attention.n_kv_heads)
        return attention.o_proj(self.paged_attention(attention, q, pool, self.cache.source, 0))

    def paged_attention(
        self, attention: MultiHeadAttention, q: Tensor, pool: Sequence[Tensor], held: BlockTable, window: int
    ) -> Float[Tensor, "R _"]:
        scale = 1 / math.sqrt(attention.d_head) if attention.heads.scale is None else attention.heads.scale
        each = held.block == 1
        return self.gpu.paged_attention(q, *pool, held.table, held.counts, scale, window, each=each).flatten(1)

    def feed_forward(self, feedforward: FeedForward, y: Float[Tensor, "R D"]) -> Float[Tensor, "R D"]:
        if not feedforward.gated:
            return feedforward.down(activated(feedforward.up, y, feedforward.activation))
        both = feedforward.gate_up
        return feedforward.down(self.gpu.gated(linear(y, both.weight, both.whole_bias()), feedforward.activation))


def norms_of(block: Block) -> list[nn.Module]:
    """In the order of the sublayers."""
    return [norm for norm in (block.attention_norm, block.cross_norm, block.feedforward_norm) if norm is not None]


def _written_out(block: Block) -> list[nn.Module]:
    """The modules whose forward is not called here."""
    inner: list[nn.Module] = [block, block.attention, block.attention.heads, block.feedforward]
    return inner + ([] if block.cross is None else [block.cross, block.cross.heads])


def _is_plain(module: nn.Module) -> bool:
    """Whether the module is one of ours, unchanged, and no hook waits for its forward."""
    return type(module) in KNOWN and "forward" not in vars(module) and not kernels.is_watched(module)
