"""Decoding on a CUDA GPU: Triton kernels for the steps where a few rows meet many weights or many kept keys.

A decoding step reads every weight and every key once for a handful of rows, so each kernel here is written to read memory
at full speed; the arithmetic is free. Sums are float32 whatever the type, and rounded once. Every function can be captured
in a CUDA graph: nothing waits for the device, and the shapes alone choose how the work is split. Constants were tuned on an
H200 (benchmarks/gpu_kernels.py).

Only code that holds CUDA tensors may import this module: it needs triton.
"""
# triton has no types, and kernels are a language of their own.
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false

from __future__ import annotations

import functools
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, Int, Int8, UInt8
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1.0e30)  # a score no key has; finite, so that nothing minus nothing is 0 and not NaN
LOWEST = tl.constexpr(-(2**63))


# --- one kernel after another -----------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _begin(EARLY: tl.constexpr):
    """Let the next kernel start, and wait until the one before has written all it writes.

    On Hopper and later a kernel may start while the one before ends, which saves about a microsecond each. Every kernel here
    waits before it reads anything but parameters, so all see what they would see one after another.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@functools.cache
def _early(device: torch.device) -> dict[str, bool]:
    hopper = device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) >= (9, 0)
    return dict(EARLY=True, launch_pdl=True) if hopper else dict(EARLY=False)


# --- linear -----------------------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _finish_linear(y, bias, residual, out, r, n, R, N):
    """Bias and residual onto y (rows r, outputs n), and out."""
    real = (r < R)[:, None] & (n < N)[None, :]
    where = r[:, None] * N + n[None, :]
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        y += tl.load(residual + where, mask=real, other=0.0).to(tl.float32)
    tl.store(out + where, y.to(out.dtype.element_ty), mask=real)


@triton.jit
@no_type_check
def _linear_sum(
    x, weight, bias, residual, out, R, N,
    D: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply and sum: each thread keeps its own part of every sum, and threads meet once, at the end.

    Weights are read one block ahead; the first block, if AHEAD, before the kernel that makes x has ended.
    """
    first = tl.program_id(0) * OUTS
    n = tl.minimum(first + tl.arange(0, OUTS), N - 1)[None, :, None].to(tl.int64)  # a clamp: no mask over the weights
    r = tl.minimum(tl.arange(0, ROWS), R - 1)[:, None, None]
    d = tl.arange(0, BLOCK)[None, None, :]
    total = tl.zeros((ROWS, OUTS, BLOCK), tl.float32)
    if not AHEAD:
        _begin(EARLY)
    w = tl.load(weight + n * D + d, mask=d < D, other=0.0, eviction_policy="evict_first")
    if AHEAD:
        _begin(EARLY)
    for _ in tl.range(0, D, BLOCK, loop_unroll_factor=UNROLL):
        y = tl.load(x + r * D + d, mask=d < D, other=0.0)
        d += BLOCK
        after = tl.load(weight + n * D + d, mask=d < D, other=0.0, eviction_policy="evict_first")
        total += w.to(tl.float32) * y.to(tl.float32)
        w = after
    _finish_linear(tl.sum(total, 2), bias, residual, out, tl.arange(0, ROWS), first + tl.arange(0, OUTS), R, N)


