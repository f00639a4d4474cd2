"""The decode step on a CPU: from each row's last token to the logits of its next one, in one call of native.cpp.

A token of a small model takes a few hundred microseconds, and each torch operator several: one call for the whole step avoids
them. It is used for models whose every part native.cpp computes; for all others `NativeStep.run` returns None, and the engine
calls the model. Weights are passed as addresses, which are collected once a model, and again after anything has changed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead import kernels
from clearhead.engine.gpu_step import norms_of
from clearhead.engine.kept_blocks import KeptBlocks
from clearhead.engine.kv_cache import Pool
from clearhead.engine.native_support import is_supported
from clearhead.kernels import decode_step, huge_pages, native
from clearhead.kernels.decode_step import DecodeModel, DecodeStep, PositionTables, Table
from clearhead.kernels.snapshot import Snapshot
from clearhead.layers.attention import MultiHeadAttention
from clearhead.layers.block import Block
from clearhead.layers.linear import FusedLinear, Linear, RMSNorm
from clearhead.layers.positions import Learned, Positions, Rotary, Sinusoidal
from clearhead.models.decoder import Decoder
from clearhead.models.encoder_decoder import EncoderDecoder
from clearhead.models.stack import Stack
from clearhead.quantization.integer import Int4, Int8

METHODS = {"forward", "states", "project", "run"}  # of models; one that an instance replaces must be called

# Large models move to large memory pages, if no cache holds their weights: after the first steps, a part at each step.
LARGE_MODEL, FIRST_STEPS, MOVING_STEPS = 2**26, 8, 100


class NativeStep:
    """The decode steps of one caller with one model. Several callers, each in its own thread, may use one model."""

    def __init__(self, model: Decoder | EncoderDecoder) -> None:
        self.model = model
        self.assumes_unchanged = False
        self.prepared: PreparedModel | None = None
        self.step: DecodeStep | None = None  # with the prepared model
        self.kept: KeptBlocks | None = None  # of a sparse model

    @contextmanager
    def assume_unchanged(self) -> Generator[None]:
        """Inside, only the first step checks whether the model has changed (5% of a step); hooks are always noticed."""
        self.assumes_unchanged, self.prepared = True, None
        try:
            yield
        finally:
            self.assumes_unchanged, self.prepared = False, None

    def run(
        self,
        tokens: Int[Tensor, " n"],
        pool: Pool,
        own: Table,
        source: Table,
        stores_first: bool = False,
        reuse: bool = False,
    ) -> Float[Tensor, "n V"] | None:
        """The logits after these tokens; each row's most likely next token takes the place of its token.

        None: nothing was done, and the model must be called. The tables may have more rows than there are tokens. A decoder
        has no source. `stores_first`: rows may be successive tokens of one text. `reuse`: the last logits may be overwritten.
        """
        if self.prepared is None or not self.assumes_unchanged:
            self._prepare(tokens, pool)
        if self.prepared is None or self.step is None or not self.prepared.takes(pool.memory, len(tokens)):
            return None
        tables = self.prepared.position_tables(int(own.counts[: len(tokens)].max()) + 1)
        if tables is None:
            return None
        kept = self._kept_table(len(tokens), pool.block, own)
        self.prepared.before_step()
        return self.step.run(tokens, pool.memory, own, source, tables, kept, stores_first, reuse)

    def _kept_table(self, n: int, block: int, own: Table) -> Table | None:
        """What the first n rows read, if the model's pattern forbids some of it."""
        patterns = () if self.prepared is None else self.prepared.patterns
        if not patterns:
            return None
        if self.kept is None or (self.kept.pattern, self.kept.block) != (patterns[0], block):
            self.kept = KeptBlocks(patterns[0], block)
        return self.kept.table(Table(own.blocks[:n], own.counts[:n]))

    def _prepare(self, tokens: Tensor, pool: Pool) -> None:
        """Set `prepared` to the model as it is now, or to None if its step is not native.cpp's."""
        model, last, self.prepared = self.model, self.prepared, None
        stack = stack_of(model)
        if (
            torch.is_grad_enabled()
            or model.training
            or stack.training
            or not native.is_there()
            or not kernels.is_plain(tokens)
        ):
            return
        if pool.memory.device.type != "cpu" or pool.memory.dtype != torch.float32:
            return
        if not (METHODS.isdisjoint(vars(model)) and METHODS.isdisjoint(vars(stack))):
            return
        prepared = _PREPARED.get(model)
        if prepared is None or not prepared.is_current(model):
            prepared = _PREPARED[model] = PreparedModel(model)
        self.prepared = prepared
        if prepared is not last or self.step is None:
            self.step = None if prepared.weights is None else DecodeStep(prepared.weights)


