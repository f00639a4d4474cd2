"""fp8 training: the products of a model's blocks in 8 bits, twice as fast on some GPUs as 16 (Micikevicius et al. 2022).

`Products(model)` swaps in modules whose forward and backward products round every operand: x and W to e4m3 (4 significant bits),
gradients to e5m2 (3 bits, a wider range). Sums, results and everything between the products stay as they were. A scale brings a
tensor's largest value near the format's largest. It follows the largest values of the steps before, so no tensor is read twice.
Weights are rounded once a step, by their own largest value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.errors import ConfigError
from clearhead.kernels import float8
from clearhead.kernels.float8 import BACKWARD, FORWARD, MULTIPLE
from clearhead.layers.block import FeedForward
from clearhead.layers.embedding import TokenHead
from clearhead.layers.linear import FusedLinear, Linear
from clearhead.quantization.model_weights import example_weight

STEPS = 16  # a scale fits the largest value of so many steps,
ROOM = 2.0  # and values up to so many times as large; larger values are clipped


class Product:
    """What one product needs beside its operands: the weight in 8 bits, as it is and transposed, and its scales."""

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
        check_device(example_weight(model).device)
        check_widths({name: module.weight for name, module in modules.items()})
        self.modules: list[Any] = list(modules.values())
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
            swap(module)
            module.product8 = product
        for module in model.modules():
            if isinstance(module, FeedForward | TokenHead):
                swap(module)

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
        largest = torch.stack(seen)
        largest = torch.where(largest.isfinite(), largest, self.history[0])  # of a step that was skipped
        self.history.copy_(torch.cat([largest[None], self.history[:-1]]))
        torch._foreach_zero_(seen)  # pyright: ignore[reportPrivateUsage]
        self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Scales and rounded weights, from the history and the weights that are there."""
        of_weights = torch.stack(torch._foreach_norm(self.weights, float("inf")))  # pyright: ignore[reportPrivateUsage]
        largest = torch.cat([self.history.amax(0), of_weights])
        scales = torch.where(largest > 0, self.top / largest, 1.0)
        self.scales[:, 0] = scales
        self.inverses[:, 0] = 1 / scales
        for product, weight in zip(self.each, self.weights, strict=True):
            float8.cast_into(weight, product.scales[2], product.weight, product.turned)


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


class Float8Linear(Linear):
    product8: Product | None  # None while the scales are calibrated

    def forward(self, input: Float[Tensor, "*_ d_in"]) -> Float[Tensor, "*_ d_out"]:
        if self.product8 is None or not torch.is_grad_enabled():
            return super().forward(input)
        return float8.linear(input, self.weight, self.bias, self.product8.tensors(), [self.out_features])[0]


class Float8FusedLinear(FusedLinear):
    product8: Product | None

    def forward(self, x: Float[Tensor, "*_ d_in"]) -> tuple[Float[Tensor, "*_ _"], ...]:
        if self.product8 is None or not torch.is_grad_enabled():
            return super().forward(x)
        return float8.linear(x, self.weight, self.whole_bias(), self.product8.tensors(), list(self.parts.values()))


class Float8FeedForward(FeedForward):
    """Without a gate: the activation is never written in 16 bits, nor is its gradient."""

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        up, down = self.up, self.down
        assert isinstance(up, Float8Linear)
        assert isinstance(down, Float8Linear)
        if up.product8 is None or down.product8 is None or not torch.is_grad_enabled():
            return super().forward(x)
        scales = *up.product8.tensors(), *down.product8.tensors()
        return float8.feedforward(x, (up.weight, up.bias), (down.weight, down.bias), self.activation, scales)


class Float8Head(TokenHead):
    """The loss, which takes the head's parts, multiplies in 8 bits."""


def swap(module: nn.Module) -> None:
    """Change the class and keep the parameters: optimizers, hooks and checkpoints do not notice."""
    if isinstance(module, Linear):
        module.__class__ = Float8Linear
    elif isinstance(module, FusedLinear):
        module.__class__ = Float8FusedLinear
    elif isinstance(module, TokenHead):
        module.__class__ = Float8Head
    elif isinstance(module, FeedForward) and not module.gated:
        module.__class__ = Float8FeedForward