@triton.jit
@no_type_check
def _linear_dot(
    x, weight, bias, residual, out, R, N,
    D: tl.constexpr, OUTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The matrix units, with the rows padded to their 16."""
    _begin(EARLY)
    first = tl.program_id(0) * OUTS
    n = tl.minimum(first + tl.arange(0, OUTS), N - 1).to(tl.int64)
    r = tl.arange(0, 16)
    total = tl.zeros((16, OUTS), tl.float32)
    for start in tl.range(0, D, BLOCK, num_stages=STAGES):
        d = start + tl.arange(0, BLOCK)
        if D % BLOCK == 0:
            w = tl.load(weight + n[:, None] * D + d[None, :], eviction_policy="evict_first")
            y = tl.load(x + r[:, None] * D + d[None, :], mask=(r < R)[:, None], other=0.0)
        else:
            w = tl.load(weight + n[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
            y = tl.load(x + r[:, None] * D + d[None, :], mask=(r < R)[:, None] & (d < D)[None, :], other=0.0)
        total = tl.dot(y, tl.trans(w), total, input_precision="ieee")
    _finish_linear(total, bias, residual, out, r, first + tl.arange(0, OUTS), R, N)


def linear_plan(R: int, N: int, D: int, dtype: torch.dtype) -> dict[str, Any] | None:
    """How `linear` splits a product, or None where cuBLAS is as fast."""
    half = dtype.itemsize == 2
    if half and (R > 4 or (R > 2 and N * D > 2e7)):
        if N >= 8192:
            return dict(kernel="dot", OUTS=64, BLOCK=128, STAGES=4, num_warps=4)
        return dict(kernel="dot", OUTS=8, BLOCK=256, STAGES=4, num_warps=1) if N * D < 8e6 or N % 8 else None
    narrow = N < 1024 < D  # few sums, long ones: more threads to each
    if R == 1:
        outs, warps, unroll = (2, 8, 2) if N <= 2048 < D or narrow else (2, 2, 4) if D > N else (2, 4, 4)
        if D <= 2048 and not narrow:
            outs, warps, unroll = 4, 4, 1
    elif R == 2:
        outs, warps, unroll = (2, 4, 1) if narrow else (4, 2, 2)
    else:
        outs, warps, unroll = 2 if R <= 4 else 1, 4 if narrow else 2 if D > N or D <= 512 else 1, 2
    return dict(kernel="sum", OUTS=outs, BLOCK=warps * 32 * (8 if half else 4), UNROLL=unroll, num_warps=warps)


def linear(
    x: Float[Tensor, "R D"],
    weight: Float[Tensor, "N D"],
    bias: Float[Tensor, " N"] | None = None,
    *,
    residual: Float[Tensor, "R N"] | None = None,
    plan: dict[str, Any] | None = None,
) -> Float[Tensor, "R N"]:
    """x W^T (+ bias) (+ residual), made for 1 to 16 rows. `plan` overrides the tuned split."""
    (R, D), N = x.shape, weight.shape[0]
    how = plan or linear_plan(R, N, D, weight.dtype)
    if how is None or R > 16 or not weight.is_contiguous():
        product = F.linear(x, weight, bias)
        return product if residual is None else product + residual
    x = x.contiguous()
    residual = residual if residual is None else residual.contiguous()
    out = x.new_empty(R, N)
    how = how | _early(x.device)
    grid = (triton.cdiv(N, how["OUTS"]),)
    if how.pop("kernel") == "dot":
        _linear_dot[grid](x, weight, bias, residual, out, R, N, D=D, **how)
    else:
        # A parameter was there before; what is no parameter (a cast, say) may be the work of the kernel still running.
        ahead, rows = isinstance(weight, torch.nn.Parameter), triton.next_power_of_2(R)
        _linear_sum[grid](x, weight, bias, residual, out, R, N, D=D, ROWS=rows, AHEAD=ahead, **how)
    return out


@triton.jit
@no_type_check
def _finish_packed(total, bias, out, r, n, N):
    """The sum over groups of outputs n of row r, and bias."""
    y = tl.sum(total, 1)
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + r * N + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
@no_type_check
def _linear_int8(
    x, weight, scales, bias, out, R, N, D: tl.constexpr, OUTS: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Row after row; from the second on the weights come from the near cache."""
    _begin(EARLY)
    all_groups: tl.constexpr = (D + 63) // 64
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    own = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    g, e = tl.arange(0, GROUPS)[None, :], tl.arange(0, 64)[None, None, :]
    for r in tl.range(R):
        total = tl.zeros((OUTS, GROUPS), tl.float32)
        for start in tl.range(0, all_groups, GROUPS):
            at = start + g
            d = at[:, :, None] * 64 + e
            w = tl.load(weight + own[:, :, None] * D + d, mask=d < D, other=0)
            y = tl.load(x + r * D + d, mask=d < D, other=0.0)
            scale = tl.load(scales + own * all_groups + at, mask=at < all_groups, other=0.0)
            total += tl.sum(w.to(tl.float32) * y.to(tl.float32), 2) * scale.to(tl.float32)
        _finish_packed(total, bias, out, r, n, N)


@triton.jit
@no_type_check
def _halves(pair, dtype: tl.constexpr):
    """Two neighbours read as one integer; the first lies in its low half."""
    if dtype == tl.float32:
        even = pair.to(tl.int32).to(tl.float32, bitcast=True)
        odd = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:  # the upper half of a float32
        even = (pair << 16).to(tl.float32, bitcast=True)
        odd = (pair & -65536).to(tl.float32, bitcast=True)
    else:
        even = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return even, odd


@triton.jit
@no_type_check
def _linear_int4(
    pairs, words, scales, mins, bias, out, R, N,
    D: tl.constexpr, OUTS: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same of eight weights a word: sum of u x, times the scale, plus sum of x, times the least."""
    _begin(EARLY)
    all_groups: tl.constexpr = D // 32
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    own = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    g, four = tl.arange(0, GROUPS)[None, :], tl.arange(0, 4)
    for r in tl.range(R):
        total = tl.zeros((OUTS, GROUPS), tl.float32)
        for start in tl.range(0, all_groups, GROUPS):
            at = start + g
            real = at < all_groups
            word = at[:, :, None] * 4 + four[None, None, :]
            w = tl.load(words + own[:, :, None] * (D // 8) + word, mask=real[:, :, None], other=0)
            pair = word[:, :, :, None] * 4 + four[None, None, None, :]
            pair = tl.load(pairs + r * (D // 2) + pair, mask=real[:, :, None, None], other=0)
            even, odd = _halves(pair, out.dtype.element_ty)
            byte = w[:, :, :, None] >> (8 * four[None, None, None, :])
            dots = (byte & 15).to(tl.float32) * even + ((byte >> 4) & 15).to(tl.float32) * odd
            scale = tl.load(scales + own * all_groups + at, mask=real, other=0.0).to(tl.float32)
            least = tl.load(mins + own * all_groups + at, mask=real, other=0.0).to(tl.float32)
            total += tl.sum(tl.sum(dots, 3), 2) * scale + tl.sum(tl.sum(even + odd, 3), 2) * least
        _finish_packed(total, bias, out, r, n, N)


def linear_int8(
    x: Float[Tensor, "R D"],
    q: Int8[Tensor, "N D"],
    scales: Float[Tensor, "N _"],
    bias: Float[Tensor, " N"] | None = None,
) -> Float[Tensor, "R N"]:
    """x W^T (+ bias) for 1 to 8 rows, W in the int8 format of quantized.py."""
    (R, D), N = x.shape, q.shape[0]
    out = x.new_empty(R, N)
    _linear_int8[(N,)](
        x.contiguous(), q, scales, bias, out, R, N, D=D, OUTS=1, GROUPS=64, num_warps=8, **_early(x.device)
    )  # fmt: skip
    return out


def linear_int4(
    x: Float[Tensor, "R D"],
    q: UInt8[Tensor, "N _"],
    scales: Float[Tensor, "N g"],
    mins: Float[Tensor, "N g"],
    bias: Float[Tensor, " N"] | None = None,
) -> Float[Tensor, "R N"]:
    """x W^T (+ bias) for 1 to 8 rows, W in the int4 format of quantized.py."""
    (R, D), N = x.shape, q.shape[0]
    out = x.new_empty(R, N)
    pairs = x.contiguous().view(torch.int64 if x.dtype == torch.float32 else torch.int32)
    outs = 4 if N >= 8192 else 2
    _linear_int4[(triton.cdiv(N, outs),)](
        pairs, q.view(torch.int32), scales, mins, bias, out, R, N,
        D=D, OUTS=outs, GROUPS=8, num_warps=1, **_early(x.device),
    )  # fmt: skip
    return out


# --- attention over paged keys ----------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _look_alone(
    q, k, v, row, low, high, scale, block_stride, E: tl.constexpr, EP: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One head's own keys. Each place of the tile keeps a softmax of its own: nothing waits until the last tile is in."""
    e = tl.arange(0, EP)[None, :]
    query = tl.load(q + e, mask=e < E, other=0.0).to(tl.float32) * (scale * LOG2E)
    peak = tl.full((TILE,), NOTHING, tl.float32)
    mass = tl.zeros((TILE,), tl.float32)
    total = tl.zeros((TILE, EP), tl.float32)
    at = low + tl.arange(0, TILE)
    block = tl.load(row + at // SLOTS, mask=at < high, other=0)
    for _ in tl.range(low, high, TILE):
        real = at < high
        there = block.to(tl.int64)[:, None] * block_stride + (at % SLOTS)[:, None] * E + e
        mask = real[:, None] & (e < E)
        keys = tl.load(k + there, mask=mask, other=0.0)
        values = tl.load(v + there, mask=mask, other=0.0)
        at += TILE
        block = tl.load(row + at // SLOTS, mask=at < high, other=0)  # one tile ahead: the keys' addresses hang on it
        scores = tl.where(real, tl.sum(keys.to(tl.float32) * query, 1), NOTHING)
        higher = tl.maximum(peak, scores)
        weights = tl.where(real, tl.exp2(scores - higher), 0.0)
        fade = tl.exp2(peak - higher)
        mass = mass * fade + weights
        total = total * fade[:, None] + weights[:, None] * values.to(tl.float32)
        peak = higher
    top = tl.max(peak, 0)
    share = tl.exp2(peak - top)
    total = tl.sum(total * share[:, None], 0)
    return total[None, :], tl.zeros((1,), tl.float32) + top, tl.zeros((1,), tl.float32) + tl.sum(mass * share, 0)


@triton.jit
@no_type_check
def _look_together(
    q, k, v, row, low, high, scale, block_stride,
    E: tl.constexpr, EP: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A group of heads on the keys they share, each key read once; the matrix units want the group padded to 16."""
    e = tl.arange(0, EP)[None, :]
    g = tl.arange(0, ROWS)[:, None]
    query = tl.load(q + g * E + e, mask=(g < GROUP) & (e < E), other=0.0)
    peak = tl.full((ROWS,), NOTHING, tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, EP), tl.float32)
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        real = at < high
        block = tl.load(row + at // SLOTS, mask=real, other=0).to(tl.int64)
        there = block[:, None] * block_stride + (at % SLOTS)[:, None] * E + e
        mask = real[:, None] & (e < E)
        keys = tl.load(k + there, mask=mask, other=0.0)
        values = tl.load(v + there, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * LOG2E)
        scores = tl.where(real[None, :], scores, NOTHING)
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.where(real[None, :], tl.exp2(scores - higher[:, None]), 0.0)
        fade = tl.exp2(peak - higher)
        mass = mass * fade + tl.sum(weights, 1)
        total = tl.dot(weights.to(values.dtype), values, total * fade[:, None], input_precision="ieee")
        peak = higher
    return total, peak, mass


@triton.jit
@no_type_check
def _join_splits(
    parts, peaks, masses, own, used, EP: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """One softmax of several. Reads go past the near cache, which may hold what was there before."""
    g, e = tl.arange(0, ROWS), tl.arange(0, EP)[None, :]
    peak = tl.full((ROWS,), NOTHING, tl.float32)
    for s in tl.static_range(SPLITS):
        mask = (g < GROUP) & (s < used)
        peak = tl.maximum(peak, tl.load(peaks + own * SPLITS + s, mask=mask, other=NOTHING, cache_modifier=".cg"))
    total, mass = tl.zeros((ROWS, EP), tl.float32), tl.zeros((ROWS,), tl.float32)
    for s in tl.static_range(SPLITS):
        mask, there = (g < GROUP) & (s < used), own * SPLITS + s
        theirs = tl.load(peaks + there, mask=mask, other=NOTHING, cache_modifier=".cg")
        share = tl.where(mask, tl.exp2(theirs - peak), 0.0)
        mass += share * tl.load(masses + there, mask=mask, other=0.0, cache_modifier=".cg")
        part = parts + there[:, None].to(tl.int64) * EP + e
        total += share[:, None] * tl.load(part, mask=mask[:, None], other=0.0, cache_modifier=".cg")
    return total, mass


@triton.jit
@no_type_check
def _finish_attention(
    out, own, total, mass, E: tl.constexpr, EP: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    g, e = tl.arange(0, ROWS), tl.arange(0, EP)[None, :]
    total = total / tl.where(mass > 0, mass, 1.0)[:, None]
    mask = (g < GROUP)[:, None] & (e < E)
    tl.store(out + own[:, None].to(tl.int64) * E + e, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _paged_attention(
    q, k, v, table, counts, out, parts, peaks, masses, arrived,
    scale, window, q_stride, table_stride, k_block, k_head, v_head,
    E: tl.constexpr, EP: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program a row, key head and split. Of a row's splits, the one that arrives last joins them.

    Splits are even and at least LEAST tokens long, so a short row has fewer of them.
    """
    _begin(EARLY)
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
        total, peak, mass = _look_alone(q, k, v, row, low, high, scale, k_block, E, EP, SLOTS, TILE)
    else:
        total, peak, mass = _look_together(
            q, k, v, row, low, high, scale, k_block, E, EP, SLOTS, TILE, GROUP, ROWS, STAGES
        )  # fmt: skip
    g = tl.arange(0, ROWS)
    own = (b * K + head) * GROUP + g  # which head of all rows' heads
    if SPLITS == 1 or used == 1:
        _finish_attention(out, own, total, mass, E, EP, GROUP, ROWS)
    else:
        e = tl.arange(0, EP)[None, :]
        mine = own * SPLITS + split
        tl.store(parts + mine[:, None].to(tl.int64) * EP + e, total, mask=(g < GROUP)[:, None])
        tl.store(peaks + mine, peak, mask=g < GROUP)
        tl.store(masses + mine, mass, mask=g < GROUP)
        tl.debug_barrier()  # all of this program's parts are written before one thread says so
        if tl.atomic_add(arrived + b * K + head, 1, sem="acq_rel") == used - 1:
            tl.store(arrived + b * K + head, 0)  # ready for the next call
            total, mass = _join_splits(parts, peaks, masses, own, used, EP, GROUP, ROWS, SPLITS)
            _finish_attention(out, own, total, mass, E, EP, GROUP, ROWS)


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """Counters that every call leaves at 0. One stream at a time may use them."""
    return torch.zeros(65536, dtype=torch.int32, device=device)


def attention_plan(B: int, H: int, K: int, E: int, longest: int, dtype: torch.dtype) -> dict[str, Any]:
    """How `paged_attention` splits its work, from shapes alone: the lengths are known only on the device."""
    half = dtype.itemsize == 2
    tile = 64 if half and longest > 64 else 32
    warps = 2 if half and E <= 64 else 4
    if B * K >= 264:  # two for each of a large GPU's multiprocessors
        if half and E == 128 and H == K and longest > 64:
            # Left alone, the compiler takes fewer registers and starts its loads one after another.
            return dict(TILE=32, SPLITS=1, LEAST=32, STAGES=3, num_warps=4, maxnreg=128)
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
    plan: dict[str, Any] | None = None,
) -> Float[Tensor, "B H E"]:
    """Each row's query on its own first `counts` tokens (the last `window` of them, if given); no tokens give zeros.

    Token p of row b lies in block table[b, p // block], slot p % block. k and v are views of one pool: blocks and heads
    may lie anywhere, a head's slots are contiguous.
    """
    (B, H, E), (_, K, slots, _), m = q.shape, k.shape, table.shape[1]
    assert k.stride()[2:] == v.stride()[2:] == q.stride()[1:] == (E, 1)
    assert k.stride(0) == v.stride(0)
    assert table.stride(1) == 1
    assert H % K == 0
    how = dict(plan or attention_plan(B, H, K, E, m * slots, k.dtype))
    assert how["SPLITS"] == 1 or B * K <= 65536
    splits, group, wide = how["SPLITS"], H // K, triton.next_power_of_2(E)
    out = q.new_empty(B, H, E)
    # Without a split these are never touched; triton wants a tensor all the same.
    parts = out if splits == 1 else q.new_empty(B * H * splits, wide, dtype=torch.float32)
    sums = out if splits == 1 else q.new_empty(2, B * H * splits, dtype=torch.float32)
    arrived = counts if splits == 1 else _arrivals(q.device)
    _paged_attention[(K, splits, B)](
        q, k, v, table, counts, out, parts, sums[0], sums[-1], arrived,
        scale, window, q.stride(0), table.stride(0), k.stride(0), k.stride(1), v.stride(1),
        E=E, EP=wide, SLOTS=slots, GROUP=group, ROWS=1 if group == 1 else max(16, triton.next_power_of_2(group)),
        **how, **_early(q.device),
    )  # fmt: skip
    return out


# --- turning and keeping ----------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _turn(
    x, to, x_each, to_each, cos, sin, real,
    HEADS: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Some heads turned: pairs (2i, 2i + 1), or (i, i + E/2)."""
    i = tl.arange(0, HALF)[None, :]
    if INTERLEAVED:
        one, two, angle = 2 * i, 2 * i + 1, 2 * i
    else:
        one, two, angle = i, i + E // 2, i
    h = tl.arange(0, HEADS)[:, None]
    mask = real[:, None] & (i < E // 2)
    a = tl.load(x + h * x_each + one, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + h * x_each + two, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=i < E // 2, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=i < E // 2, other=0.0).to(tl.float32)
    tl.store(to + h * to_each + one, (a * c - b * s).to(to.dtype.element_ty), mask=mask)
    tl.store(to + h * to_each + two, (b * c + a * s).to(to.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _copy(x, to, x_each, to_each, real, HEADS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr):
    h, e = tl.arange(0, HEADS)[:, None], tl.arange(0, EP)[None, :]
    mask = real[:, None] & (e < E)
    tl.store(to + h * to_each + e, tl.load(x + h * x_each + e, mask=mask), mask=mask)


@triton.jit
@no_type_check
def _place(table, positions, b, table_stride, SLOTS: tl.constexpr):
    """Block and slot of a row's next token, and whether there is one: a negative position keeps nothing."""
    position = tl.load(positions + b).to(tl.int64)
    block = tl.load(table + b * table_stride + tl.maximum(position, 0) // SLOTS).to(tl.int64)
    return block, position % SLOTS, position >= 0


@triton.jit
@no_type_check
def _store(
    k, v, pool_k, pool_v, table, positions,
    k_row, k_each, v_row, v_each, table_stride, k_block, k_head, v_block, v_head,
    K: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, SLOTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _begin(EARLY)
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    block, slot, keeps = _place(table, positions, b, table_stride, SLOTS)
    real = (head + tl.arange(0, HEADS) < K) & keeps
    to_k = pool_k + block * k_block + head * k_head + slot * E
    to_v = pool_v + block * v_block + head * v_head + slot * E
    _copy(k + b * k_row + head * k_each, to_k, k_each, k_head, real, HEADS, E, EP)
    _copy(v + b * v_row + head * v_each, to_v, v_each, v_head, real, HEADS, E, EP)


@triton.jit
@no_type_check
def _rotate(
    x, out, cos, sin, x_row, x_each, cos_row, sin_row,
    h: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    _begin(EARLY)
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    x += b * x_row + head * x_each
    out += (b * h + head) * E
    real = head + tl.arange(0, HEADS) < h
    _turn(x, out, x_each, E, cos + b * cos_row, sin + b * sin_row, real, HEADS, E, HALF, INTERLEAVED)


@triton.jit
@no_type_check
def _rotate_store(
    q, k, v, out, cos, sin, pool_k, pool_v, table, positions,
    q_row, q_each, k_row, k_each, v_row, v_each, cos_row, sin_row, table_stride, k_block, k_head, v_block, v_head,
    H: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, SLOTS: tl.constexpr,
    INTERLEAVED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """First the programs of the queries' heads, then those of the keys' and values'."""
    _begin(EARLY)
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    cos += b * cos_row
    sin += b * sin_row
    h = tl.arange(0, HEADS)
    if head < H:
        q += b * q_row + head * q_each
        _turn(q, out + (b * H + head) * E, q_each, E, cos, sin, head + h < H, HEADS, E, EP // 2, INTERLEAVED)
    else:
        head -= tl.cdiv(H, HEADS) * HEADS
        block, slot, keeps = _place(table, positions, b, table_stride, SLOTS)
        real = (head + h < K) & keeps
        to_k = pool_k + block * k_block + head * k_head + slot * E
        to_v = pool_v + block * v_block + head * v_head + slot * E
        _turn(k + b * k_row + head * k_each, to_k, k_each, k_head, cos, sin, real, HEADS, E, EP // 2, INTERLEAVED)
        _copy(v + b * v_row + head * v_each, to_v, v_each, v_head, real, HEADS, E, EP)


def _heads(B: int, heads: int) -> int:
    """Heads a program: one where there are few, for speed; several where programs would be too many and too small."""
    return 1 if B * heads <= 2048 else 8


def _pool_strides(pool_k: Tensor, pool_v: Tensor, table: Tensor) -> tuple[int, ...]:
    E = pool_k.shape[-1]
    assert pool_k.stride()[2:] == pool_v.stride()[2:] == (E, 1)
    assert table.stride(1) == 1
    return table.stride(0), *pool_k.stride()[:2], *pool_v.stride()[:2]


def store(
    k: Float[Tensor, "B K E"],
    v: Float[Tensor, "B K E"],
    pool_k: Float[Tensor, "n K block E"],
    pool_v: Float[Tensor, "n K block E"],
    table: Int[Tensor, "B m"],
    positions: Int[Tensor, " B"],
) -> None:
    """Write each row's key and value at its position. A negative position writes nothing."""
    B, K, E = k.shape
    assert k.stride(-1) == v.stride(-1) == 1
    heads = _heads(B, K)
    _store[(B, triton.cdiv(K, heads))](
        k, v, pool_k, pool_v, table, positions,
        *k.stride()[:2], *v.stride()[:2], *_pool_strides(pool_k, pool_v, table),
        K=K, HEADS=heads, E=E, EP=triton.next_power_of_2(E), SLOTS=pool_k.shape[2], num_warps=1, **_early(k.device),
    )  # fmt: skip


def rotate(x: Float[Tensor, "B h E"], cos: Float[Tensor, "B e"], sin: Float[Tensor, "B e"]) -> Float[Tensor, "B h E"]:
    """`positions.rotate` for one token a row: e = E/2 angles for half-split pairs, e = E for interleaved ones."""
    B, h, E = x.shape
    assert x.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
    out = x.new_empty(B, h, E)
    heads = _heads(B, h)
    _rotate[(B, triton.cdiv(h, heads))](
        x, out, cos, sin, *x.stride()[:2], cos.stride(0), sin.stride(0),
        h=h, HEADS=heads, E=E, HALF=triton.next_power_of_2(E) // 2, INTERLEAVED=cos.shape[1] == E, num_warps=1,
        **_early(x.device),
    )  # fmt: skip
    return out


def rotate_store(
    q: Float[Tensor, "B H E"],
    k: Float[Tensor, "B K E"],
    v: Float[Tensor, "B K E"],
    cos: Float[Tensor, "B e"],
    sin: Float[Tensor, "B e"],
    pool_k: Float[Tensor, "n K block E"],
    pool_v: Float[Tensor, "n K block E"],
    table: Int[Tensor, "B m"],
    positions: Int[Tensor, " B"],
) -> Float[Tensor, "B H E"]:
    """`store` of the turned keys and the values, and the turned queries, in one kernel."""
    (B, H, E), K = q.shape, k.shape[1]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
    out = q.new_empty(B, H, E)
    heads = _heads(B, H)
    _rotate_store[(B, triton.cdiv(H, heads) + triton.cdiv(K, heads))](
        q, k, v, out, cos, sin, pool_k, pool_v, table, positions,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0), sin.stride(0),
        *_pool_strides(pool_k, pool_v, table),
        H=H, K=K, HEADS=heads, E=E, EP=triton.next_power_of_2(E), SLOTS=pool_k.shape[2], INTERLEAVED=cos.shape[1] == E, num_warps=1,
        **_early(q.device),
    )  # fmt: skip
    return out


# --- between the products ---------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh(u)) is sigmoid(2u)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        y = tl.maximum(x, 0.0)
        if ACTIVATION == "relu2":
            y *= y
    return y


@triton.jit
@no_type_check
def _gated(gate_up, out, row_stride, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    _begin(EARLY)
    r = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + r * row_stride + f, mask=f < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up + r * row_stride + width + f, mask=f < width, other=0.0).to(tl.float32)
    tl.store(out + r * width + f, (_activate(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=f < width)


def gated(gate_up: Float[Tensor, "R _"], activation: str) -> Float[Tensor, "R F"]:
    """activation(first half) * second half."""
    R, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = gate_up.new_empty(R, width)
    block = 256 if R * width <= 65536 else 1024
    _gated[(R, triton.cdiv(width, block))](
        gate_up, out, gate_up.stride(0), width, ACTIVATION=activation, BLOCK=block, num_warps=block // 256,
        **_early(gate_up.device),
    )  # fmt: skip
    return out


@triton.jit
@no_type_check
def _add_norm(
    x, residual, weight, bias, total, out, x_stride, residual_stride, eps,
    D: tl.constexpr, DP: tl.constexpr, RMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _begin(EARLY)
    r, d = tl.program_id(0).to(tl.int64), tl.arange(0, DP)
    mask = d < D
    y = tl.load(x + r * x_stride + d, mask=mask, other=0.0).to(tl.float32)
    y += tl.load(residual + r * residual_stride + d, mask=mask, other=0.0).to(tl.float32)
    rounded = y.to(total.dtype.element_ty)
    tl.store(total + r * D + d, rounded, mask=mask)
    y = rounded.to(tl.float32)  # the norm of what the stream holds, as in two steps
    if not RMS:
        y = tl.where(mask, y - tl.sum(y, 0) / D, 0.0)
    y *= tl.rsqrt(tl.sum(y * y, 0) / D + eps)
    y *= tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + r * D + d, y.to(out.dtype.element_ty), mask=mask)


def add_norm(
    x: Float[Tensor, "R D"],
    residual: Float[Tensor, "R D"],
    weight: Float[Tensor, " D"],
    bias: Float[Tensor, " D"] | None,
    eps: float,
    kind: str,
) -> tuple[Float[Tensor, "R D"], Float[Tensor, "R D"]]:
    """residual + x, and its norm; kind is "rms" or "layer"."""
    assert kind in ("rms", "layer")
    assert x.stride(1) == residual.stride(1) == 1
    R, D = x.shape
    total, out = residual.new_empty(R, D), residual.new_empty(R, D)
    wide = triton.next_power_of_2(D)
    _add_norm[(R,)](
        x, residual, weight, bias, total, out, x.stride(0), residual.stride(0), eps,
        D=D, DP=wide, RMS=kind == "rms", num_warps=min(max(wide // 512, 1), 16), **_early(x.device),
    )  # fmt: skip
    return total, out


# --- the most likely tokens -------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _pack(value, index):
    """A number and its place as one integer that sorts by number, and among equals has the lower place on top."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
@no_type_check
def _unpack(key):
    ordered = (key >> 32).to(tl.int32)
    value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return value, 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
@no_type_check
def _best_of_groups(
    logits, bests, peaks, masses, row_stride, V,
    PART: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One part of one row: the maximum of each group of neighbours, and the sum of exponentials above the part's own."""
    _begin(EARLY)
    part, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = part * (PART // WIDTH) + tl.arange(0, PART // WIDTH)
    at = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(logits + r * row_stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    best = tl.max(x, 1)
    tl.store(bests + r * (PARTS * (PART // WIDTH)) + group, best)
    peak = tl.max(best, 0)
    mass = tl.sum(tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), 1), 0)
    tl.store(peaks + r * PARTS + part, peak)
    tl.store(masses + r * PARTS + part, mass)


@triton.jit
@no_type_check
def _top_of_row(
    logits, bests, peaks, masses, values, ids, row_stride, V,
    k: tl.constexpr, KP: tl.constexpr, PARTS: tl.constexpr, PARTSP: tl.constexpr,
    GROUPS: tl.constexpr, GROUPSP: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The k best tokens lie in the k best groups: each of those has one at least as good as any token outside them."""
    _begin(EARLY)
    r, p = tl.program_id(0).to(tl.int64), tl.arange(0, PARTSP)
    peak = tl.load(peaks + r * PARTS + p, mask=p < PARTS, other=float("-inf"))
    mass = tl.load(masses + r * PARTS + p, mask=p < PARTS, other=0.0)
    top = tl.max(peak, 0)
    whole = top + tl.log(tl.sum(mass * tl.exp(peak - top), 0))

    group, i = tl.arange(0, GROUPSP), tl.arange(0, KP)
    best = tl.load(bests + r * GROUPS + group, mask=group < GROUPS, other=float("-inf"))
    keys = tl.where(group * WIDTH < V, _pack(best, group), LOWEST)
    chosen = tl.full((KP,), 0x7FFFFFFF // WIDTH, tl.int32)  # no group: past the end
    for n in tl.range(k):
        key = tl.max(keys, 0)
        chosen = tl.where((i == n) & (key != LOWEST), _unpack(key)[1].to(tl.int32), chosen)
        keys = tl.where(keys == key, LOWEST, keys)

    at = chosen[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(logits + r * row_stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    keys = tl.where(at < V, _pack(x, at), LOWEST)
    for n in tl.range(k):
        key = tl.max(tl.max(keys, 1), 0)
        value, index = _unpack(key)
        tl.store(values + r * k + n, value - whole)
        tl.store(ids + r * k + n, index)
        keys = tl.where(keys == key, LOWEST, keys)


def top_log_probs(
    logits: Float[Tensor, "R V"], k: int, *, part: int = 4096, width: int = 32, warps: int = 4
) -> tuple[Float[Tensor, "R k"], Int[Tensor, "R k"]]:
    """The k (at most 32) largest of log_softmax(row), descending, of equals the lower id first; float32 and int64."""
    R, V = logits.shape
    assert 1 <= k <= min(V, 32)
    assert logits.stride(1) == 1
    parts = triton.cdiv(V, part)
    groups = parts * (part // width)
    bests = torch.empty(R, groups, dtype=torch.float32, device=logits.device)
    sums = torch.empty(2, R, parts, dtype=torch.float32, device=logits.device)
    _best_of_groups[(parts, R)](
        logits, bests, sums[0], sums[1], logits.stride(0), V,
        PART=part, PARTS=parts, WIDTH=width, num_warps=4, **_early(logits.device),
    )  # fmt: skip
    values = torch.empty(R, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(R, k, dtype=torch.int64, device=logits.device)
    _top_of_row[(R,)](
        logits, bests, sums[0], sums[1], values, ids, logits.stride(0), V,
        k=k, KP=triton.next_power_of_2(k), PARTS=parts, PARTSP=triton.next_power_of_2(parts),
        GROUPS=groups, GROUPSP=triton.next_power_of_2(groups), WIDTH=width, num_warps=warps, **_early(logits.device),
    )  # fmt: skip
    return values, ids
