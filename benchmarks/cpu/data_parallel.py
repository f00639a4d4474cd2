"""Training steps by 1, 2 and 4 processes of one thread each, data-parallel over gloo, beside the forecast of `clearhead cost`.

Each process has a batch of its own. The forecast knows the operations of a step and the speed of one process; it knows nothing of
exchanging gradients, which is what is missing where there are as many cores as processes.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import nn

from benchmarks.common.gpt_contenders import Size, clearhead, config
from benchmarks.common.results import Table
from clearhead.costs import cost
from clearhead.training.distributed import parallelize, process_group

SIZE, BATCH, WORLDS = Size(), 4, (1, 2, 4)


def measure(options: Namespace) -> Iterator[Table]:
    steps = 3 if options.quick else 9
    times = {world: run(world, steps) for world in WORLDS}
    tokens, cores = BATCH * SIZE.max_len, os.cpu_count() or 1
    alone = cost(config(SIZE), batch=BATCH, mode="train")
    rate = alone.flops / statistics.median(times[1])
    rows: list[list[str]] = []
    for world, taken in times.items():
        step = statistics.median(taken)
        forecast = cost(config(SIZE), batch=BATCH, mode="train", shards=world, parallel="ddp")
        expected = forecast.seconds(rate * min(1, cores / world))
        rows.append(
            [
                str(world),
                f"{world * tokens / step:,.0f}",
                f"{world * tokens / expected:,.0f}",
                f"{expected / step:.2f}",
                f"{forecast.peak_bytes / 2**20:,.0f} MiB",
            ]
        )
    yield Table(
        title="training by several processes",
        columns=["processes", "tokens/s", "forecast", "of forecast", "memory of each, forecast"],
        rows=rows,
        note=f"{SIZE.n_layers} layers, width {SIZE.d_model}, batches of {BATCH} x {SIZE.max_len} a process, one thread each, "
        f"{cores} cores; medians of {steps} steps; forecast: one process's speed, times the cores there are",
        raw={"times": {str(world): taken for world, taken in times.items()}, "rate": rate},
    )


def run(world: int, steps: int) -> list[float]:
    """Seconds of each step, as the first process saw them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(world, mp_context=multiprocessing.get_context("spawn")) as pool:
        first, *_ = [pool.submit(work, rank, world, port, steps) for rank in range(world)]
        return first.result()


def work(rank: int, world: int, port: int, steps: int) -> list[float]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    one = clearhead(SIZE, dropout=0.0, biases=True)

    class Objective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = one.model

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            return one.loss(text[:, :-1], text[:, 1:])

    with process_group("cpu") as processes:
        objective = parallelize(Objective(), processes, "ddp")
        optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-3, fused=True)
        text = torch.randint(0, SIZE.vocab_size, (BATCH, SIZE.max_len + 1))
        times: list[float] = []
        for _ in range(steps + 2):
            start = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            objective(text).backward()
            optimizer.step()
            processes.wait()
            times.append(time.perf_counter() - start)
    return times[2:]
