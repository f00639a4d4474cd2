"""A sliding window must pay: causal attention over the last 512 of 16,384 tokens, against all of them."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator

import torch

from benchmarks.common.results import Table
from benchmarks.common.timing import how_timed, in_fresh_process, interleave, ratio, spread
from clearhead.layers.attention import attend
from clearhead.layers.masks import Mask, causal, window

B, H, E, T, WIDTH = 1, 8, 64, 16_384, 512


def measure(options: Namespace) -> Iterator[Table]:
    rounds = 2 if options.quick else 3
    for backward in (False, True):
        yield in_fresh_process(time_kernels, backward, rounds, options.shared)


def time_kernels(backward: bool, rounds: int, shared: bool) -> Table:
    q, k, v = torch.randn(3, B, H, T, E).requires_grad_(backward).unbind(0)

    def run(mask: Mask, kernel: str) -> Callable[[], torch.Tensor]:
        def work() -> torch.Tensor:
            with torch.set_grad_enabled(backward):
                out = attend(q, k, v, mask, kernel=kernel)
                if backward:
                    torch.autograd.grad(out.sum(), (q, k, v))
                return out.detach()

        return work

    narrow = causal() & window(WIDTH)
    dense = "dense, fused"
    works = {dense: run(causal(), "fused"), f"window {WIDTH}, fused": run(narrow, "fused")}
    note = ""
    if not backward:  # torch has flex for the CPU without a backward pass
        flex = f"window {WIDTH}, flex"
        works[flex] = run(narrow, "flex")
        start = time.perf_counter()
        # The kernels answer the same question; float32, sums over 512 keys.
        torch.testing.assert_close(works[flex](), works[f"window {WIDTH}, fused"](), rtol=0, atol=1e-5)
        note = f"; flex compiled once before, in {time.perf_counter() - start:.0f} s"
    times = interleave(works, rounds=rounds, shared=shared)
    rows = [
        [
            name,
            f"{1000 * statistics.median(seen):,.0f} ms",
            f"{1000 * min(seen):,.0f} ms",
            f"{spread(seen):.1%}",
            f"{ratio(times, name, dense):.1f}",
        ]
        for name, seen in times.items()
    ]
    return Table(
        title=f"causal attention, T = {T:,}, forward{' + backward' if backward else ''}",
        columns=["attention", "time", "best", "spread", "times as fast as dense"],
        rows=rows,
        note=f"batch {B}, {H} heads of {E}, float32; {how_timed(rounds, shared)}{note}",
        raw={"times": times},
    )
