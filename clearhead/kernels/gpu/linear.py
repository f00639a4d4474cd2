"""x W^T + b for a few rows; W in 32 or 16 bits, or packed in 8 or 4 (quantization/integer.py)."""
# triton has no types, and kernels are a language of their own.
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from clearhead.kernels.gpu.activation import activate, knows
from clearhead.kernels.gpu.launch import pdl_options, start_kernel


@triton.jit
@no_type_check
def _finish_linear(y, bias, out, r, n, R, N, ACTIVATION: tl.constexpr):
    """Add the bias to y (rows r, outputs n), activate, and write."""
    real = (r < R)[:, None] & (n < N)[None, :]
    where = r[:, None] * N + n[None, :]
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    y = activate(y, ACTIVATION)
    tl.store(out + where, y.to(out.dtype.element_ty), mask=real)


@triton.jit
@no_type_check
def _linear_sum(
    x, weight, bias, out, R, N,
    D: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    AHEAD: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply and sum: each thread keeps its own part of every sum; the parts are added once, at the end.

    Weights are read one block ahead; with AHEAD the first block is read before the previous kernel has ended.
    """
    first = tl.program_id(0) * OUTS
    n = tl.minimum(first + tl.arange(0, OUTS), N - 1)[None, :, None].to(
        tl.int64
    )  # clamped, so that loads of weights need no mask
    r = tl.minimum(tl.arange(0, ROWS), R - 1)[:, None, None]
    d = tl.arange(0, BLOCK)[None, None, :]
    total = tl.zeros((ROWS, OUTS, BLOCK), tl.float32)
    if not AHEAD:
        start_kernel(PDL)
    w = tl.load(weight + n * D + d, mask=d < D, other=0.0, eviction_policy="evict_first")
    if AHEAD:
        start_kernel(PDL)
    for _ in tl.range(0, D, BLOCK, loop_unroll_factor=UNROLL):
        y = tl.load(x + r * D + d, mask=d < D, other=0.0)
        d += BLOCK
        after = tl.load(weight + n * D + d, mask=d < D, other=0.0, eviction_policy="evict_first")
        total += w.to(tl.float32) * y.to(tl.float32)
        w = after
    n = first + tl.arange(0, OUTS)
    _finish_linear(tl.sum(total, 2), bias, out, tl.arange(0, ROWS), n, R, N, ACTIVATION)


@triton.jit
@no_type_check
def _linear_dot(
    x, weight, bias, out, R, N,
    D: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """By the matrix units, which need at least 16 rows: the others are padding."""
    start_kernel(PDL)
    first = tl.program_id(0) * OUTS
    n = tl.minimum(first + tl.arange(0, OUTS), N - 1).to(tl.int64)
    r = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, OUTS), tl.float32)
    for start in tl.range(0, D, BLOCK, num_stages=STAGES):
        d = start + tl.arange(0, BLOCK)
        if D % BLOCK == 0:
            w = tl.load(weight + n[:, None] * D + d[None, :], eviction_policy="evict_first")
            y = tl.load(x + r[:, None] * D + d[None, :], mask=(r < R)[:, None], other=0.0)
        else:
            w = tl.load(weight + n[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
            y = tl.load(x + r[:, None] * D + d[None, :], mask=(r < R)[:, None] & (d < D)[None, :], other=0.0)
        total = tl.dot(y, tl.trans(w), total, input_precision="ieee")
    _finish_linear(total, bias, out, r, first + tl.arange(0, OUTS), R, N, ACTIVATION)


def linear_plan(R: int, N: int, D: int, dtype: torch.dtype) -> dict[str, Any] | None:
    """How `linear` splits a product; None if cuBLAS is as fast, or for more than 64 rows."""
    half = dtype.itemsize == 2
    if R > 16:
        if not half or R > 64 or N * D > 4e6:
            return None
        outs, block = (16, 256) if D >= 2048 else (32, 128)
        return dict(kernel="dot", OUTS=outs, BLOCK=block, STAGES=5, num_warps=4)
    if half and (R > 4 or (R > 2 and N * D > 2e7)):
        if N >= 8192:
            return dict(kernel="dot", OUTS=64, BLOCK=128, STAGES=4, num_warps=4)
        return dict(kernel="dot", OUTS=8, BLOCK=256, STAGES=4, num_warps=1) if N * D < 8e6 or N % 8 else None
    narrow = N < 1024 < D  # few, long sums: more threads for each
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
    activation: str | None = None,
    plan: dict[str, Any] | None = None,
) -> Float[Tensor, "R N"]:
    """f(x W^T (+ bias)) for 1 to 64 rows; weight is contiguous. `plan` is `linear_plan`'s, or another one."""
    (R, D), N = x.shape, weight.shape[0]
    how = plan or linear_plan(R, N, D, weight.dtype)
    assert how is not None, "a product that linear_plan leaves to cuBLAS"
    assert R <= 64
    assert weight.is_contiguous()
    assert knows(activation)
    x = x.contiguous()
    out = x.new_empty(R, N)
    how = how | pdl_options(x.device) | dict(ACTIVATION=activation or "")
    grid = (triton.cdiv(N, how["OUTS"]),)
    if how.pop("kernel") == "dot":
        rows = max(16, triton.next_power_of_2(R))
        _linear_dot[grid](x, weight, bias, out, R, N, D=D, ROWS=rows, **how)
    else:
        # A parameter is not written by the previous kernel; another tensor (a cast weight, say) may be.
        ahead, rows = isinstance(weight, torch.nn.Parameter), triton.next_power_of_2(R)
        _linear_sum[grid](x, weight, bias, out, R, N, D=D, ROWS=rows, AHEAD=ahead, **how)
    return out


@triton.jit
@no_type_check
def _finish_packed(total, bias, out, r, n, N):
    """Sum over groups, add the bias, and write outputs n of row r."""
    y = tl.sum(total, 1)
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + r * N + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
@no_type_check
def _linear_int8(
    x, weight, scales, bias, out, R, N, D: tl.constexpr, OUTS: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Row after row; from the second row on, weights are read from the L1 cache."""
    start_kernel(PDL)
    n_groups: tl.constexpr = (D + 63) // 64
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    own = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    g, e = tl.arange(0, GROUPS)[None, :], tl.arange(0, 64)[None, None, :]
    for r in tl.range(R):
        total = tl.zeros((OUTS, GROUPS), tl.float32)
        for start in tl.range(0, n_groups, GROUPS):
            at = start + g
            d = at[:, :, None] * 64 + e
            w = tl.load(weight + own[:, :, None] * D + d, mask=d < D, other=0)
            y = tl.load(x + r * D + d, mask=d < D, other=0.0)
            scale = tl.load(scales + own * n_groups + at, mask=at < n_groups, other=0.0)
            total += tl.sum(w.to(tl.float32) * y.to(tl.float32), 2) * scale.to(tl.float32)
        _finish_packed(total, bias, out, r, n, N)


@triton.jit
@no_type_check
def _unpack_pair(pair, dtype: tl.constexpr):
    """Two neighbours that were read as one integer, the first in its low half, as float32."""
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
    D: tl.constexpr, OUTS: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same with eight weights a word: (sum of u x) * scale + (sum of x) * minimum."""
    start_kernel(PDL)
    n_groups: tl.constexpr = D // 32
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    own = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    g, four = tl.arange(0, GROUPS)[None, :], tl.arange(0, 4)
    for r in tl.range(R):
        total = tl.zeros((OUTS, GROUPS), tl.float32)
        for start in tl.range(0, n_groups, GROUPS):
            at = start + g
            real = at < n_groups
            word = at[:, :, None] * 4 + four[None, None, :]
            w = tl.load(words + own[:, :, None] * (D // 8) + word, mask=real[:, :, None], other=0)
            pair = word[:, :, :, None] * 4 + four[None, None, None, :]
            pair = tl.load(pairs + r * (D // 2) + pair, mask=real[:, :, None, None], other=0)
            even, odd = _unpack_pair(pair, out.dtype.element_ty)
            byte = w[:, :, :, None] >> (8 * four[None, None, None, :])
            dots = (byte & 15).to(tl.float32) * even + ((byte >> 4) & 15).to(tl.float32) * odd
            scale = tl.load(scales + own * n_groups + at, mask=real, other=0.0).to(tl.float32)
            least = tl.load(mins + own * n_groups + at, mask=real, other=0.0).to(tl.float32)
            total += tl.sum(tl.sum(dots, 3), 2) * scale + tl.sum(tl.sum(even + odd, 3), 2) * least
        _finish_packed(total, bias, out, r, n, N)


def linear_int8(
    x: Float[Tensor, "R D"],
    q: Int8[Tensor, "N D"],
    scales: Float[Tensor, "N _"],
    bias: Float[Tensor, " N"] | None = None,
) -> Float[Tensor, "R N"]:
    """x W^T (+ bias) for 1 to 8 rows, W in the int8 format of quantization/integer.py."""
    (R, D), N = x.shape, q.shape[0]
    out = x.new_empty(R, N)
    _linear_int8[(N,)](
        x.contiguous(), q, scales, bias, out, R, N, D=D, OUTS=1, GROUPS=64, num_warps=8, **pdl_options(x.device)
    )  # fmt: skip
    return out


def linear_int4(
    x: Float[Tensor, "R D"],
    q: UInt8[Tensor, "N _"],
    scales: Float[Tensor, "N g"],
    mins: Float[Tensor, "N g"],
    bias: Float[Tensor, " N"] | None = None,
) -> Float[Tensor, "R N"]:
    """x W^T (+ bias) for 1 to 8 rows, W in the int4 format of quantization/integer.py."""
    (R, D), N = x.shape, q.shape[0]
    out = x.new_empty(R, N)
    pairs = x.contiguous().view(torch.int64 if x.dtype == torch.float32 else torch.int32)
    outs = 4 if N >= 8192 else 2
    _linear_int4[(triton.cdiv(N, outs),)](
        pairs, q.view(torch.int32), scales, mins, bias, out, R, N,
        D=D, OUTS=outs, GROUPS=8, num_warps=1, **pdl_options(x.device),
    )  # fmt: skip
    return out
