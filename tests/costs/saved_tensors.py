"""The bytes that autograd keeps of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.config import Config
from clearhead.costs.flops import Lengths
from clearhead.costs.measurement import make_inputs
from clearhead.models import Model, build


def saved_bytes(
    config: Config, batch: int, at: Lengths, *, half: bool, checkpointing: bool = False, device: str = "cpu"
) -> int:
    """Bytes that autograd keeps between forward and backward: each storage once, without parameters and buffers."""
    model = build(config, device=device).train()
    held = own(model)
    found: dict[int, tuple[Tensor, int]] = {}  # the tensors are kept, so that no address comes twice

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in held and storage.nbytes():
            found[storage.data_ptr()] = x, storage.nbytes()
        return x

    given = make_inputs(config, batch, at, device)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast(device, torch.bfloat16, enabled=half),
    ):
        out = model(*given, checkpointing=checkpointing)
    assert out.requires_grad
    return sum(size for _, size in found.values())


def own(model: Model) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
