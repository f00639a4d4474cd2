"""What happens between products: gates, and sums with the residual stream and their norms."""
# triton has no types, and kernels are a language of their own.
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from clearhead.kernels.gpu.activation import activate, knows
from clearhead.kernels.gpu.launch import pdl_options, start_kernel


@triton.jit
@no_type_check
def _gated(gate_up, out, row_stride, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_kernel(PDL)
    r = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + r * row_stride + f, mask=f < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up + r * row_stride + width + f, mask=f < width, other=0.0).to(tl.float32)
    tl.store(out + r * width + f, (activate(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=f < width)


def gated(gate_up: Float[Tensor, "R _"], activation: str) -> Float[Tensor, "R F"]:
    """activation(first half) * second half."""
    R, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    assert knows(activation)
    out = gate_up.new_empty(R, width)
    block = 256 if R * width <= 65536 else 1024
    _gated[(R, triton.cdiv(width, block))](
        gate_up, out, gate_up.stride(0), width, ACTIVATION=activation, BLOCK=block, num_warps=block // 256,
        **pdl_options(gate_up.device),
    )  # fmt: skip
    return out


@triton.jit
@no_type_check
def _add_norm(
    x, residual, weight, bias, total, out, x_stride, residual_stride, eps,
    D: tl.constexpr, DP: tl.constexpr, RMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_kernel(PDL)
    r, d = tl.program_id(0).to(tl.int64), tl.arange(0, DP)
    mask = d < D
    y = tl.load(x + r * x_stride + d, mask=mask, other=0.0).to(tl.float32)
    y += tl.load(residual + r * residual_stride + d, mask=mask, other=0.0).to(tl.float32)
    rounded = y.to(total.dtype.element_ty)
    tl.store(total + r * D + d, rounded, mask=mask)
    y = rounded.to(tl.float32)  # the norm of the rounded sum, as two operators compute it
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
        D=D, DP=wide, RMS=kind == "rms", num_warps=min(max(wide // 512, 1), 16), **pdl_options(x.device),
    )  # fmt: skip
    return total, out
