"""Tensors in 8 bits, for products on a CUDA GPU: a Triton kernel that reads a tensor once and writes it plain and transposed.

The matrix units take 8-bit operands only with the summed axis last. The forward pass sums an operand over one axis and the
gradients over the other, so both layouts are needed. The kernel writes both from one tile. It also computes what comes right
before the product (an activation, its derivative, the concatenation of q, k and v), so that none of it is written in 16 bits. The
scale comes from earlier steps; the largest value of this pass is collected on the way.

Import this only where tensors are on a CUDA GPU: it needs triton.
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

from clearhead.kernels.gpu.activation import activate, activation_slope, knows

FOURS, COLUMNS, WARPS = 16, 128, 8  # of a tile; tuned on an H200


@triton.jit
@no_type_check
def pack(x0, x1, x2, x3, OUT: tl.constexpr, PTX: tl.constexpr):
    """Four numbers, already in range, as the four bytes of one word."""
    # Not x.to(OUT), whose result is also stored: ptxas 12.8 loses one of the two uses of a rounded pair.
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
    """Rows r of a tile: read, activate (or multiply by the derivative), scale, write. Returns the scaled rows, and absolute
    values before scaling."""
    inside = (r < R)[:, None] & (c < N)[None, :]
    r64 = r[:, None].to(tl.int64)
    if PARTS == 1:
        x = tl.load(first + r64 * step1 + c[None, :], mask=inside, other=0.0).to(tl.float32)
    else:  # each column belongs to one part; masked loads read nothing
        x = tl.load(first + r64 * step1 + c[None, :], mask=inside & (c < n1)[None, :], other=0.0).to(tl.float32)
        in2 = inside & ((c >= n1) & (c < n2))[None, :]
        x += tl.load(second + r64 * step2 + (c - n1)[None, :], mask=in2, other=0.0).to(tl.float32)
        if PARTS == 3:
            in3 = inside & (c >= n2)[None, :]
            x += tl.load(third + r64 * step3 + (c - n2)[None, :], mask=in3, other=0.0).to(tl.float32)
    if before is not None:
        x *= activation_slope(tl.load(before + r64 * N + c[None, :], mask=inside, other=0.0).to(tl.float32), KIND)
    else:
        x = activate(x, KIND)
    # NaN stays NaN, so that a diverged run is seen.
    scaled = tl.clamp(x * factor, -TOP, TOP, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + r64 * N + c[None, :], scaled.to(out.dtype.element_ty), mask=inside)
    return scaled, tl.abs(x)


@triton.jit
@no_type_check
def _cast(
    first, second, third, before, scale, amax, out, transposed, R, N, LONG, n1, n2, step1, step2, step3,
    KIND: tl.constexpr, PARTS: tl.constexpr, TOP: tl.constexpr, FOURS: tl.constexpr, COLUMNS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One tile, written plain and transposed (padded with zeros up to LONG rows).

    Rows are read in fours: four numbers of a column are the bytes of one word, and words are transposed.
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
    tl.store(transposed + there, tl.trans(words), mask=(c < N)[:, None] & (four < LONG // 4)[None, :])


def cast(
    parts: list[Tensor], before: Tensor | None, kind: str, scale: Tensor, amax: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`parts` side by side, (R, N), times `scale` in 8 bits: (R, N), and transposed, (N, R padded to a multiple of 16).

    `kind` is the activation to apply ("": none). With `before` the parts are gradients of activated values, and `before` the
    values before the activation. `amax` becomes the maximum of itself and the largest absolute value before scaling.
    """
    assert knows(kind or None)
    rows = [part.flatten(0, -2) for part in parts]
    R, N = len(rows[0]), sum(part.shape[1] for part in rows)
    out = torch.empty(R, N, dtype=dtype, device=scale.device)
    words = torch.empty(N, -(-R // 16) * 4, dtype=torch.int32, device=scale.device)
    _launch(rows, before, kind, scale, amax, out, words)
    return out, words.view(dtype)


def cast_into(x: Tensor, scale: Tensor, out: Tensor, transposed: Tensor) -> None:
    """The same for one tensor, written into given memory."""
    _launch([x], None, "", scale, None, out, transposed.view(torch.int32))


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
