"""What each head of GPT-2 is worth: all 144 in one sweep, against a forward pass without each of them."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterator

import torch
import torch.nn.functional as F

import clearhead as ch
from benchmarks.common.results import Table
from benchmarks.common.timing import how_timed, in_fresh_process, interleave, ratio, spread
from clearhead.inside import intervene, sweep, zero

T = 128


def measure(options: Namespace) -> Iterator[Table]:
    yield in_fresh_process(time_sweeps, 1 if options.quick else 2, options.shared)


def time_sweeps(rounds: int, shared: bool) -> Table:
    model = ch.build(ch.preset("gpt2")).eval()
    text = torch.randint(0, model.config.vocab_size, (1, T + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = text[:, :-1], text[:, 1:]
    heads = [(layer, head) for layer in range(model.config.n_layers) for head in range(model.config.n_heads)]

    @torch.no_grad()
    def loss() -> float:
        return float(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))

    def one_by_one() -> list[float]:
        base, losses = loss(), list[float]()
        for layer, head in heads:
            with intervene(model, zero(f"blocks.{layer}.attention.out", head=head)):
                losses.append(loss() - base)
        return losses

    def at_once() -> list[float]:
        return [effect.delta["loss"] for effect in sweep(model, tokens, targets=targets).effects]

    difference = max(abs(a - b) for a, b in zip(one_by_one(), at_once(), strict=True))
    works = {"one forward per head": one_by_one, "sweep": at_once}
    times = interleave(works, rounds=rounds, warmup=0, shared=shared)
    rows = [
        [
            name,
            f"{statistics.median(seen):,.1f} s",
            f"{spread(seen):.1%}",
            f"{ratio(times, name, 'one forward per head'):.2f}",
        ]
        for name, seen in times.items()
    ]
    return Table(
        title=f"loss without each of GPT-2's {len(heads)} heads, {T} tokens",
        columns=["way", "time", "spread", "times as fast"],
        rows=rows,
        note=f"float32; the losses differ by at most {difference:.1e}; {how_timed(rounds, shared)}",
        raw={"times": times, "difference": difference},
    )
