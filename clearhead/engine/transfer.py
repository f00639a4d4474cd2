"""Copies between the host and the device that do not make the CPU wait for the GPU."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device; on a GPU the copy is queued, and the CPU goes on."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return _staging(device).copy(tensor) if device.type == "cuda" else tensor.to(device)


class Staging:
    """Pinned host buffers to copy from. Only from pinned memory does a GPU copy while the CPU goes on.

    A buffer is reused when the copy from it has completed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[int, deque[tuple[Tensor, torch.cuda.Event]]] = {}  # by size, least recently used first

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor on the device."""
        size = 1 << max(tensor.nbytes - 1, 1).bit_length()
        buffers = self.buffers.setdefault(size, deque())
        if buffers and buffers[0][1].query():
            buffer, copied = buffers.popleft()
        else:
            buffer, copied = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
        pinned = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        on_device = pinned.copy_(tensor).to(self.device, non_blocking=True)
        copied.record(torch.cuda.current_stream(self.device))
        buffers.append((buffer, copied))
        return on_device


@functools.cache
def _staging(device: torch.device) -> Staging:
    return Staging(device)


class HostCopy:
    """Copies of tensors on the host, taken in the order of the device's work; `wait` returns them when they are complete."""

    def __init__(self, *tensors: Tensor) -> None:
        self.copied: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self.copies = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors
            ]
            self.copied = torch.cuda.Event()
            self.copied.record()
        else:
            self.copies = [tensor.clone() for tensor in tensors]

    def wait(self) -> Sequence[Tensor]:
        if self.copied is not None:
            self.copied.synchronize()
        return self.copies
