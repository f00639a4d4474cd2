"""Work for a GPU that is recorded once, as a CUDA graph, and replayed: thousands of small kernels then cost no time of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

from clearhead.layers.linear import recording


class Recordings:
    """Recordings by key. One reads and writes the same memory each time, and its result is good until it is replayed."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.hooks = [hooks for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]  # pyright: ignore[reportPrivateUsage]
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.memory = torch.cuda.graph_pool_handle()

    @property
    def is_watched(self) -> bool:
        """Whether somebody hooked into the model: a recording would pass by unseen."""
        return any(self.hooks)

    def run(self, key: Hashable, work: Callable[[], Tensor], *, told: Tensor, kept: Sequence[Tensor] = ()) -> Tensor:
        """The work of this key, recorded if it is new. With zeros in `told`, it changes nothing but `kept`."""
        if key not in self.graphs:
            if len(self.graphs) >= 200:  # a server's users may each bring their own kind of search
                self.graphs.clear()
            self.graphs[key] = self._record(work, [told, *kept])
        graph, result = self.graphs[key]
        graph.replay()
        return result

    def _record(self, work: Callable[[], Tensor], held: Sequence[Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        # The first runs compile and choose kernels, and must leave everything as it was.
        before = [each.clone() for each in held]
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), recording:
            held[0].zero_()
            for _ in range(2):
                work()
            for each, was in zip(held, before, strict=True):
                each.copy_(was)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may take memory meanwhile: a training run's makes its next batches while samples are written.
        with torch.cuda.graph(graph, pool=self.memory, stream=stream, capture_error_mode="thread_local"), recording:
            result = work()
        return graph, result


def padded(n: int, most: int) -> int:
    """The number of rows that is recorded for n: 1, 2, 4, 8, then by a quarter more at most."""
    step = max(1, 2 ** ((n - 1).bit_length() - 3)) if n > 8 else 0
    size = -(-n // step) * step if step else 1 << (n - 1).bit_length()
    return min(size, most)
