"""What stands between the products: gates, sums with the residual stream and norms."""
# triton has no types, and kernels are a language of their own.
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from clearhead.kernels.gpu.launch import begin, early

ACTIVATIONS = ("relu", "relu2", "silu", "gelu", "gelu_tanh")


def knows(activation: str | None) -> bool:
    """Whether `activate` computes it; None: no activation."""
    return activation is None or activation in ACTIVATIONS


@triton.jit
@no_type_check
def activate(x, ACTIVATION: tl.constexpr):
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
    begin(EARLY)
    r = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + r * row_stride + f, mask=f < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up + r * row_stride + width + f, mask=f < width, other=0.0).to(tl.float32)
    tl.store(out + r * width + f, (activate(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=f < width)


def gated(gate_up: Float[Tensor, "R _"], activation: str) -> Float[Tensor, "R F"]:
    """activation(first half) * second half."""
    R, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = gate_up.new_empty(R, width)
    block = 256 if R * width <= 65536 else 1024
    _gated[(R, triton.cdiv(width, block))](
        gate_up, out, gate_up.stride(0), width, ACTIVATION=activation, BLOCK=block, num_warps=block // 256,
        **early(gate_up.device),
    )  # fmt: skip
    return out


@triton.jit
@no_type_check
def _add_norm(
    x, residual, weight, bias, total, out, x_stride, residual_stride, eps,
    D: tl.constexpr, DP: tl.constexpr, RMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
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
        D=D, DP=wide, RMS=kind == "rms", num_warps=min(max(wide // 512, 1), 16), **early(x.device),
    )  # fmt: skip
    return total, out
