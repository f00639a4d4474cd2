"""A sparse pattern must pay: attention over an eighth of the pairs of 8,192 tokens, and a Longformer-like one that grows with T."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator

import torch

from benchmarks.common.results import Table
from benchmarks.common.timing import how_timed, in_fresh_process, interleave, ratio, spread
from clearhead.layers.attention import attend
from clearhead.layers.masks import Mask, sparse
from clearhead.sparsity import Pattern

B, H, E, T = 1, 8, 64, 8192
PATTERNS = {
    "blocks of 128": "block=128, window=2, n_global=1, n_random=1",
    "blocks of 64": "block=64, window=4, n_global=1, n_random=3",
    "Longformer": "window=257, n_global=16",
}


def measure(options: Namespace) -> Iterator[Table]:
    rounds = 2 if options.quick else 5
    for backward in (False, True):
        yield in_fresh_process(time_patterns, backward, rounds, options.shared)
    yield in_fresh_process(time_growth, rounds, options.shared)


def work_of(length: int, mask: Mask, backward: bool) -> Callable[[], torch.Tensor]:
    q, k, v = torch.randn(3, B, H, length, E).requires_grad_(backward).unbind(0)

    def work() -> torch.Tensor:
        with torch.set_grad_enabled(backward):
            out = attend(q, k, v, mask)
            if backward:
                torch.autograd.grad(out.sum(), (q, k, v))
            return out.detach()

    return work


def time_patterns(backward: bool, rounds: int, shared: bool) -> Table:
    masks = {"dense": Mask()} | {name: sparse(text) for name, text in PATTERNS.items()}
    times = interleave({name: work_of(T, mask, backward) for name, mask in masks.items()}, rounds=rounds, shared=shared)
    rows = [
        [
            name if name == "dense" else f"{name}: {PATTERNS[name]}",
            "1" if name == "dense" else f"{density(PATTERNS[name], T):.3f}",
            f"{1000 * statistics.median(seen):,.0f} ms",
            f"{spread(seen):.1%}",
            f"{1 / ratio(times, name, 'dense'):.3f}",
        ]
        for name, seen in times.items()
    ]
    return Table(
        title=f"attention of {T:,} tokens to all sides, forward{' + backward' if backward else ''}",
        columns=["attention", "pairs kept", "time", "spread", "time, dense = 1"],
        rows=rows,
        note=f"batch {B}, {H} heads of {E}, float32; {how_timed(rounds, shared)}",
        raw={"times": times},
    )


def time_growth(rounds: int, shared: bool) -> Table:
    lengths = (4096, 8192, 16_384, 32_768)
    mask = sparse(PATTERNS["Longformer"])
    times = interleave({f"{n:,}": work_of(n, mask, True) for n in lengths}, rounds=min(rounds, 3), shared=shared)
    medians = [statistics.median(seen) for seen in times.values()]
    return Table(
        title=f"{PATTERNS['Longformer']}, forward + backward",
        columns=["tokens", "time", "microseconds a token"],
        rows=[[f"{n:,}", f"{1000 * s:,.0f} ms", f"{1e6 * s / n:.0f}"] for n, s in zip(lengths, medians, strict=True)],
        note=f"batch {B}, {H} heads of {E}, float32; {how_timed(min(rounds, 3), shared)}",
        raw={"times": times},
    )


def density(text: str, length: int) -> float:
    return Pattern.parse(text).count_pairs(length, length, causal=False) / length**2
