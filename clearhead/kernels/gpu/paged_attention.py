"""Attention of one query a row over keys and values in the blocks of a pool."""
# triton has no types, and kernels are a language of their own.
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false

from __future__ import annotations

import functools
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.kernels.gpu.launch import pdl_options, start_kernel

LOG2E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1.0e30)  # the score of no key; finite, so that MASKED - MASKED is 0 and not NaN


@triton.jit
@no_type_check
def _table_entries(row, at, high, SLOTS: tl.constexpr, EACH: tl.constexpr):
    """The table's entries for tokens `at`: the block of each, or with EACH its own slot."""
    return tl.load(row + (at if EACH else at // SLOTS), mask=at < high, other=0)


@triton.jit
@no_type_check
def _offset(entries, at, block_stride, E: tl.constexpr, SLOTS: tl.constexpr, EACH: tl.constexpr):
    """The offsets of those tokens in the pool."""
    block, slot = entries, at % SLOTS
    if EACH:
        block, slot = entries // SLOTS, entries % SLOTS
    return block.to(tl.int64)[:, None] * block_stride + slot[:, None] * E


@triton.jit
@no_type_check
def _attend_one_head(
    q, k, v, row, low, high, scale, block_stride,
    E: tl.constexpr, EP: tl.constexpr, SLOTS: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One query head with its own keys. Each slot of the tile keeps its own running softmax; they are joined once, at the end."""
    e = tl.arange(0, EP)[None, :]
    query = tl.load(q + e, mask=e < E, other=0.0).to(tl.float32) * (scale * LOG2E)
    max_score = tl.full((TILE,), MASKED, tl.float32)
    weight_sum = tl.zeros((TILE,), tl.float32)
    total = tl.zeros((TILE, EP), tl.float32)
    at = low + tl.arange(0, TILE)
    entries = _table_entries(row, at, high, SLOTS, EACH)
    for _ in tl.range(low, high, TILE):
        real = at < high
        there = _offset(entries, at, block_stride, E, SLOTS, EACH) + e
        mask = real[:, None] & (e < E)
        keys = tl.load(k + there, mask=mask, other=0.0)
        values = tl.load(v + there, mask=mask, other=0.0)
        at += TILE
        entries = _table_entries(row, at, high, SLOTS, EACH)  # one tile ahead: the addresses of keys depend on it
        scores = tl.where(real, tl.sum(keys.to(tl.float32) * query, 1), MASKED)
        higher = tl.maximum(max_score, scores)
        weights = tl.where(real, tl.exp2(scores - higher), 0.0)
        decay = tl.exp2(max_score - higher)
        weight_sum = weight_sum * decay + weights
        total = total * decay[:, None] + weights[:, None] * values.to(tl.float32)
        max_score = higher
    top = tl.max(max_score, 0)
    share = tl.exp2(max_score - top)
    total = tl.sum(total * share[:, None], 0)
    return total[None, :], tl.zeros((1,), tl.float32) + top, tl.zeros((1,), tl.float32) + tl.sum(weight_sum * share, 0)


@triton.jit
@no_type_check
def _attend_group(
    q, k, v, row, low, high, scale, block_stride,
    E: tl.constexpr, EP: tl.constexpr, SLOTS: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Query heads that share keys, each key read once. The matrix units need the group padded to 16."""
    e = tl.arange(0, EP)[None, :]
    g = tl.arange(0, ROWS)[:, None]
    query = tl.load(q + g * E + e, mask=(g < GROUP) & (e < E), other=0.0)
    max_score = tl.full((ROWS,), MASKED, tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, EP), tl.float32)
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        real = at < high
        there = _offset(_table_entries(row, at, high, SLOTS, EACH), at, block_stride, E, SLOTS, EACH) + e
        mask = real[:, None] & (e < E)
        keys = tl.load(k + there, mask=mask, other=0.0)
        values = tl.load(v + there, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * LOG2E)
        scores = tl.where(real[None, :], scores, MASKED)
        higher = tl.maximum(max_score, tl.max(scores, 1))
        weights = tl.where(real[None, :], tl.exp2(scores - higher[:, None]), 0.0)
        decay = tl.exp2(max_score - higher)
        weight_sum = weight_sum * decay + tl.sum(weights, 1)
        total = tl.dot(weights.to(values.dtype), values, total * decay[:, None], input_precision="ieee")
        max_score = higher
    return total, max_score, weight_sum


@triton.jit
@no_type_check
def _join_splits(
    parts, max_scores, weight_sums, own, used, EP: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Join the softmaxes of several splits. Reads bypass the L1 cache, which may hold old values."""
    g, e = tl.arange(0, ROWS), tl.arange(0, EP)[None, :]
    max_score = tl.full((ROWS,), MASKED, tl.float32)
    for s in tl.static_range(SPLITS):
        mask = (g < GROUP) & (s < used)
        max_score = tl.maximum(
            max_score, tl.load(max_scores + own * SPLITS + s, mask=mask, other=MASKED, cache_modifier=".cg")
        )
    total, weight_sum = tl.zeros((ROWS, EP), tl.float32), tl.zeros((ROWS,), tl.float32)
    for s in tl.static_range(SPLITS):
        mask, there = (g < GROUP) & (s < used), own * SPLITS + s
        theirs = tl.load(max_scores + there, mask=mask, other=MASKED, cache_modifier=".cg")
        share = tl.where(mask, tl.exp2(theirs - max_score), 0.0)
        weight_sum += share * tl.load(weight_sums + there, mask=mask, other=0.0, cache_modifier=".cg")
        part = parts + there[:, None].to(tl.int64) * EP + e
        total += share[:, None] * tl.load(part, mask=mask[:, None], other=0.0, cache_modifier=".cg")
    return total, weight_sum


@triton.jit
@no_type_check
def _finish_attention(
    out, own, total, weight_sum, E: tl.constexpr, EP: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    g, e = tl.arange(0, ROWS), tl.arange(0, EP)[None, :]
    total = total / tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]
    mask = (g < GROUP)[:, None] & (e < E)
    tl.store(out + own[:, None].to(tl.int64) * E + e, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _paged_attention(
    q, k, v, table, counts, out, parts, max_scores, weight_sums, finished,
    scale, window, q_stride, table_stride, k_block, k_head, v_head,
    E: tl.constexpr, EP: tl.constexpr, SLOTS: tl.constexpr, EACH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each row, key head and split. The last split of a row to finish joins them.

    Splits are equal and at least LEAST tokens long, so a short row has fewer of them.
    """
    start_kernel(PDL)
    head, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    K = tl.num_programs(0)
    count = tl.load(counts + b)
    first = tl.where(window > 0, tl.maximum(count - window, 0), 0)
    if SPLITS == 1:
        low, high = first, count
    else:
        each = tl.maximum(tl.cdiv(tl.cdiv(count - first, TILE), SPLITS) * TILE, LEAST)
        used = tl.maximum(tl.cdiv(count - first, each), 1)
        if split >= used:
            return
        low = first + split * each
        high = tl.minimum(low + each, count)
    q += b.to(tl.int64) * q_stride + head * GROUP * E
    k += head.to(tl.int64) * k_head
    v += head.to(tl.int64) * v_head
    row = table + b.to(tl.int64) * table_stride
    if GROUP == 1:
        total, max_score, weight_sum = _attend_one_head(
            q, k, v, row, low, high, scale, k_block, E, EP, SLOTS, EACH, TILE
        )
    else:
        total, max_score, weight_sum = _attend_group(
            q, k, v, row, low, high, scale, k_block, E, EP, SLOTS, EACH, TILE, GROUP, ROWS, STAGES
        )  # fmt: skip
    g = tl.arange(0, ROWS)
    own = (b * K + head) * GROUP + g  # the index among the query heads of all rows
    if SPLITS == 1 or used == 1:
        _finish_attention(out, own, total, weight_sum, E, EP, GROUP, ROWS)
    else:
        e = tl.arange(0, EP)[None, :]
        mine = own * SPLITS + split
        tl.store(parts + mine[:, None].to(tl.int64) * EP + e, total, mask=(g < GROUP)[:, None])
        tl.store(max_scores + mine, max_score, mask=g < GROUP)
        tl.store(weight_sums + mine, weight_sum, mask=g < GROUP)
        tl.debug_barrier()  # all parts of this program are written before it is counted
        if tl.atomic_add(finished + b * K + head, 1, sem="acq_rel") == used - 1:
            tl.store(finished + b * K + head, 0)  # ready for the next call
            total, weight_sum = _join_splits(parts, max_scores, weight_sums, own, used, EP, GROUP, ROWS, SPLITS)
            _finish_attention(out, own, total, weight_sum, E, EP, GROUP, ROWS)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Counters of finished splits. Every call leaves them at 0; one stream at a time may use them."""
    return torch.zeros(65536, dtype=torch.int32, device=device)


def attention_plan(B: int, H: int, K: int, E: int, longest: int, dtype: torch.dtype) -> dict[str, Any]:
    """How `paged_attention` splits its work. It depends on shapes alone: lengths are known only on the device."""
    half = dtype.itemsize == 2
    tile = 64 if half and longest > 64 else 32
    warps = 2 if half and E <= 64 else 4
    if B * K >= 264:  # two programs for each multiprocessor of a large GPU
        if half and E == 128 and H == K and longest > 64:
            # With fewer registers, the compiler's own choice, loads would wait for each other.
            return dict(TILE=32, SPLITS=1, LEAST=32, STAGES=3, num_warps=4, maxnreg=128)
        if half and E <= 64 and H == K:  # larger tiles are slower for short rows
            return dict(TILE=16, SPLITS=1, LEAST=16, STAGES=3, num_warps=2)
        tile = 32 if half and longest <= 128 else tile
        return dict(TILE=tile, SPLITS=1, LEAST=tile, STAGES=3, num_warps=warps)
    least = 192 if H == K else 64
    splits = min(triton.cdiv(longest, least), 16)
    return dict(TILE=tile, SPLITS=splits, LEAST=least, STAGES=3, num_warps=warps if H == K else 4)


def paged_attention(
    q: Float[Tensor, "B H E"],
    k: Float[Tensor, "n K block E"],
    v: Float[Tensor, "n K block E"],
    table: Int[Tensor, "B m"],
    counts: Int[Tensor, " B"],
    scale: float,
    window: int = 0,
    *,
    each: bool = False,
    plan: dict[str, Any] | None = None,
) -> Float[Tensor, "B H E"]:
    """Attention of each row's query over its first `counts` tokens (the last `window` of them, if not 0); zeros if there are none.

    Token p of row b lies in block table[b, p // block], slot p % block; with `each`, in block table[b, p] // block, slot
    table[b, p] % block. k and v are views of one pool with any strides of blocks and heads; the slots of a head are contiguous.
    """
    (B, H, E), (_, K, slots, _), m = q.shape, k.shape, table.shape[1]
    assert k.stride()[2:] == v.stride()[2:] == q.stride()[1:] == (E, 1)
    assert k.stride(0) == v.stride(0)
    assert table.stride(1) == 1
    assert H % K == 0
    how = dict(plan or attention_plan(B, H, K, E, m if each else m * slots, k.dtype))
    assert how["SPLITS"] == 1 or B * K <= 65536
    splits, group = how["SPLITS"], H // K
    wide = max(triton.next_power_of_2(E), 1 if group == 1 else 16)  # the matrix units take no less than 16
    out = q.new_empty(B, H, E)
    # Not used without splits, but triton needs tensors.
    parts = out if splits == 1 else q.new_empty(B * H * splits, wide, dtype=torch.float32)
    sums = out if splits == 1 else q.new_empty(2, B * H * splits, dtype=torch.float32)
    finished = counts if splits == 1 else _counters(q.device)
    _paged_attention[(K, splits, B)](
        q, k, v, table, counts, out, parts, sums[0], sums[-1], finished,
        scale, window, q.stride(0), table.stride(0), k.stride(0), k.stride(1), v.stride(1),
        E=E, EP=wide, SLOTS=slots, EACH=each, GROUP=group, ROWS=1 if group == 1 else max(16, triton.next_power_of_2(group)),
        **how, **pdl_options(q.device),
    )  # fmt: skip
    return out
