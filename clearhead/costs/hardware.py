"""This machine's speed at large matrix products. (Its free memory: kernels/memory.py.)"""

from __future__ import annotations

import functools
import statistics
import time

import torch


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
