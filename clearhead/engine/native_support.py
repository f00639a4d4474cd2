"""Which models the decode step of native.cpp computes: a list of what is known, so that all else is left to the model itself."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from clearhead.engine.gpu_step import norms_of
from clearhead.kernels import decode_step, native
from clearhead.kernels.snapshot import Snapshot
from clearhead.layers.attention import Attend, MultiHeadAttention
from clearhead.layers.block import Block, FeedForward
from clearhead.layers.embedding import TokenEmbedding, TokenHead
from clearhead.layers.linear import FusedLinear, LayerNorm, Linear, RMSNorm
from clearhead.layers.positions import Learned, Positions, Rotary, Sinusoidal
from clearhead.models.decoder import Decoder
from clearhead.models.encoder_decoder import EncoderDecoder
from clearhead.models.stack import Stack
from clearhead.quantization.integer import Int4, Int8

# By exact type: a subclass may compute something else.
NORMS = {nn.LayerNorm, LayerNorm, RMSNorm}
POSITIONS = {Positions, Learned, Rotary, Sinusoidal}
PARTS = {Block, MultiHeadAttention, Attend, FeedForward, Linear, FusedLinear, Int8, Int4, TokenEmbedding, TokenHead}
KNOWN = {*NORMS, *POSITIONS, *PARTS, nn.Identity}


def is_supported(model: Decoder | EncoderDecoder, stack: Stack, modules: list[nn.Module], snapshot: Snapshot) -> bool:
    """Whether native.cpp computes what these modules do; they are all that a decode step calls."""
    return (
        type(model) in (Decoder, EncoderDecoder)
        and len(stack.layers) == len(stack.blocks) > 0
        and all(type(module) in KNOWN for module in modules)
        and not snapshot.replaces_methods
        and not any(module.training and getattr(module, "dropout", 0) for module in modules)
        and all(_is_plain(module) for module in modules)
        and all(_parts_are_known(block) for block in stack.layers)
        and _ends_are_known(model, stack)
        and _are_alike(stack.layers)
        and {model.config.kernel, *(each.kernel for each in modules if isinstance(each, Attend))} <= {"auto", "fused"}
        and _shapes_agree(model, stack)
    )


def _parts_are_known(block: Block) -> bool:
    """Whether each part of a block is of the type that it has when built: an nn.Identity may stand anywhere."""
    ff: Any = block.feedforward
    attentions: list[Any] = [block.attention, *([] if block.cross is None else [block.cross])]
    if type(ff) is not FeedForward or any(type(each) is not MultiHeadAttention for each in attentions):
        return False
    pairs: list[tuple[nn.Module, set[Any]]] = [(norm, NORMS) for norm in norms_of(block)]
    pairs += [(ff.down, {Linear}), (ff.gate_up, {FusedLinear}) if ff.gated else (ff.up, {Linear})]
    for each in attentions:
        pairs += [(each.heads, {Attend}), (each.o_proj, {Linear})]
        pairs += [(each.q_proj, {Linear}) if each.cross else (each.qkv, {FusedLinear})]
        pairs += [(norm, NORMS | {nn.Identity}) for norm in (each.q_norm, each.k_norm)]
    return all(type(module) in types for module, types in pairs)


def _ends_are_known(model: Decoder | EncoderDecoder, stack: Stack) -> bool:
    """The same for what comes before and after the blocks."""
    pairs: list[tuple[nn.Module, set[Any]]] = [(model.tokens, {TokenEmbedding}), (model.head, {TokenHead})]
    pairs += [(stack.positions, POSITIONS), (stack.norm, NORMS | {nn.Identity})]
    pairs += [(stack.embedding_norm, NORMS | {nn.Identity})]
    return (
        all(type(module) in types for module, types in pairs)
        and model.head.activation is None
        and not isinstance(cast(object, model.tokens.weight), Int4)
    )


def _are_alike(blocks: list[Block]) -> bool:
    """Whether blocks differ in nothing but weights and the number of heads, with an activation that native.cpp knows."""
    forms = {
        (block.norm_first, block.attention.d_head, block.cross is None, ff.activation, ff.gated)
        for block in blocks
        for ff in [block.feedforward]
    }
    return len(forms) == 1 and blocks[0].feedforward.activation in decode_step.activations()


def _is_plain(module: nn.Module) -> bool:
    """Whether its tensors lie in the CPU's memory, contiguous, and it computes in float32."""
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


def _shapes_agree(model: Decoder | EncoderDecoder, stack: Stack) -> bool:
    """Whether each weight has the shape that the others call for. If not, the model itself says what is wrong."""
    embedding, positions = model.tokens.weight, stack.positions
    head: Any = embedding if model.head.weight is None else model.head.weight
    V, D = embedding.shape
    pairs = [pair for block in stack.layers for pair in _block_shapes(block, D)]
    pairs += [(norm, (D,)) for norm in (stack.norm, stack.embedding_norm) if type(norm) in NORMS]
    pairs += [(positions, (len(positions.weight), D))] if isinstance(positions, Learned) else []
    return (
        all(tuple(module.weight.shape) == shape and _bias_agrees(module) for module, shape in pairs)
        and (head.shape[0] <= V and head.shape[1] == D)
        and (model.head.bias is None or model.head.bias.shape == (head.shape[0],))
        and all(
            attention.o_proj.weight.shape[1] % (attention.n_kv_heads * attention.d_head) == 0
            for block in stack.layers
            for attention in (block.attention, block.cross)
            if attention is not None
        )
    )


def _block_shapes(block: Block, D: int) -> list[tuple[Any, tuple[int, ...]]]:
    ff, d_ff = block.feedforward, block.feedforward.down.weight.shape[1]
    shapes: list[tuple[Any, tuple[int, ...]]] = [(norm, (D,)) for norm in norms_of(block)]
    shapes += [(ff.down, (D, d_ff)), (ff.gate_up, (2 * d_ff, D)) if ff.gated else (ff.up, (d_ff, D))]
    for attention in (block.attention, block.cross):
        if attention is None:
            continue
        d_q, d_kv = attention.o_proj.weight.shape[1], attention.n_kv_heads * attention.d_head
        shapes += [(attention.o_proj, (D, d_q))]
        shapes += [(attention.q_proj, (d_q, D)) if attention.cross else (attention.qkv, (d_q + 2 * d_kv, D))]
        shapes += [(norm, (attention.d_head,)) for norm in (attention.q_norm, attention.k_norm) if type(norm) in NORMS]
    return shapes


def _bias_agrees(module: Any) -> bool:
    bias, n = getattr(module, "bias", None), module.weight.shape[0]
    if isinstance(module, FusedLinear):
        n = sum(module.parts[name] for name in module.biased)
        if sum(module.parts.values()) != module.weight.shape[0]:
            return False
    return not isinstance(bias, Tensor) or bias.shape == (n,)
