"""The number of threads on a CPU: fewer where other programs keep the machine busy, and the same again when a run is resumed."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch

BUSY = 0.5  # the load of others, as a share of the cores, from which on fewer threads are tried
GAIN = 1.15  # fewer threads must be so much faster: a short measurement varies
SIZE, ROUNDS = 256, 20  # of the product that is timed: as large as those of a small model


def choose_threads(load: float | None = None, measure: Callable[[int], float] | None = None) -> tuple[int, str]:
    """How many threads to train with, and why, if it is not torch's own number.

    OMP_NUM_THREADS is the user's choice. On a busy machine a product waits for the slowest of its threads: with two threads on two
    busy cores, steps took three times as long as with one. The load is averaged over a minute, so it alone may be of work that has
    ended: fewer threads are taken only if a product is faster with them. `load` and `measure` (seconds by number of threads) are
    for tests.
    """
    usual = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ or usual == 1:
        return usual, ""
    if load is None:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load < BUSY * usual:
        return usual, ""
    fewer = max(1, usual - round(load))
    if fewer == usual:
        return usual, ""
    seconds = measure or time_products
    slow, fast = seconds(usual), seconds(fewer)
    if slow < GAIN * fast:
        return usual, ""
    spelled = f"{fewer} thread{'s' * (fewer > 1)}"
    return fewer, (
        f"the machine is busy (load {load:.1f}): {spelled} instead of {usual}, {slow / fast:.1f} times as fast here; "
        f"--set train.threads={usual} for all"
    )


def time_products(threads: int) -> float:
    """The median time of a small product with so many threads."""
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    with num_threads(threads):
        seconds: list[float] = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            torch.mm(a, b)
            seconds.append(time.perf_counter() - began)
    return statistics.fmean(sorted(seconds)[: -ROUNDS // 10])  # the mean: a thread that waits is rare, but waits long


def warn_of_threads(folder: Path, device: torch.device, note: Callable[[str], None]) -> None:
    """Say so where a run goes on with another number of threads than it began with: sums in another order have other last bits."""
    try:
        before = int(json.loads((folder / "environment.json").read_text(encoding="utf-8"))["threads"])
    except (OSError, ValueError, KeyError, TypeError):  # no run's folder: refused later
        return
    if device.type == "cpu" and before != torch.get_num_threads():
        note(
            f"this run used {before} threads and goes on with {torch.get_num_threads()}: its last bits may differ from those of an "
            f"uninterrupted one; train.threads={before} keeps them"
        )


@contextmanager
def num_threads(n: int) -> Generator[None]:
    """torch with so many threads; 0: as it is."""
    before = torch.get_num_threads()
    if n:
        torch.set_num_threads(n)
    try:
        yield
    finally:
        if n:
            torch.set_num_threads(before)