class PreparedModel:
    """The addresses of a model's weights and whatever else a step needs that stays the same. It does not hold the model.

    Several threads may use it: what they change is the same for all (tables of positions, biases), or locked.
    """

    def __init__(self, model: Decoder | EncoderDecoder) -> None:
        stack = stack_of(model)
        called: list[nn.Module] = [*stack.layers, stack.norm, model.tokens, model.head]
        called += [stack.positions, stack.embedding_norm]
        modules = [module for top in called for module in top.modules()]
        self.config, self.patterns = model.config, model.config.patterns
        self.snapshot = Snapshot(modules, [model, stack, stack.blocks])
        self.padded_biases: list[tuple[FusedLinear, Tensor]] = []
        self.weights: DecodeModel | None = None  # None: native.cpp does not compute this model
        if not is_supported(model, stack, modules, self.snapshot):
            return
        self.positions, self.tables = stack.positions, PositionTables(0)
        self.d_head, self.n_layers = stack.layers[0].attention.d_head, len(stack.layers)
        attentions = [each for block in stack.layers for each in (block.attention, block.cross) if each is not None]
        self.n_kv_heads = max(attention.n_kv_heads for attention in attentions)
        packed = all(isinstance(each.weight, Int8 | Int4) for each in modules if isinstance(each, Linear | FusedLinear))
        self.max_rows = 2**31 if packed else kernels.CPU_ROWS  # above, torch multiplies float32 faster
        self.weights = self._weights(model, stack)
        self.n_steps, self.moving = 0, threading.Lock()
        total = sum(tensor.nbytes for tensor in self.snapshot.tensors)
        self.mover = huge_pages.move(self.snapshot.tensors) if total >= LARGE_MODEL else None
        self.pieces_a_step = -(-total // (huge_pages.PIECE * MOVING_STEPS))

    def is_current(self, model: Decoder | EncoderDecoder) -> bool:
        return model.config is self.config and self.snapshot.is_current()

    def takes(self, memory: Tensor, n_rows: int) -> bool:
        """Whether a step of so many rows, with keys and values in this memory, can be native.cpp's."""
        return (
            self.weights is not None
            and (memory.shape[1], memory.shape[5]) == (self.n_layers, self.d_head)
            and memory.shape[3] >= self.n_kv_heads
            and n_rows <= self.max_rows
            and all(pattern.block % memory.shape[4] == 0 for pattern in self.patterns)
            and not self.snapshot.is_hooked()
        )

    def before_step(self) -> None:
        for fused, bias in self.padded_biases:
            bias.copy_(cast(Tensor, fused.whole_bias()))
        self.n_steps += 1
        if self.mover is not None and self.n_steps > FIRST_STEPS and self.moving.acquire(blocking=False):
            try:
                self._move_pages()
            finally:
                self.moving.release()

    def _move_pages(self) -> None:
        """The next part. Called by one thread at a time."""
        if self.mover is not None and len([*islice(self.mover, self.pieces_a_step)]) < self.pieces_a_step:
            self.mover = None  # all is done

    def position_tables(self, n: int) -> PositionTables | None:
        """Tables of at least the first n positions. None: the model has fewer."""
        tables = self.tables
        if n > tables.n:
            tables = self.tables = _position_tables(self.positions, 1 << n.bit_length())
        return tables if n <= tables.n else None

    def _weights(self, model: Decoder | EncoderDecoder, stack: Stack) -> DecodeModel:
        first = stack.layers[0]
        embedding: Any = model.tokens.weight
        return DecodeModel(
            [self._layer(block) for block in stack.layers],
            activation=first.feedforward.activation,
            embedding=_matrix(embedding, None),
            head=_matrix(embedding if model.head.weight is None else model.head.weight, model.head.bias),
            embedding_norm=_norm(stack.embedding_norm),
            final_norm=_norm(stack.norm),
            d_model=embedding.shape[1],
            d_head=first.attention.d_head,
            window=model.config.window,
            has_cross=first.cross is not None,
            norm_first=first.norm_first,
            is_gated=first.feedforward.gated,
            embedding_scale=model.tokens.factor,
            head_scale=model.head.scale,
        )

    def _layer(self, block: Block) -> decode_step.Layer:
        feedforward, layer = block.feedforward, decode_step.Layer()
        layer.self = self._attention(block.attention)
        if block.cross is not None:
            layer.cross = self._attention(block.cross)
        layer.up = self._linear(feedforward.gate_up if feedforward.gated else feedforward.up)
        layer.down = self._linear(feedforward.down)
        for i, norm in enumerate(norms_of(block)):
            layer.norms[i] = _norm(norm)
        return layer

    def _attention(self, attention: MultiHeadAttention) -> decode_step.Attention:
        scale = attention.heads.scale
        return decode_step.Attention(
            qkv=self._linear(attention.q_proj if attention.cross else attention.qkv),
            out=self._linear(attention.o_proj),
            q_norm=_norm(attention.q_norm),
            k_norm=_norm(attention.k_norm),
            heads=attention.o_proj.weight.shape[1] // attention.d_head,
            kv_heads=attention.n_kv_heads,
            scale=1 / math.sqrt(attention.d_head) if scale is None else scale,
        )

    def _linear(self, linear: Linear | FusedLinear) -> decode_step.Matrix:
        weight, bias = linear.weight, linear.bias
        if isinstance(linear, FusedLinear) and 0 < len(linear.biased) < len(linear.parts):
            bias = torch.zeros(weight.shape[0])  # filled before each step: the parameter holds some parts only
            self.padded_biases.append((linear, bias))
        return _matrix(weight, bias)


_PREPARED: WeakKeyDictionary[Decoder | EncoderDecoder, PreparedModel] = WeakKeyDictionary()


def stack_of(model: Decoder | EncoderDecoder) -> Stack:
    return model if isinstance(model, Decoder) else model.decoder


def _matrix(weight: Any, bias: Tensor | None) -> decode_step.Matrix:
    if isinstance(weight, Int8 | Int4):
        parts = [getattr(weight, name) for name in weight.tensors]
        return decode_step.matrix(parts, bias, shape=weight.shape, bits=weight.bits, inputs=weight.inputs)
    return decode_step.matrix([weight], bias, shape=weight.shape, bits=32)


def _norm(module: nn.Module) -> decode_step.Norm:
    if not isinstance(module, nn.LayerNorm | RMSNorm):
        return decode_step.Norm()
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    if isinstance(module, RMSNorm):
        return decode_step.norm("rms", module.weight, None, eps)
    return decode_step.norm("layer", module.weight, module.bias, eps)


def _position_tables(positions: Positions, n: int) -> PositionTables:
    at = torch.arange(n)
    if isinstance(positions, Rotary):
        cos, sin = (angles[0, 0].contiguous() for angles in positions.angles(at))
        return PositionTables(n, cos=cos, sin=sin)
    if isinstance(positions, Learned):
        return PositionTables(positions.weight.shape[0], added=positions.weight)
    if isinstance(positions, Sinusoidal):
        return PositionTables(n, added=positions.table(at).contiguous())
    return PositionTables(2**62)
