"""A model's type, device and number of weights, plain or packed. If all are packed, it has no parameter at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead.kernels import Packed


def example_weight(model: nn.Module) -> Tensor:
    """A tensor of the type and on the device of the model's weights: a parameter or, if all are packed, an empty tensor."""
    for parameter in model.parameters():
        return parameter
    packed = next(module for module in model.modules() if isinstance(module, Packed))
    return torch.empty(0, dtype=packed.dtype, device=packed.device)


def count_weights(model: nn.Module) -> int:
    """Numbers that the model was trained with: a packed weight counts as the matrix that it stands for."""
    packed = sum(module.shape.numel() for module in model.modules() if isinstance(module, Packed))
    return packed + sum(parameter.numel() for parameter in model.parameters())
