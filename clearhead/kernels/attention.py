"""Attention over whole texts, and torch's flex_attention: tensors in, tensors out."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from clearhead.errors import InputError
from clearhead.kernels import native
from clearhead.kernels.checks import has_forward_gradients, is_plain, product_dtype
from clearhead.limits import SPARSE_KEYS

Starts = tuple[
    Int[Tensor, " n"], Int[Tensor, " n"]
]  # of the texts' queries and keys in the one row; last, the row's end


def takes_packed(like: Tensor) -> bool:
    """Whether `packed_attention` runs for such inputs: on the CPU, or on a GPU in 16 bits."""
    if like.is_cuda:
        return product_dtype(like) in (torch.bfloat16, torch.float16)
    return like.device.type == "cpu" and not torch.compiler.is_compiling()


def packed_attention(
    q: Float[Tensor, "1 H T E"],
    k: Float[Tensor, "1 K S E"],
    v: Float[Tensor, "1 K S E"],
    starts: Starts,
    longest: tuple[int, int],
    scale: float,
    *,
    causal: bool,
) -> Float[Tensor, "1 H T E"]:
    """Texts one after the other in one row, each attending to itself (or to the keys of its own number). `longest`: an upper bound
    on the tokens of a text, queries and keys."""
    same = starts[0] is starts[1]
    if q.is_cuda:
        return _varlen(q, k, v, starts, longest, scale, causal)
    if _is_ours(q, k, v) and (same or not causal):
        return native.text_attention(q, k, v, scale, starts, causal=causal)
    return _length_by_length(q, k, v, starts, scale, causal)


def text_attention(
    q: Float[Tensor, "B H T E"], k: Float[Tensor, "B K S E"], v: Float[Tensor, "B K S E"], scale: float, *, causal: bool
) -> Float[Tensor, "B H T E"] | None:
    """All queries of a row over all its keys, or over those before. None: use torch's scaled_dot_product_attention."""
    if (causal and q.shape[2] != k.shape[2]) or not _is_ours(q, k, v):
        return None
    return native.text_attention(q, k, v, scale, causal=causal)


def _is_ours(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the CPU's kernel takes these. It has no backward pass."""
    return (
        q.device.type == "cpu"
        and q.dtype == k.dtype == v.dtype == torch.float32
        and q.shape[2] > 1  # a single query is done before the keys are laid out
        and q.numel() > 0
        and k.numel() > 0
        and q.shape[3] % native.TEXT_WIDTHS == 0
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        and is_plain(q, k, v)
        and not torch.jit.is_tracing()
        and not has_forward_gradients()
        and native.lies_in_rows(q)
        and native.lies_in_rows(k)
        and native.lies_in_rows(v)
        and native.is_there()
    )


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Starts, longest: tuple[int, int], scale: float, causal: bool
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    usual = 1 / math.sqrt(q.shape[-1])  # varlen_attn multiplies with this itself
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q, k, v = (x[0].transpose(0, 1) for x in (q if scale == usual else q * (scale / usual), k, v))
    reach = (-1, 0 if causal else -1)  # keys before and after the query; -1: all
    out = varlen_attn(q, k, v, *starts, *longest, window_size=reach)
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]


def _length_by_length(q: Tensor, k: Tensor, v: Tensor, starts: Starts, scale: float, causal: bool) -> Tensor:
    """Neighbouring texts of one length as one batch: nothing is masked, and sorted texts make large batches."""
    queries, keys = (each.tolist() for each in starts)
    sizes = [(b - a, d - c) for a, b, c, d in zip(queries, queries[1:], keys, keys[1:], strict=False)]
    parts: list[Tensor] = []
    i = 0
    for (t, s), group in itertools.groupby(sizes):
        n = len(list(group))
        one, other = slice(queries[i], queries[i] + n * t), slice(keys[i], keys[i] + n * s)
        i += n
        if t and s:
            rows = [x[0, :, at].unflatten(1, (n, -1)).transpose(0, 1) for x, at in ((q, one), (k, other), (v, other))]
            out = F.scaled_dot_product_attention(
                *(rows[0], rows[1], rows[2]), is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            parts.append(out.transpose(1, 2).flatten(0, 1))  # (n t, H, E)
        elif t:
            parts.append(q.new_zeros(n * t, q.shape[1], q.shape[3]))
    return torch.cat(parts).transpose(0, 1)[None]


def prefers_flex(like: Tensor, S: int) -> bool:
    """Whether skipping blocks of the score matrix of so many keys beats the fused kernel here, given enough blocks to skip."""
    return like.is_cuda and SPARSE_KEYS["cuda"] <= S


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: BlockMask,
    score_mod: Callable[..., Tensor] | None,
    scale: float,
    *,
    needs_grad: bool,
) -> Tensor:
    """torch's flex_attention, compiled where that pays. `needs_grad`: an input or the bias wants a gradient."""
    if q.device.type == "cpu" and needs_grad:
        raise InputError(
            "torch's flex kernel has no backward pass on the CPU; got inputs that need gradients; use kernel='fused'"
        )
    # A bias that is looked up, at torch's usual pipeline depth, does not fit into a Hopper GPU's shared memory.
    shallow = q.is_cuda and score_mod is not None
    run = functools.partial(
        *(flex_attention, q, k, v),
        block_mask=blocks,
        score_mod=score_mod,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options={"num_stages": 1} if shallow else None,
    )
    if torch.compiler.is_compiling():
        return run()
    if q.device.type == "cpu" and (k.shape[2] < 1024 or q.dtype == torch.float64):  # not worth it, or not possible
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            return run()
    return _compiled_flex()(*run.args, **run.keywords)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    # Each kind of mask, bias, type and length is a compilation; past torch's limit of 8 it would silently run uncompiled.
    limits: Any = importlib.import_module("torch._dynamo.config")
    limits.recompile_limit = max(limits.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=False)
