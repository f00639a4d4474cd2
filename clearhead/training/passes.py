"""The two halves of a step, gradients and what is made of them: called, or on a GPU replayed from a recording.

A small model's step is hundreds of short kernels, and starting each takes longer than running it. Recorded once as a CUDA graph,
all of them start with one call. A recording holds for one shape of batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.quantization.float8 import Products
from clearhead.training.optimizers import Optimizers
from clearhead.training.processes import whole
from clearhead.training.tasks.task import Batch

SHAPES = 64  # recordings kept; a batch of yet another shape is computed as it comes
ROUNDING = (16, 8)  # rows and lengths are filled up to multiples of these, so that few shapes come
WARM_UP = 3
THREAD = "thread_local"  # meanwhile another thread makes the next batches, and takes memory for them


class Passes:
    """Gradients of `factor` x the batch's goal, added to those that are there; returns the sum of its losses."""

    def __init__(self, objective: Callable[..., Any], autocast: AbstractContextManager[Any], *, record: bool) -> None:
        self.objective, self.autocast, self.record = objective, autocast, record
        self.recordings: dict[Any, Recording] = {}
        self.memory = (
            torch.cuda.graph_pool_handle() if record else None
        )  # one replays at a time: they share their memory

    def __call__(self, batch: Batch, factor: float) -> Tensor:
        if not self.record:
            return self.run(batch, factor)
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in batch.items())
        if shapes not in self.recordings:
            if len(self.recordings) == SHAPES:
                return self.run(batch, factor)
            self.recordings[shapes] = Recording(self.run, batch, self.memory)
        return self.recordings[shapes].replay(batch, factor)

    def run(self, batch: Batch, factor: float | Tensor) -> Tensor:
        with self.autocast:
            goal, loss, _ = self.objective(batch)
        (goal * factor).backward()
        return loss.detach()


class Update:
    """From gradients to new weights, and to those of `products` in 8 bits.

    On a GPU recorded too: the first call runs, and warms up, the second records.
    """

    def __init__(self, optimizers: Optimizers, clip: float, products: Products | None = None, *, record: bool) -> None:
        self.optimizers, self.clip, self.products, self.record = optimizers, clip, products, record
        self.graph: torch.cuda.CUDAGraph | None = None
        self.length = torch.zeros(())
        self.calls = 0

    def __call__(self) -> Tensor:
        """The gradients' length before they were clipped."""
        self.calls += 1
        if not self.record or self.calls == 1:
            return self.run()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode=THREAD):
                self.length = self.run()
        self.graph.replay()
        return self.length.clone()

    def run(self) -> Tensor:
        length = whole(nn.utils.clip_grad_norm_(self.optimizers.parameters(), self.clip or math.inf))
        self.optimizers.step()
        self.optimizers.zero_grad()
        if self.products is not None:
            self.products.refresh()
        return length


class Recording:
    """The kernels of one pass, and the memory they read their input from."""

    def __init__(self, run: Callable[[Batch, float | Tensor], Tensor], batch: Batch, memory: Any) -> None:
        self.batch = {name: tensor.clone() for name, tensor in batch.items()}
        device = next(iter(batch.values())).device
        self.factor = torch.zeros((), device=device)  # so that warming up adds nothing to the gradients
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run(self.batch, self.factor)
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=memory, capture_error_mode=THREAD):
            self.loss = run(self.batch, self.factor)

    def replay(self, batch: Batch, factor: float) -> Tensor:
        for name, tensor in batch.items():
            self.batch[name].copy_(tensor, non_blocking=True)
        self.factor.fill_(factor)
        self.graph.replay()
        return self.loss
