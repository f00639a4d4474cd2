"""A model's type, device and number of weights, plain or packed. If all are packed, it has no parameter at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clearhead.kernels import Packed


def example_weight(model: nn.Module) -> Tensor:
    """A tensor of the type and on the device of the model's weights: a parameter or, if all are packed, an empty tensor."""
    for parameter in model.parameters():
        return parameter
    packed = next(module for module in model.modules() if isinstance(module, Packed))
    return torch.empty(0, dtype=packed.dtype, device=packed.device)


def describe_model(model: Any) -> str:
    """A model in one line: its shape, its sizes, its weights."""
    c, weight = model.config, example_weight(model)
    sizes = f"{c.depth} layers of width {c.d_model:,}, {c.n_heads} heads"
    ends = f"{c.vocab_size:,} tokens" if c.inputs != "patches" else f"images of {c.image_size} x {c.image_size}"
    ends += f", {c.n_classes:,} classes" if c.head == "classes" else ""
    kind = str(weight.dtype).removeprefix("torch.")
    packed = {module.kind for module in model.modules() if isinstance(module, Packed)}
    kind = " and ".join([kind, *sorted(packed)])
    return f"{type(model).__name__}({c.family}: {sizes}, {ends}, {count_weights(model):,} parameters, {kind} on {weight.device})"


def count_weights(model: nn.Module) -> int:
    """Numbers that the model was trained with: a packed weight counts as the matrix that it stands for."""
    packed = sum(module.shape.numel() for module in model.modules() if isinstance(module, Packed))
    return packed + sum(parameter.numel() for parameter in model.parameters())
