"""The two halves of a training step: the forward and backward pass, and the optimizer's update.

Each is called, or on a GPU replayed as a CUDA graph. A small model's step is hundreds of short kernels, and starting each
takes longer than running it; a graph starts all of them with one call. A graph fits one shape of batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.engine.cuda_graphs import Recorder
from clearhead.quantization.float8 import Products
from clearhead.training.distributed import gather
from clearhead.training.optimizers import Optimizers
from clearhead.training.tasks.task import Batch

SHAPES = 64  # graphs kept; a batch of yet another shape is computed without one
ROUNDING = (16, 8)  # rows and lengths are padded to multiples of these, so that there are few shapes
WARM_UPS = 3


@dataclass(frozen=True)
class Recorded:
    """A graph of the forward and backward pass, and the memory it reads from and writes to."""

    batch: Batch
    factor: Tensor
    graph: torch.cuda.CUDAGraph
    loss: Tensor


class ForwardBackward:
    """Adds the gradients of `factor` x the batch's objective to those there are; returns the sum of its losses.

    With a recorder, replayed as a CUDA graph.
    """

    def __init__(
        self, objective: Callable[..., Any], autocast: AbstractContextManager[Any], recorder: Recorder | None = None
    ) -> None:
        self.objective, self.autocast, self.recorder = objective, autocast, recorder
        self.graphs: dict[Any, Recorded] = {}

    def __call__(self, batch: Batch, factor: float) -> Tensor:
        if self.recorder is None:
            return self.run(batch, factor)
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in batch.items())
        if shapes not in self.graphs:
            if len(self.graphs) == SHAPES:
                return self.run(batch, factor)
            self.graphs[shapes] = self.record(self.recorder, batch)
        recorded = self.graphs[shapes]
        for name, tensor in batch.items():
            recorded.batch[name].copy_(tensor, non_blocking=True)
        recorded.factor.fill_(factor)
        recorded.graph.replay()
        return recorded.loss

    def record(self, recorder: Recorder, batch: Batch) -> Recorded:
        batch = {name: tensor.clone() for name, tensor in batch.items()}
        factor = torch.zeros((), device=recorder.device)  # zero: the warm-up adds nothing to the gradients
        return Recorded(batch, factor, *recorder.record(lambda: self.run(batch, factor), WARM_UPS))

    def run(self, batch: Batch, factor: float | Tensor) -> Tensor:
        with self.autocast:
            goal, loss, _ = self.objective(batch)
        (goal * factor).backward()
        return loss.detach()


class Update:
    """From gradients to new weights, and to the fp8 copies of them if there are `products`; returns the gradients' norm.

    Gradients whose norm is NaN or infinite change nothing: neither weights nor the optimizers' state. The device decides that, so
    that the CPU does not wait for it.

    With a recorder, the first call runs, and warms up; the second records a CUDA graph.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        clip: float,
        products: Products | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.optimizers, self.clip, self.products, self.recorder = optimizers, clip, products, recorder
        self.recorded: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        self.is_warm = False

    def __call__(self) -> Tensor:
        """The norm of the gradients, before clipping."""
        if self.recorder is None or not self.is_warm:
            self.is_warm = True
            return self.run()
        if self.recorded is None:
            self.recorded = self.recorder.record(self.run, warm_ups=0)
        graph, norm = self.recorded
        graph.replay()
        return norm.clone()

    def run(self) -> Tensor:
        norm = gather(nn.utils.clip_grad_norm_(self.optimizers.parameters(), self.clip or math.inf))
        self.optimizers.step(skip=~norm.isfinite())
        self.optimizers.zero_grad()
        if self.products is not None:
            self.products.refresh()
        return norm
