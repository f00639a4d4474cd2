"""One process or several, started by torchrun. With several, DDP copies the model to each, FSDP2 shards it.

torch's modules for this are imported inside functions: loading them takes longer than building a small model.
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

from clearhead import kernels
from clearhead.errors import ClearheadError, ConfigError
from clearhead.layers.block import Block

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process's rank, and how many processes there are."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes; each gets it."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; each gets the same answer."""
        return flag if self.world_size == 1 else bool(self.sum(torch.tensor(int(flag), device=self.device)))

    def broadcast(self, value: T) -> T:
        """The first process's value; each gets it."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values)
        return values[0]


@contextmanager
def process_group(device: str) -> Generator[Processes]:
    """Join the processes that torchrun started; without torchrun there is one process."""
    world_size, rank, local = (int(os.environ.get(name, default)) for name, default in ENVIRONMENT)
    found = choose_device(device, local)
    if world_size == 1:
        yield Processes(found)
        return
    if found.type == "cuda":
        torch.cuda.set_device(found)
    dist.init_process_group("nccl" if found.type == "cuda" else "gloo")
    try:
        yield Processes(found, rank, world_size)
    except RuntimeError as error:
        if rank and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise ClearheadError(
                f"process {rank} of {world_size} ends because another failed; that one says why"
            ) from None
        raise
    finally:
        dist.destroy_process_group()


ENVIRONMENT = (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))  # torchrun's


def choose_device(name: str, local: int = 0) -> torch.device:
    if name == "auto":
        name = kernels.best_device()
    try:
        device = torch.device(name, local) if name == "cuda" else torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"train.device={name!r} can not be used here ({reason}); try cpu, or leave it out") from None
    return device


def parallelize(objective: nn.Module, processes: Processes, parallel: str) -> nn.Module:
    """The module that each process calls: the objective itself if there is one process, else wrapped by DDP or sharded by FSDP2."""
    if processes.world_size == 1:
        return objective
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if parallel == "ddp":
        return DistributedDataParallel(objective)
    mesh = init_device_mesh(processes.device.type, (processes.world_size,))
    for module in objective.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


@contextmanager
def no_sync(objective: Any, enabled: bool) -> Generator[None]:
    """While gradients are accumulated over parts of a batch, processes exchange them only after the last part."""
    if enabled and hasattr(objective, "no_sync"):
        with objective.no_sync():
            yield
        return
    if hasattr(objective, "set_requires_gradient_sync"):
        objective.set_requires_gradient_sync(not enabled)
    yield


def reshard(objective: nn.Module) -> None:
    """Drop the whole weights that FSDP keeps after a forward pass without a backward pass: the next update would not reach them."""
    for module in objective.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


def gather(x: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. All processes must call this."""
    return x.full_tensor() if is_sharded(x) else x  # type: ignore[attr-defined]


def is_sharded(x: Tensor) -> bool:
    """Whether each process holds only a part of this tensor (a DTensor)."""
    return hasattr(x, "full_tensor")
