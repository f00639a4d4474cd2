"""Products of many rows in float32 on the CPU, by oneDNN. It comes with torch, which uses MKL for them by default.

Measured on a core with AVX-512, it takes 0.8 to 0.9 of MKL's time for the forward product and for the input's gradient. For the
weight's gradient neither is ahead, and MKL stays. It applies an activation while results are in the cache. Weights stay in place.
Copied into its own layout beforehand they win another 3 to 5%, but are in memory twice: `laid_out`, for callers who ask for it.

`torch.backends.mkldnn.enabled = False` turns it off.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.kernels.checks import has_forward_gradients
from clearhead.limits import ONEDNN_ROWS, ONEDNN_WEIGHT

ACTIVATIONS = {"relu": ("relu", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", "")}
# Where there is no MKL, torch itself takes oneDNN.
HAS_BOTH = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is faster for these plain tensors."""
    return (
        HAS_BOTH
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() >= ONEDNN_ROWS * x.shape[-1] > 0
        and weight.numel() <= ONEDNN_WEIGHT
        and torch._C._get_mkldnn_enabled()  # pyright: ignore[reportPrivateUsage]
        and not has_forward_gradients()
    )


def knows(activation: str | None) -> bool:
    """Whether `linear` computes this activation here: only without gradients."""
    return activation is None or (activation in ACTIVATIONS and not torch.is_grad_enabled())


def linear(
    x: Float[Tensor, "*_ D"],
    weight: Float[Tensor, "N D"],
    bias: Float[Tensor, " N"] | None,
    activation: str | None = None,
) -> Float[Tensor, "*_ N"]:
    """f(x W^T + b), with gradients where they are enabled; f must then be none."""
    if torch.is_grad_enabled():
        assert activation is None
        return OneDnnProduct.apply(x, weight, bias)  # type: ignore[no-any-return]
    return _product(x, _laid.find(weight), bias, *(("none", "") if activation is None else ACTIVATIONS[activation]))


# By id(weight): the weight (held, so that the id stays its own), its version, and the copy.
Copies = dict[int, tuple[Tensor, int, Tensor]]


@contextmanager
def laid_out(copies: Copies | None = None) -> Generator[None]:
    """Inside, in this thread, weights are copied into oneDNN's own layout at their first product without gradients.

    Given `copies` are used, and new ones are added to them, for callers who run a model again and again.
    """
    before, _laid.copies = _laid.copies, {} if copies is None else copies
    try:
        yield
    finally:
        _laid.copies = before


class Laid(threading.local):
    copies: Copies | None = None

    def find(self, weight: Tensor) -> Tensor:
        if self.copies is None or weight.is_inference():  # an inference tensor has no version, so a change is not seen
            return weight
        held = self.copies.get(id(weight))
        if held is None or held[1] != weight._version:
            copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
            held = self.copies[id(weight)] = weight, weight._version, copy
        return held[2]


_laid = Laid()


class OneDnnProduct(torch.autograd.Function):
    """x W^T + b with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad, rows = grads[0].flatten(0, -2), x.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        dx = dweight = None
        if wants_x:
            # For a gradient of the gradient: torch can differentiate its own product, not oneDNN's.
            dx = grad @ weight if torch.is_grad_enabled() else _product(grad, weight.T, None)
        if wants_weight:
            dweight = grad.T @ rows
        return None if dx is None else dx.view_as(x), dweight, grad.sum(0) if ctx.has_bias and wants_bias else None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none", form: str = "") -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], form)
