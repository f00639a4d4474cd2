"""What is computed in fewer bits: autocast to bfloat16, the residual stream in bfloat16, matrix products in fp8."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from clearhead.errors import ConfigError
from clearhead.models.stack import Stack
from clearhead.quantization import float8
from clearhead.training.distributed import Processes
from clearhead.training.recipe import Train


def uses_bfloat16(t: Train, device: torch.device) -> bool:
    """Whether matrix products run in bfloat16."""
    if t.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return t.precision in ("bfloat16", "fp8")


def make_autocast(t: Train, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if uses_bfloat16(t, device) else nullcontext()


def set_residual_dtype(model: nn.Module, t: Train, autocast: AbstractContextManager[Any]) -> None:
    """With train.stream=bfloat16, blocks pass bfloat16 to each other; matrix products must be bfloat16 then too."""
    if t.stream == "bfloat16":
        if not isinstance(autocast, torch.autocast):
            raise ConfigError(
                "train.stream=bfloat16 needs products in bfloat16; got float32; set train.precision=bfloat16, or "
                "train.stream=float32"
            )
        for stack in (module for module in model.modules() if isinstance(module, Stack)):
            stack.stream = torch.bfloat16


def check_fp8(t: Train, processes: Processes) -> None:
    """Refuse train.precision=fp8 where it can not be used, before any work is done."""
    if t.precision != "fp8":
        return
    if processes.world_size > 1 or t.lora_rank:
        got = f"{processes.world_size} processes" if processes.world_size > 1 else f"train.lora_rank={t.lora_rank}"
        raise ConfigError(
            f"train.precision=fp8 is for one process in which all weights learn; got {got}; set train.precision=bfloat16"
        )
    float8.check_device(processes.device)
