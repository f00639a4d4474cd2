"""Fair stop-watches: contenders timed in turns, and the peak memory of one piece of work in a process of its own."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from clearhead.kernels import onednn

Times = dict[str, list[float]]  # seconds, one a round


def interleave(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 1, shared: bool = False
) -> Times:
    """Time every contender once a round, each round starting with another one.

    A computer slows down and recovers for reasons of its own (heat, other programs). Turns spread that over all
    contenders alike, and let `ratio` compare only what ran within the same few seconds. Where others keep the cores busy
    even that is not enough: threads wait for each other's turns. `shared` then runs one thread and counts CPU time.
    """
    clock = time.perf_counter
    if shared:
        torch.set_num_threads(1)
        clock = time.process_time
    names = list(contenders)
    for _ in range(warmup):
        for name in names:
            contenders[name]()
    times: Times = {name: [] for name in names}
    for round_ in range(rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            contenders[name]()
            times[name].append(clock() - start)
    return times


def ratio(times: Times, name: str, base: str) -> float:
    """How many times as fast as `base` this contender is: the median over rounds, each compared within itself."""
    return statistics.median(b / a for a, b in zip(times[name], times[base], strict=True))


def spread(values: list[float]) -> float:
    """The middle half of the values, as a part of their median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def product_peak(shared: bool) -> float:
    """Operations a second of the fastest large matrix product here, MKL's or oneDNN's: what utilisation is told against."""
    a, b = (torch.randn(1536, 1536) for _ in "ab")
    ways = {"MKL": lambda: torch.mm(a, b), "oneDNN": lambda: onednn.linear(a, b, None)}
    with torch.no_grad():
        times = interleave(ways, rounds=9, shared=shared)
    return 2 * 1536**3 / min(map(statistics.median, times.values()))


def utilisation(flops: float, seconds: float, peak: float) -> str:
    return f"{flops / seconds / peak:.0%}"


def how_timed(rounds: int, shared: bool) -> str:
    """For a table's note."""
    return f"medians of {rounds} rounds in turns" + (", one thread, CPU time" if shared else "")


def choose_threads(shared: bool) -> int:
    """How many threads contenders get; torch has them from here on."""
    threads = 1 if shared else torch.get_num_threads()
    torch.set_num_threads(threads)
    return threads


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a module's function in a new interpreter: no memory, threads or compiled code of an earlier measurement."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


@dataclass(frozen=True)
class Peak:
    """Bytes at the worst moment, on top of what was held before."""

    allocated: int  # by torch
    resident: int  # by the process, as the operating system saw it


def peak_memory(work: Callable[[], object]) -> Peak:
    """Run `work` twice, and say how much memory it needs beside what exists already. For a fresh process.

    `allocated` is exact and repeats to the byte: torch reports each allocation and release of its CPU allocator to the
    profiler, those of scratch inside kernels too, which a Python dispatch mode does not see. `resident` sees what torch
    does not count (a library's own buffers, fragments) but only in whole pages, and not what fits into memory that was
    freed earlier; it is here to catch anything large that the first figure would miss.
    """
    before = _resident_peak()
    work()
    resident = _resident_peak() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    # The profiler's own summaries add up each operator's memory; the moment of the peak is only in the raw events.
    kineto = seen.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]")
    held = allocated = 0
    for _, change in changes:
        held += change
        allocated = max(allocated, held)
    return Peak(allocated, resident)


def _resident_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere else
