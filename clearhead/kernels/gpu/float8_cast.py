"""Tensors in 8 bits, for products on a CUDA GPU: Triton kernels that read a tensor once and write it in both orders.

The matrix units take 8-bit operands only with the summed axis last. A product's operand is summed over one axis going forward and
over the other for the gradients, so each tensor is needed as it is and turned. The kernel does both from one tile, together
with what stands right before the product (an activation, its slope, the joining of q, k and v), so that none of it is written
in 16 bits. A scale comes from the steps before; this pass's largest value is collected on the way.

Only code that holds CUDA tensors may import this module: it needs triton.
"""
# triton has no types, and kernels are a language of their own.
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

FOURS, COLUMNS, WARPS = 16, 128, 8  # of a tile; tuned on an H200


@triton.jit
@no_type_check
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
@no_type_check
def _activate(x, KIND: tl.constexpr):
    """ACTIVATIONS of feedforward.py."""
    if KIND == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if KIND == "relu2":
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return y * y
    if KIND == "silu":
        return x * _sigmoid(x)
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == "gelu_tanh":  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
@no_type_check
def _slope(x, KIND: tl.constexpr):
    """d activate / d x."""
    if KIND == "relu":
        return tl.where(x > 0, 1.0, x * 0.0)
    if KIND == "relu2":
        return 2.0 * tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if KIND == "silu":
        s = _sigmoid(x)
        return s + x * s * (1.0 - s)
    if KIND == "gelu":
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    # gelu_tanh
    s = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)


@triton.jit
@no_type_check
def pack(x0, x1, x2, x3, OUT: tl.constexpr, PTX: tl.constexpr):
    """Four numbers, already in range, as the bytes of one word."""
    # Two of them at once and not x.to(OUT), whose result is also stored: ptxas 12.8 loses one of two uses of a rounded pair.
    if PTX and tl.float8e4nv == OUT:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e5m2x2.f32 a, $2, $1; cvt.rn.satfinite.e5m2x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return _byte(x0, OUT) | (_byte(x1, OUT) << 8) | (_byte(x2, OUT) << 16) | (_byte(x3, OUT) << 24)


@triton.jit
@no_type_check
def _byte(x, OUT: tl.constexpr):
    return x.to(OUT).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
@no_type_check
def _row(
    first, second, third, before, factor, out, r, c, R, N, n1, n2, step1, step2, step3,
    KIND: tl.constexpr, PARTS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Rows r of a tile: read, activate or multiply by a slope, scale, write. What is in range, and the size before scaling."""
    inside = (r < R)[:, None] & (c < N)[None, :]
    r64 = r[:, None].to(tl.int64)
    if PARTS == 1:
        x = tl.load(first + r64 * step1 + c[None, :], mask=inside, other=0.0).to(tl.float32)
    else:  # each column lies in one part; where a mask is false nothing is read
        x = tl.load(first + r64 * step1 + c[None, :], mask=inside & (c < n1)[None, :], other=0.0).to(tl.float32)
        in2 = inside & ((c >= n1) & (c < n2))[None, :]
        x += tl.load(second + r64 * step2 + (c - n1)[None, :], mask=in2, other=0.0).to(tl.float32)
        if PARTS == 3:
            in3 = inside & (c >= n2)[None, :]
            x += tl.load(third + r64 * step3 + (c - n2)[None, :], mask=in3, other=0.0).to(tl.float32)
    if before is not None:
        x *= _slope(tl.load(before + r64 * N + c[None, :], mask=inside, other=0.0).to(tl.float32), KIND)
    else:
        x = _activate(x, KIND)
    # No number stays none, so that a run that has diverged is seen.
    scaled = tl.clamp(x * factor, -TOP, TOP, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + r64 * N + c[None, :], scaled.to(out.dtype.element_ty), mask=inside)
    return scaled, tl.abs(x)


@triton.jit
@no_type_check
def _cast(
    first, second, third, before, scale, amax, out, turned, R, N, LONG, n1, n2, step1, step2, step3,
    KIND: tl.constexpr, PARTS: tl.constexpr, TOP: tl.constexpr, FOURS: tl.constexpr, COLUMNS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One tile, written as it is and turned (rows up to LONG as zeros).

    Rows come in fours: four numbers of a column are the bytes of one word, and words are what is turned.
    """
    four = tl.program_id(1) * FOURS + tl.arange(0, FOURS)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    factor = tl.load(scale)
    x0, a0 = _row(
        first, second, third, before, factor, out, 4 * four, c, R, N, n1, n2, step1, step2, step3, KIND, PARTS, TOP
    )
    x1, a1 = _row(
        first, second, third, before, factor, out, 4 * four + 1, c, R, N, n1, n2, step1, step2, step3, KIND, PARTS, TOP
    )
    x2, a2 = _row(
        first, second, third, before, factor, out, 4 * four + 2, c, R, N, n1, n2, step1, step2, step3, KIND, PARTS, TOP
    )
    x3, a3 = _row(
        first, second, third, before, factor, out, 4 * four + 3, c, R, N, n1, n2, step1, step2, step3, KIND, PARTS, TOP
    )
    words = pack(x0, x1, x2, x3, out.dtype.element_ty, PTX)
    if amax is not None:
        largest = tl.maximum(tl.maximum(a0, a1), tl.maximum(a2, a3))
        tl.atomic_max(amax, tl.max(tl.max(largest, 1), 0), sem="relaxed")
    there = c[:, None].to(tl.int64) * (LONG // 4) + four[None, :]
    tl.store(turned + there, tl.trans(words), mask=(c < N)[:, None] & (four < LONG // 4)[None, :])


def cast(
    parts: list[Tensor], before: Tensor | None, kind: str, scale: Tensor, amax: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`parts` side by side, (R, N), times `scale` in 8 bits: (R, N) and (N, R up to a multiple of 16).

    With `kind` their activation; with `before` they are gradients and `before` what was activated. `amax` rises to the largest
    value there is, before scaling.
    """
    rows = [part.flatten(0, -2) for part in parts]
    R, N = len(rows[0]), sum(part.shape[1] for part in rows)
    out = torch.empty(R, N, dtype=dtype, device=scale.device)
    words = torch.empty(N, -(-R // 16) * 4, dtype=torch.int32, device=scale.device)
    _launch(rows, before, kind, scale, amax, out, words)
    return out, words.view(dtype)


def cast_into(x: Tensor, scale: Tensor, out: Tensor, turned: Tensor) -> None:
    """The same for one tensor, into memory that is there."""
    _launch([x], None, "", scale, None, out, turned.view(torch.int32))


def _launch(
    rows: list[Tensor],
    before: Tensor | None,
    kind: str,
    scale: Tensor,
    amax: Tensor | None,
    out: Tensor,
    words: Tensor,
) -> None:
    (R, N), long = out.shape, 4 * words.shape[1]
    rows = [part if part.stride(1) == 1 else part.contiguous() for part in rows]
    a, b, c = (rows[min(i, len(rows) - 1)] for i in range(3))
    n1 = a.shape[1]
    n2 = n1 + (b.shape[1] if len(rows) > 1 else 0)
    _cast[triton.cdiv(N, COLUMNS), triton.cdiv(long, 4 * FOURS)](
        *(a, b, c, before, scale, amax, out, words, R, N, long, n1, n2, a.stride(0), b.stride(0), c.stride(0)),
        KIND=kind, PARTS=len(rows), TOP=torch.finfo(out.dtype).max, FOURS=FOURS, COLUMNS=COLUMNS, PTX=out.is_cuda, num_warps=WARPS,
    )  # fmt: skip
