"""fp8 products with their gradients, on plain tensors: operands in 8 bits, sums and results in 16 or 32.

x and weights are rounded to e4m3 (4 significant bits), gradients to e5m2 (3 bits, a wider range).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # the matrix units take widths that this divides


@torch.library.custom_op(
    "clearhead::cast8",
    mutates_args=("largest",),
    schema="(Tensor[] parts, Tensor? before, str kind, Tensor scale, Tensor(a!) largest, ScalarType dtype) -> (Tensor, Tensor)",
)
def cast8(
    parts: list[Tensor], before: Tensor | None, kind: str, scale: Tensor, largest: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See gpu/float8_cast.py; a compiler does not look inside."""
    from clearhead.kernels.gpu import float8_cast

    return float8_cast.cast(parts, before, kind, scale, largest, dtype)


@cast8.register_fake
def _(
    parts: list[Tensor], before: Tensor | None, kind: str, scale: Tensor, largest: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    R, N = parts[0].numel() // parts[0].shape[-1], sum(part.shape[-1] for part in parts)
    like = parts[0]
    return like.new_empty(R, N, dtype=dtype), like.new_empty(N, -(-R // 16) * 16, dtype=dtype)


def multiply(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None, *, exact: bool = False
) -> Tensor:
    """a b^T of 8-bit operands, both with the summed axis last; scales are what to multiply by afterwards.

    Sums have 14 bits, or all with `exact`, which takes up to 18% longer.
    """
    bias = None if bias is None else bias.bfloat16()
    return torch._scaled_mm(  # pyright: ignore[reportPrivateUsage]
        *(a, b.t(), scale_a, scale_b, bias), out_dtype=torch.bfloat16, use_fast_accum=not exact
    )


class _Linear(torch.autograd.Function):
    """x W^T + b in 8 bits; the result in parts, since what comes back for them can be joined where it is rounded."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        w8, turned_w, largest_x, largest_g, scale_x, scale_g, back_x, back_g, back_w = tensors
        x8, turned_x = cast8([x], None, "", scale_x, largest_x, FORWARD)
        ctx.save_for_backward(turned_x, turned_w, back_x, back_w, scale_g, back_g, largest_g)
        ctx.dtype, ctx.shape, ctx.biased = x.dtype, x.shape, bias is not None
        y = multiply(x8, w8, back_x, back_w, bias).view(*x.shape[:-1], -1)
        return y.split(sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        turned_x, turned_w, back_x, back_w, scale_g, back_g, largest_g = ctx.saved_tensors
        g8, turned_g = cast8(list(grads), None, "", scale_g, largest_g, BACKWARD)
        dx = multiply(g8, turned_w, back_g, back_w)
        dw = multiply(turned_g, turned_x, back_g, back_x)
        db = torch.cat([grad.flatten(0, -2).sum(0, dtype=torch.float32) for grad in grads]) if ctx.biased else None
        return dx.view(ctx.shape).to(ctx.dtype), dw.float(), db, *(None,) * 10


class _FeedForward(torch.autograd.Function):
    """down(f(up(x))): the activation is never written in 16 bits, nor is the gradient behind it."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        kind: str,
        *tensors: Tensor,
    ) -> Tensor:
        up8, turned_up, largest_x, largest_u, scale_x, scale_u, back_x, back_u, back_up = tensors[:9]
        down8, turned_down, largest_h, largest_g, scale_h, scale_g, back_h, back_g, back_down = tensors[9:]
        x8, turned_x = cast8([x], None, "", scale_x, largest_x, FORWARD)
        u = multiply(x8, up8, back_x, back_up, up_bias)
        h8, turned_h = cast8([u], None, kind, scale_h, largest_h, FORWARD)
        y = multiply(h8, down8, back_h, back_down, down_bias)
        ctx.save_for_backward(
            *(turned_x, u, turned_h, turned_up, turned_down, back_x, back_up, back_h, back_down),
            *(scale_u, back_u, largest_u, scale_g, back_g, largest_g),
        )
        ctx.dtype, ctx.shape, ctx.kind, ctx.biased = (
            x.dtype,
            x.shape,
            kind,
            (up_bias is not None, down_bias is not None),
        )
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        turned_x, u, turned_h, turned_up, turned_down, back_x, back_up, back_h, back_down, *of_grads = ctx.saved_tensors
        scale_u, back_u, largest_u, scale_g, back_g, largest_g = of_grads
        g8, turned_g = cast8([grad], None, "", scale_g, largest_g, BACKWARD)
        dh = multiply(g8, turned_down, back_g, back_down)
        d_down = multiply(turned_g, turned_h, back_g, back_h)
        du8, turned_du = cast8([dh], u, ctx.kind, scale_u, largest_u, BACKWARD)
        dx = multiply(du8, turned_up, back_u, back_up)
        d_up = multiply(turned_du, turned_x, back_u, back_x)
        d_up_bias = turned_du.float().sum(1) * back_u if ctx.biased[0] else None
        d_down_bias = grad.flatten(0, -2).sum(0, dtype=torch.float32) if ctx.biased[1] else None
        dx = dx.view(ctx.shape).to(ctx.dtype)
        return dx, d_up.float(), d_up_bias, d_down.float(), d_down_bias, *(None,) * 19


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: tuple[Tensor, ...], sizes: list[int]
) -> tuple[Tensor, ...]:
    """x W^T + b, split into parts of these sizes. `scales`: see quantization/float8.py, Product.tensors."""
    return _Linear.apply(x, weight, bias, sizes, *scales)  # type: ignore[no-any-return]


def feedforward(
    x: Tensor,
    up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None],
    kind: str,
    scales: tuple[Tensor, ...],
) -> Tensor:
    """down(f(up(x))) with f named by `kind`; `up` and `down` are weight and bias, `scales` those of up, then of down."""
    return _FeedForward.apply(x, *up, *down, kind, *scales)  # type: ignore[no-any-return]


def cast_into(x: Tensor, scale: Tensor, out: Tensor, turned: Tensor) -> None:
    """x times scale in 8 bits, as it is and transposed."""
    from clearhead.kernels.gpu import float8_cast

    float8_cast.cast_into(x, scale, out, turned)
