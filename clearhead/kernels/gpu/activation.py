"""Activations and their derivatives, for kernels that compute them on the way."""
# triton has no types, and kernels are a language of their own.
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "relu2")


def knows(activation: str | None) -> bool:
    """Whether `activate` computes it; None: no activation. Callers ask this first."""
    return activation is None or activation in ACTIVATIONS


@triton.jit
@no_type_check
def activate(x, KIND: tl.constexpr):
    """The activation of that name; "" is none. Another name does not compile."""
    if KIND == "":
        y = x
    elif KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(KIND == "relu" or KIND == "relu2", "an activation that this kernel does not know")
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if KIND == "relu2":
            y *= y
    return y


@triton.jit
@no_type_check
def activation_slope(x, KIND: tl.constexpr):
    """The derivative of `activate` at x. Another name does not compile."""
    if KIND == "":
        y = x * 0.0 + 1.0
    elif KIND == "relu":
        y = tl.where(x > 0, 1.0, x * 0.0)
    elif KIND == "relu2":
        y = 2.0 * tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "silu":
        s = tl.sigmoid(x)
        y = s + x * s * (1.0 - s)
    elif KIND == "gelu":
        y = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        tl.static_assert(KIND == "gelu_tanh", "an activation that this kernel does not know")
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return y
