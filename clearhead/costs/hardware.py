"""This machine: its speed at large matrix products, and its memory."""

from __future__ import annotations

import functools
import statistics
import time
from pathlib import Path

import torch

from clearhead.kernels.memory import free_memory

CGROUP = (  # files with the limit and use of this process's control group, version 2 and 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@functools.cache
def measure_peak(device: torch.device | str, dtype: torch.dtype = torch.float32) -> float:
    """FLOP/s of a large matrix product, the median of five; measured once in a process.

    Utilisation is relative to it: the real speed of a product here, not a data sheet's number.
    """
    device = torch.device(device)
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in "ab")
    seconds = [_time_product(a, b) for _ in range(7)][2:]  # the first ones warm up
    return 2 * n**3 / statistics.median(seconds)


def _time_product(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.mm(a, b)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    began = time.perf_counter()
    torch.mm(a, b)
    return time.perf_counter() - began


def available_memory(device: torch.device | str = "cpu") -> int:
    """Free bytes: on a GPU what is free or cached by torch; else free memory within the container's limit."""
    device = torch.device(device)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = [free_memory()]
    for limit, use in CGROUP:
        if Path(limit).exists() and (most := Path(limit).read_text().strip()).isdigit():
            free.append(max(0, int(most) - int(Path(use).read_text())))
    return min(free)
