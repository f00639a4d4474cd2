"""CUDA graphs: work for a GPU, captured once and replayed, so that thousands of small kernels start with one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

from clearhead.kernels import capture

MAX_GRAPHS = 200  # a server's users may each bring their own kind of search


class Recorder:
    """Records CUDA graphs that share one memory pool and one stream. Only one of them may replay at a time."""

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # one for all: a pool's memory is reused only within a stream
        self.device = device

    def record(
        self,
        work: Callable[[], Tensor],
        warm_ups: int,
        *,
        prepare: Callable[[], object] = lambda: None,
        restore: Callable[[], object] = lambda: None,
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph of `work`, and the tensor that each replay writes its result to.

        `work` runs `warm_ups` times before: first runs compile and choose kernels. What they change, `restore` puts back.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            prepare()
            for _ in range(warm_ups):
                work()
            restore()
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: meanwhile another thread may allocate memory, as the one that makes the next training batches does.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            result = work()
        return graph, result


class CudaGraphs:
    """CUDA graphs of a model's work, by key. Each reads and writes the same memory; its result is valid until its next replay."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.hooks = [hooks for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]  # pyright: ignore[reportPrivateUsage]
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.recorder = Recorder(device)

    @property
    def is_hooked(self) -> bool:
        """Whether the model has hooks: a replay would not call them."""
        return any(self.hooks)

    def run(
        self, key: Hashable, work: Callable[[], Tensor], *, switch: Tensor, changed: Sequence[Tensor] = ()
    ) -> Tensor:
        """The result of this key's work, recorded if the key is new.

        `switch` is an input of the work. While it is all zeros, the work changes nothing but the tensors in `changed`.
        """
        if key not in self.graphs:
            if len(self.graphs) >= MAX_GRAPHS:
                self.graphs.clear()
            self.graphs[key] = self._record(work, switch, [switch, *changed])
        graph, result = self.graphs[key]
        graph.replay()
        return result

    def _record(
        self, work: Callable[[], Tensor], switch: Tensor, state: Sequence[Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        before = [tensor.clone() for tensor in state]

        def restore() -> None:
            for tensor, was in zip(state, before, strict=True):
                tensor.copy_(was)

        with capture:
            return self.recorder.record(work, 2, prepare=switch.zero_, restore=restore)


def round_up(n: int, most: int) -> int:
    """The size that is recorded for n rows: 1, 2, 4, 8, then at most a quarter more than n; never above `most`."""
    step = max(1, 2 ** ((n - 1).bit_length() - 3)) if n > 8 else 0
    size = -(-n // step) * step if step else 1 << (n - 1).bit_length()
    return min(size, most)
