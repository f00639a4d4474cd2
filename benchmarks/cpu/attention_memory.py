"""Peak memory of `attend`: twice the length must cost the fused kernel twice the memory, not four times as much."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import torch

from benchmarks.common.results import Table
from benchmarks.common.timing import Peak, in_fresh_process, peak_memory
from clearhead.layers.attention import attend
from clearhead.layers.masks import Mask, causal, padding, window

B, H, E = 1, 8, 64
SHORT, LONG = 4096, 8192
MASKS = ("causal", "causal + padding", "causal + window 512")


def measure(options: Namespace) -> Iterator[Table]:
    for backward in (False, True):
        yield table(backward)


def table(backward: bool) -> Table:
    explicit = in_fresh_process(peak_of, "explicit", "causal", SHORT, backward)
    rows = [["explicit, causal", _size(explicit.allocated), "", "", _size(explicit.resident)]]
    raw = {"explicit, causal": {SHORT: explicit.allocated}}
    for kind in MASKS:
        short, long = (in_fresh_process(peak_of, "fused", kind, T, backward) for T in (SHORT, LONG))
        growth = long.allocated / short.allocated
        rows.append(
            [f"fused, {kind}", _size(short.allocated), _size(long.allocated), f"{growth:.2f}", _size(long.resident)]
        )
        raw[f"fused, {kind}"] = {SHORT: short.allocated, LONG: long.allocated}
    return Table(
        title=f"peak memory of attention, forward{' + backward' if backward else ''}",
        columns=["attention", f"T = {SHORT:,}", f"T = {LONG:,}", "growth", "resident"],
        rows=rows,
        note=f"batch {B}, {H} heads of {E}, float32, beside q, k and v; resident: as the system saw the "
        f"longest; one score matrix of all heads is "
        f"{_size(4 * B * H * SHORT**2)} at {SHORT:,} and {_size(4 * B * H * LONG**2)} at {LONG:,}",
        raw=raw,
    )


def peak_of(kernel: str, kind: str, T: int, backward: bool) -> Peak:
    """To be called in a fresh process."""

    def run(T: int) -> Peak:
        q, k, v = torch.randn(3, B, H, T, E).requires_grad_(backward).unbind(0)
        mask = mask_of(kind, T)

        def work() -> None:
            with torch.set_grad_enabled(backward):
                out = attend(q, k, v, mask, kernel=kernel)
                if backward:
                    torch.autograd.grad(out.sum(), (q, k, v))

        return peak_memory(work)

    run(64)  # what is loaded and started once should not count
    return run(T)


def mask_of(kind: str, T: int) -> Mask:
    if kind == "causal + padding":
        return causal() & padding(torch.arange(T)[None] < T - T // 8)
    return causal() & window(512) if kind == "causal + window 512" else causal()


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
