"""One process or several, started by torchrun: who is here, and how the model is spread (DDP copies it, FSDP2 shards it)."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from clearhead.errors import ConfigError
from clearhead.layers.block import Block


@dataclass(frozen=True)
class Processes:
    """This process among all of them."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes, on each."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def any(self, flag: bool) -> bool:
        """Whether any process says so: all then do the same."""
        return flag if self.world == 1 else bool(self.sum(torch.tensor(int(flag), device=self.device)))


@contextmanager
def join(device: str) -> Generator[Processes]:
    """Join the processes that torchrun started; alone if it did not."""
    world, rank, local = (int(os.environ.get(name, default)) for name, default in ENVIRONMENT)
    place = choose_device(device, local)
    if world == 1:
        yield Processes(place)
        return
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Processes(place, rank, world)
    finally:
        dist.destroy_process_group()


ENVIRONMENT = (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))  # torchrun's


def choose_device(name: str, local: int = 0) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name, local) if name == "cuda" else torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"train.device={name!r} can not be used here ({reason}); try cpu, or leave it out") from None
    return device


def spread(objective: nn.Module, processes: Processes, parallel: str) -> nn.Module:
    """The objective, ready to be called: alone as it is, else as one of several copies or shards."""
    if processes.world == 1:
        return objective
    if parallel == "ddp":
        return DistributedDataParallel(objective)
    mesh = init_device_mesh(processes.device.type, (processes.world,))
    for module in objective.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


@contextmanager
def gradients_stay(objective: Any, stay: bool) -> Generator[None]:
    """While parts of a batch are accumulated, gradients are exchanged only after the last of them."""
    if stay and isinstance(objective, DistributedDataParallel):
        with objective.no_sync():
            yield
        return
    if isinstance(objective, FSDPModule):
        objective.set_requires_gradient_sync(not stay)
    yield


def whole(x: Tensor) -> Tensor:
    """A tensor that may be spread over processes, whole. All processes must ask."""
    return x.full_tensor() if isinstance(x, DTensor) else x
