"""LoRA: a low-rank product is trained beside each frozen matrix of the blocks (Hu et al. 2021), and merged into it at the end."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.checkpoint.run_checkpoint import merge_low_rank
from clearhead.layers.linear import FusedLinear
from clearhead.models import Encoder, Model, build
from clearhead.models.stack import Stack
from clearhead.training.distributed import gather


def add_lora(model: nn.Module, rank: int, alpha: float, seed: int) -> int:
    """Freeze every weight, and add B A x, of rank `rank`, to each product W x of the blocks.

    A starts random and B at zero: the model's output does not change yet. A head for classes, which may be new, is not frozen.
    Returns the number of trainable parameters.
    """
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    if isinstance(model, Encoder) and model.config.head == "classes" and model.head is not None:
        model.head.requires_grad_(True)
    for name, module in model.named_modules():
        if "blocks." in name and isinstance(module, nn.Linear | FusedLinear):
            d_out, d_in = module.weight.shape
            a = torch.randn(rank, d_in, generator=generator) / math.sqrt(d_in)
            module.register_parameter("lora_a", nn.Parameter(a.to(module.weight)))
            module.register_parameter("lora_b", nn.Parameter(torch.zeros(d_out, rank).to(module.weight)))
            module.lora_scale = alpha / rank  # type: ignore[assignment]
            module.register_forward_hook(_add_low_rank)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _add_low_rank(
    module: Any, inputs: tuple[Tensor, ...], out: Tensor | tuple[Tensor, ...]
) -> Tensor | tuple[Tensor, ...]:
    added = F.linear(F.linear(inputs[0], module.lora_a), module.lora_b) * module.lora_scale
    if isinstance(out, Tensor):
        return out + added
    return tuple(x + y for x, y in zip(out, added.split([x.shape[-1] for x in out], -1), strict=True))


@torch.no_grad()
def gather_model(model: Model) -> Model:
    """A copy on the CPU in eval mode, with shards gathered (all processes must call this) and LoRA merged into the weights."""
    fresh = build(model.config, device="meta").to_empty(device="cpu")
    modules = dict(model.named_modules())
    for name, tensor in [*fresh.named_parameters(), *fresh.named_buffers()]:
        holder = modules[name.rpartition(".")[0]]
        value = gather(getattr(holder, name.rpartition(".")[2])).detach().cpu()
        if name.endswith(".weight") and hasattr(holder, "lora_a"):
            a, b = (gather(getattr(holder, part)).cpu() for part in ("lora_a", "lora_b"))
            value = merge_low_rank(value, a, b, holder.lora_scale)  # type: ignore[arg-type]
        tensor.data = value.clone()
    for name, stack in fresh.named_modules():
        if isinstance(stack, Stack):
            stack.stream = modules[name].stream  # type: ignore[assignment]  # under autocast it computes as the model does
    fresh.generation, fresh.extras = model.generation, model.extras
    return fresh.eval()
