"""One process or several, started by torchrun: who is here, and how the model is spread (DDP copies it, FSDP2 shards it).

torch's modules for that are imported where they are used: they take longer to load than a small model to build.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clearhead.errors import ClearheadError, ConfigError
from clearhead.layers.block import Block

T = TypeVar("T")


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

    def agree(self, value: T) -> T:
        """What the first process has, on each."""
        values = [value]
        if self.world > 1:
            dist.broadcast_object_list(values)
        return values[0]


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
    except RuntimeError as error:
        if rank and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise ClearheadError(f"process {rank} of {world} ends because another failed; that one says why") from None
        raise
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
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

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
    if stay and hasattr(objective, "no_sync"):
        with objective.no_sync():
            yield
        return
    if hasattr(objective, "set_requires_gradient_sync"):
        objective.set_requires_gradient_sync(not stay)
    yield


def reshard(objective: nn.Module) -> None:
    """After a pass without a backward one FSDP keeps whole copies of some weights; dropped, they can not be out of date."""
    for module in objective.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


def whole(x: Tensor) -> Tensor:
    """A tensor that may be spread over processes, whole. All processes must ask."""
    return x.full_tensor() if is_spread(x) else x  # type: ignore[attr-defined]


def is_spread(x: Tensor) -> bool:
    """Whether each process holds only a share of this tensor (a DTensor)."""
    return hasattr(x, "full_tensor")
