"""A stack made ready for native.cpp, which takes one token a row through all of it in one call.

It is given addresses. They are collected once for each stack, together with the places they were found in: where anything was
put in the place of a weight or a layer since, they are collected anew. Nothing of it is kept in the model, which may be copied and
saved.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clearhead.engine.kv_cache import PagedCache, Pool
from clearhead.kernels import native
from clearhead.layers.attention import Attend, MultiHeadAttention
from clearhead.layers.block import Block
from clearhead.layers.feedforward import ACTIVATIONS, FeedForward
from clearhead.layers.linear import CPU_ROWS, FusedLinear, Linear, Packed
from clearhead.layers.masks import Mask
from clearhead.layers.norm import LayerNorm, RMSNorm
from clearhead.quantization.integer import Int4, Int8

Turns = tuple[Float[Tensor, "B e"], Float[Tensor, "B e"]]  # cosines and sines
# What native.cpp computes; whatever else stands in a stack is run by itself.
KNOWN = (
    Block,
    MultiHeadAttention,
    Attend,
    FeedForward,
    Linear,
    FusedLinear,
    nn.LayerNorm,
    LayerNorm,
    RMSNorm,
    nn.Identity,
    Int8,
    Int4,
)


def fits(blocks: Sequence[Block], last: nn.Module, x: Tensor, mask: Mask, cache: PagedCache) -> bool:
    """Whether the stack, this many rows and this kind of memory are what native.cpp knows."""
    memory = cache.pool.memory
    if (
        not x.dtype == memory.dtype == torch.float32
        or not x.device == memory.device == torch.device("cpu")
        or (cache.source is None) != (blocks[0].cross is None)
        or not (mask.keys is None and cache.live is None and not cache.reads)
        or not native.is_there()
    ):
        return False
    stack = _STACKS.get(blocks[0])
    if stack is None or not stack.is_as_it_was(blocks, last):
        stack = _STACKS[blocks[0]] = Prepared(blocks, last)
    return not blocks[0].training and stack.fits(memory, len(x))


def run(
    blocks: Sequence[Block], x: Float[Tensor, "B 1 D"], turns: Turns | None, cache: PagedCache, window: int
) -> Float[Tensor, "B 1 D"]:
    """What `fits`, from embeddings to final states."""
    return _STACKS[blocks[0]].run(x, turns, cache, window)


class Places:
    """Where the numbers of some modules lie, and the places they were found in."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        places = [(held, name) for module in modules for held in _contents(module) for name in held]
        self.held, self.names = [held for held, _ in places], [name for _, name in places]
        self.things = [held[name] for held, name in places]
        self.tensors = [thing for thing in self.things if isinstance(thing, Tensor)]
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        self.hooks: list[Any] = [
            hooks
            for module in modules
            for hooks in (module._forward_hooks, module._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
        ]
        self.n_hooks, self.watched = -1, False

    def are_as_they_were(self) -> bool:
        return all(map(is_, map(dict[str, Any].get, self.held, self.names), self.things)) and self.addresses == list(
            map(Tensor.data_ptr, self.tensors)
        )

    def are_watched(self) -> bool:
        """Whether somebody hooked into one of them; asked of each only where a hook was made anywhere since."""
        if self.n_hooks != RemovableHandle.next_id:
            self.watched = any(map(len, self.hooks))
            self.n_hooks = -1 if self.watched else RemovableHandle.next_id
        return self.watched


class Prepared:
    def __init__(self, blocks: Sequence[Block], last: nn.Module) -> None:
        modules = [module for top in (*blocks, last) for module in top.modules()]
        self.places = Places(modules)
        # The first block is what this is found by, and must not be held by it; a stack of other blocks has another memory.
        self.ids = [id(top) for top in (*blocks, last)]
        self.is_known = (
            all(type(module) in KNOWN for module in modules)
            and all(isinstance(norm, nn.LayerNorm | RMSNorm) for block in blocks for norm in _norms(block))
            and all(is_plain(module) for module in modules)
            and len({_form(block) for block in blocks}) == 1
        )
        if self.is_known:
            packed = all(isinstance(weight, Int8 | Int4) for block in blocks for weight in _weights(block))
            self.max_rows = 2**31 if packed else CPU_ROWS
            self.partial: list[tuple[FusedLinear, Tensor]] = []
            self.layers = (native.Layer * len(blocks))(*map(self._layer, blocks))
            self.step = self._step(blocks, last)
            self.room = self.step.n_layers, self.step.kv_heads, self.step.width

    def is_as_it_was(self, blocks: Sequence[Block], last: nn.Module) -> bool:
        return self.ids == [id(top) for top in (*blocks, last)] and self.places.are_as_they_were()

    def fits(self, memory: Tensor, n_rows: int) -> bool:
        """Whether so many rows, with keys and values in this memory, can go this way now."""
        return (
            self.is_known
            and (memory.shape[1], memory.shape[3], memory.shape[5]) == self.room
            and n_rows <= self.max_rows
            and not self.places.are_watched()
        )

    def run(
        self, x: Float[Tensor, "B 1 D"], turns: Turns | None, cache: PagedCache, window: int
    ) -> Float[Tensor, "B 1 D"]:
        step = self.step
        states = x.clone(memory_format=torch.contiguous_format)
        # Named, so that they live until the call is over.
        angles = [] if turns is None else [turn.expand(len(x), -1).contiguous() for turn in turns]
        table, counts = cache.table.int().contiguous(), cache.counts.int().contiguous()
        step.x, step.window, step.n_turns = states.data_ptr(), window, 0
        if angles:
            step.n_turns, step.cos, step.sin = angles[0].shape[1], angles[0].data_ptr(), angles[1].data_ptr()
        step.pages = native.Blocks(table.data_ptr(), counts.data_ptr(), table.shape[1])
        if cache.source is not None:
            table_, counts_ = cache.source.table.int().contiguous(), cache.source.counts.int().contiguous()
            step.source = native.Blocks(table_.data_ptr(), counts_.data_ptr(), table_.shape[1])
        self.take(len(x), cache.pool)
        return states

    def take(self, n_rows: int, pool: Pool) -> None:
        """The step that was filled in, for so many rows."""
        for fused, bias in self.partial:
            whole = fused.whole_bias()
            assert whole is not None
            bias.copy_(whole)
        step, memory = self.step, pool.memory
        step.rows, step.pool, step.block, step.threads = n_rows, memory.data_ptr(), pool.block, torch.get_num_threads()
        step.block_stride, step.layer_stride, step.value_stride, step.head_stride = memory.stride()[:4]
        native.one_token(step)

    def _step(self, blocks: Sequence[Block], last: nn.Module) -> native.Step:
        first = blocks[0]
        attention, feedforward = first.attention, first.feedforward
        parts = list(attention.qkv.parts.values())
        return native.Step(
            layers=ctypes.addressof(self.layers),
            last=norm(last),
            n_layers=len(blocks),
            d=attention.qkv.weight.shape[1],
            heads=parts[0] // attention.d_head,
            kv_heads=parts[1] // attention.d_head,
            width=attention.d_head,
            has_cross=first.cross is not None,
            norm_first=first.norm_first,
            is_gated=feedforward.gated,
            activation=list(ACTIVATIONS).index(feedforward.activation),
        )

    def _layer(self, block: Block) -> native.Layer:
        feedforward = block.feedforward
        layer = native.Layer(
            up=self._matrix(feedforward.gate_up if feedforward.gated else feedforward.up),
            down=self._matrix(feedforward.down),
            norms=(native.Norm * 3)(*map(norm, _norms(block))),
        )
        layer.self = self._attention(block.attention)
        if block.cross is not None:
            layer.cross = self._attention(block.cross)
        return layer

    def _attention(self, attention: MultiHeadAttention) -> native.Attention:
        scale = 1 / math.sqrt(attention.d_head) if attention.heads.scale is None else attention.heads.scale
        to = native.Attention(
            out=self._matrix(attention.o_proj),
            q_norm=norm(attention.q_norm),
            k_norm=norm(attention.k_norm),
            scale=scale,
        )
        setattr(to, "in", self._matrix(attention.q_proj if attention.cross else attention.qkv))
        return to

    def _matrix(self, linear: Linear | FusedLinear) -> native.Matrix:
        weight, bias = linear.weight, linear.bias
        if isinstance(linear, FusedLinear) and 0 < len(linear.biased) < len(linear.parts):
            bias = torch.zeros(weight.shape[0])
            self.partial.append((linear, bias))
        return matrix(weight, bias)


# Found by the first block.
_STACKS: WeakKeyDictionary[Block, Prepared] = WeakKeyDictionary()


def _contents(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules  # pyright: ignore[reportPrivateUsage]


def _norms(block: Block) -> list[nn.Module]:
    """In the order of the sublayers."""
    return [norm for norm in (block.attention_norm, block.cross_norm, block.feedforward_norm) if norm is not None]


def _weights(block: Block) -> list[Any]:
    return [module.weight for module in block.modules() if isinstance(module, Linear | FusedLinear)]


def _form(block: Block) -> tuple[object, ...]:
    """What native.cpp takes to be alike in all blocks."""
    feedforward, shapes = block.feedforward, [tuple(weight.shape) for weight in _weights(block)]
    return block.norm_first, block.attention.d_head, feedforward.activation, feedforward.gated, *shapes


def matrix(weight: Tensor | Packed, bias: Tensor | None) -> native.Matrix:
    (n, d), bias_at = weight.shape, None if bias is None else bias.data_ptr()
    if isinstance(weight, Int8 | Int4):
        held = [getattr(weight, name).data_ptr() for name in weight.tensors]
        return native.Matrix(*held, *[None] * (3 - len(held)), bias_at, n, d, weight.bits)
    assert isinstance(weight, Tensor)
    return native.Matrix(weight.data_ptr(), None, None, bias_at, n, d, 32)


def is_plain(module: nn.Module) -> bool:
    """Whether its numbers lie in the CPU's memory, one after the other, and compute in float32."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    packed = isinstance(module, Int8 | Int4)
    fits = not packed or (module.dtype == torch.float32 and module.is_tiled == native.has_tiles())
    return fits and all(
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and (packed or tensor.dtype == torch.float32)
        for tensor in tensors
    )


def norm(module: nn.Module) -> native.Norm:
    if not isinstance(module, nn.LayerNorm | RMSNorm):
        return native.Norm()
    is_rms = isinstance(module, RMSNorm)
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    bias: Tensor | None = None if is_rms else module.bias
    return native.Norm(module.weight.data_ptr(), None if bias is None else bias.data_ptr(), eps, is_rms)
