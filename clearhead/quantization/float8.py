"""Products in 8 bits, for training on GPUs that multiply them twice as fast as 16 (Micikevicius et al. 2022).

Of y = x W^T and both its gradients, every operand is rounded to 8 bits: x and W to e4m3 (4 significant bits), gradients to e5m2
(3 bits, a wider range). Sums, results and all that lies between the products stay as they were. A scale brings a tensor's
largest value near the format's; it comes from the largest of the steps before, so that no tensor is read twice (gpu_fp8.py
collects this step's on the way). Weights are rounded once a step, by a scale of their own largest value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import ConfigError
from clearhead.layers.embedding import TokenHead
from clearhead.layers.linear import FusedLinear, Linear

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
STEPS = 16  # a scale fits the largest value of so many steps,
ROOM = 2.0  # and values up to so many times as large; what is larger still becomes the largest there is
MULTIPLE = 16  # what the matrix units ask of a width


class Product:
    """What one product needs besides its operands: the weight in 8 bits, as it is and turned, and its scales."""

    def __init__(self, weight: Tensor) -> None:
        d_out, d_in = weight.shape
        self.weight = torch.empty(d_out, d_in, dtype=FORWARD, device=weight.device)
        self.turned = torch.empty(d_in, d_out, dtype=FORWARD, device=weight.device)
        # Of x and of the gradient; apart, since a compiler takes views of one memory that is written to for dependent.
        self.largest = tuple(torch.zeros((), device=weight.device) for _ in range(2))
        self.scales = self.inverses = (
            weight.new_ones(()),
        ) * 3  # of x, the gradient and the weight: views, see Products

    def tensors(self) -> tuple[Tensor, ...]:
        return self.weight, self.turned, *self.largest, *self.scales[:2], *self.inverses


class Products:
    """All products of a model's blocks, and its head's, in 8 bits. `refresh` after every change of the weights."""

    def __init__(self, model: nn.Module) -> None:
        modules = {
            name: module
            for name, module in model.named_modules()
            if "blocks." in name and isinstance(module, Linear | FusedLinear)
        }
        check_device(next(model.parameters()).device)
        check_widths({name: module.weight for name, module in modules.items()})
        self.modules = list(modules.values())
        self.weights = [module.weight for module in modules.values()]
        self.each = [Product(weight) for weight in self.weights]
        device, n = self.weights[0].device, len(self.each)
        self.history = torch.zeros(STEPS, 2 * n, device=device)  # the largest values of each step
        self.scales = torch.ones(3 * n, 4, device=device)  # 16 bytes apart: the products read from such places only
        self.inverses = torch.ones(3 * n, 4, device=device)
        top = [torch.finfo(dtype).max / ROOM for dtype in (FORWARD, BACKWARD)]
        self.top = torch.tensor([*top * n, *[torch.finfo(FORWARD).max] * n], device=device)
        for i, (product, module) in enumerate(zip(self.each, self.modules, strict=True)):
            places = 2 * i, 2 * i + 1, 2 * n + i
            product.scales = tuple(self.scales[place, 0] for place in places)
            product.inverses = tuple(self.inverses[place, 0] for place in places)
            module.product8 = product
        for head in (module for module in model.modules() if isinstance(module, TokenHead)):
            head.eight = True

    def calibrate(self, run: Callable[[], Any]) -> None:
        """The first scales, from a pass in 16 bits: `run` computes gradients, which are the caller's to throw away."""

        def watch(product: Product) -> Any:
            def see(largest: Tensor, x: Tensor) -> None:
                largest.copy_(torch.maximum(largest, x.detach().abs().amax()))

            def hook(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor | tuple[Tensor, ...]) -> None:
                see(product.largest[0], inputs[0])
                for part in (out,) if isinstance(out, Tensor) else out:
                    part.register_hook(lambda grad: see(product.largest[1], grad))

            return hook

        hooks = [module.register_forward_hook(watch(p)) for p, module in zip(self.each, self.modules, strict=True)]
        for module in self.modules:
            module.product8 = None
        try:
            run()
        finally:
            for hook, product, module in zip(hooks, self.each, self.modules, strict=True):
                hook.remove()
                module.product8 = product
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """A step has passed: scales follow what was seen in it, and weights are rounded anew."""
        seen = [largest for product in self.each for largest in product.largest]
        self.history.copy_(torch.cat([torch.stack(seen)[None], self.history[:-1]]))
        torch._foreach_zero_(seen)  # pyright: ignore[reportPrivateUsage]
        self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Scales and rounded weights, from the history and the weights that are there."""
        from clearhead.kernels.gpu import float8_cast as gpu_fp8

        of_weights = torch.stack(torch._foreach_norm(self.weights, float("inf")))  # pyright: ignore[reportPrivateUsage]
        largest = torch.cat([self.history.amax(0), of_weights])
        scales = torch.where(largest > 0, self.top / largest, 1.0)
        self.scales[:, 0] = scales
        self.inverses[:, 0] = 1 / scales
        for product, weight in zip(self.each, self.weights, strict=True):
            gpu_fp8.cast_into(weight, product.scales[2], product.weight, product.turned)


def check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(f"fp8 products need a CUDA GPU; got device {device.type!r}; set train.precision=auto")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise ConfigError(
            f"fp8 products need a GPU of compute capability 8.9 or later (Ada, Hopper); {torch.cuda.get_device_name(device)} "
            f"has {capability[0]}.{capability[1]}; set train.precision=bfloat16"
        )


def check_widths(weights: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        if any(width % MULTIPLE for width in weight.shape):
            raise ConfigError(
                f"fp8 products need widths that {MULTIPLE} divides; {name} is {weight.shape[1]} -> {weight.shape[0]}; "
                f"change d_model, d_head or d_ff, or set train.precision=bfloat16"
            )


@torch.library.custom_op(
    "clearhead::cast8",
    mutates_args=("largest",),
    schema="(Tensor[] parts, Tensor? before, str kind, Tensor scale, Tensor(a!) largest, ScalarType dtype) -> (Tensor, Tensor)",
)
def cast8(
    parts: list[Tensor], before: Tensor | None, kind: str, scale: Tensor, largest: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See gpu_fp8.cast."""
    from clearhead.kernels.gpu import float8_cast as gpu_fp8

    return gpu_fp8.cast(parts, before, kind, scale, largest, dtype)


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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, sizes: list[int]) -> tuple[Tensor, ...]:
    """x W^T + b, split into parts of these sizes."""
    return _Linear.apply(x, weight, bias, sizes, *product.tensors())  # type: ignore[no-any-return]


def feedforward(x: Tensor, up: Linear, down: Linear, kind: str) -> Tensor:
    """down(f(up(x))), f by its name."""
    assert up.product8 is not None
    assert down.product8 is not None
    tensors = *up.product8.tensors(), *down.product8.tensors()
    return _FeedForward.apply(x, up.weight, up.bias, down.weight, down.bias, kind, *tensors)  # type: ignore[no-any-return]
