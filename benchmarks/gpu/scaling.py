"""How a forward pass grows with length, width and batch, beside the forecast of `ch.cost`; and a picture of it.

    python benchmarks/gpu/scaling.py --device cuda --out benchmarks/results/scaling_cuda.json      one GPU, half a minute
    python benchmarks/gpu/scaling.py --device cpu --out benchmarks/results/scaling_cpu.json        small sizes, a minute
    python benchmarks/gpu/scaling.py --device cpu --shared ...     others use this computer too: one thread, CPU time
    python benchmarks/gpu/scaling.py --draw docs/pictures/scaling.png benchmarks/results/scaling_cuda.json
    python benchmarks/gpu/scaling.py --draw docs/pictures/scaling_cpu.png benchmarks/results/scaling_cpu.json

A LLaMA-like decoder with a vocabulary of 1,024, so that logits weigh little; bfloat16 on a GPU, float32 on a CPU. The forecast is
the time of the useful operations at the speed of a large matrix product, or of the weights at that of a copy, whichever is longer
(both speeds measured here), and the most memory. On a GPU the pass is replayed as a CUDA graph: the GPU is timed, not Python.

`growth` is how much longer a pass takes than the one of the size before, over how much more there is to do: 1 or less says that
nothing grows faster than the closed form. Exit status 1: it is above 1.15 somewhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import clearhead as ch
from benchmarks.common.results import cpu_model
from benchmarks.common.timing import interleave, product_peak
from clearhead.costs.hardware import measure_peak
from clearhead.costs.measurement import Workload, measure, repeat_step

MOST = 1.15

LENGTHS, WIDTHS, BATCHES = (
    [2**n for n in range(9, 18)],
    [2**n for n in range(8, 13)],
    [2**n for n in range(9)],
)
SIZES = {  # (width, layers, batch, length) where another of them grows
    "cuda": {"length": (1024, 8, 1, LENGTHS), "width": (WIDTHS, 4, 8, 2048), "batch": (1024, 8, BATCHES, 512)},
    "cpu": {
        "length": (256, 2, 1, [2**n for n in range(7, 14)]),
        "width": ([2**n for n in range(6, 11)], 2, 1, 256),
        "batch": (256, 2, [2**n for n in range(7)], 64),
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=list(SIZES))
    parser.add_argument("--shared", action="store_true", help="on a CPU that others use: one thread, CPU time")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("PNG", "JSON"))
    options = parser.parse_args()
    if options.draw:
        draw(options.draw[0], json.loads(options.draw[1].read_text()))
        return 0
    told = run(options.device, options.shared)
    if options.out:
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    return int(max(row["growth"] for rows in told["sweeps"].values() for row in rows) > MOST)


def run(device: str, shared: bool) -> dict[str, Any]:
    if shared:
        torch.set_num_threads(1)
    rate = measure_peak(device, torch.bfloat16) if device == "cuda" else product_peak(shared)
    bandwidth = measure_copy(device, shared)
    print(f"{rate / 1e12:.2f} TFLOP/s, {bandwidth / 1e9:.0f} GB/s")
    told: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_model(),
        "threads": None if device == "cuda" else torch.get_num_threads(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "flops_per_second": rate,
        "bytes_per_second": bandwidth,
        "sweeps": {},
    }
    for name, (*size, length) in SIZES[device].items():
        grows = next(values for values in (*size, length) if isinstance(values, list))
        rows: list[dict[str, Any]] = []
        for value in grows:
            width, layers, batch, T = (value if isinstance(each, list) else each for each in (*size, length))
            rows.append(
                {name: value} | measure_one(decoder(width, layers, T), batch, T, device, shared, rate, bandwidth)
            )
        for before, row in pairwise(rows):
            row["growth"] = row["seconds"] / before["seconds"] / (row["forecast"] / before["forecast"])
        rows[0]["growth"] = 1.0
        told["sweeps"][name] = rows
        print(f"\n{name:>8} {'ms':>10} {'forecast':>10} {'share':>7} {'growth':>7} {'GB':>8} {'forecast':>9}")
        for row in rows:
            share = row["forecast"] / row["seconds"]
            print(
                f"{row[name]:8,} {1e3 * row['seconds']:10.3f} {1e3 * row['forecast']:10.3f} {share:7.0%} {row['growth']:7.2f} "
                f"{row['peak_bytes'] / 1e9:8.3f} {row['peak_forecast'] / 1e9:9.3f}",
                flush=True,
            )
    return told


def decoder(width: int, layers: int, length: int) -> ch.Config:
    heads = max(1, width // (128 if width >= 1024 else 64))
    sizes = dict(n_layers=layers, d_model=width, n_heads=heads, n_kv_heads=heads, d_head=width // heads)
    return ch.preset("llama-7b", **sizes, d_ff=width * 11 // 4, vocab_size=1024, max_len=length)


def measure_one(
    config: ch.Config, batch: int, length: int, device: str, shared: bool, rate: float, bandwidth: float
) -> dict[str, Any]:
    precision = "bfloat16" if device == "cuda" else "float32"
    told = ch.cost(config, batch=batch, length=length, precision=precision, device=device)
    forecast = max(told.useful_flops / rate, told.weight_bytes / bandwidth)
    if device == "cuda":
        seconds, peak = on_gpu(config, batch, length)
    else:
        work = Workload(config=config, batch=batch, length=length)
        (found,), again = measure(work, repeats=1), repeat_step(work)
        seconds, peak = min(interleave({"": again}, rounds=7, shared=shared)[""]), found.peak_bytes
    return dict(seconds=seconds, forecast=forecast, peak_bytes=peak, peak_forecast=told.peak_bytes)


@torch.no_grad()
def on_gpu(config: ch.Config, batch: int, length: int) -> tuple[float, int]:
    torch.cuda.empty_cache()
    model = ch.build(config, device="cuda", dtype=torch.bfloat16).eval()
    tokens = torch.randint(0, config.vocab_size, (batch, length), device="cuda")
    model(tokens)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    model(tokens)
    peak = torch.cuda.max_memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(tokens)
    return timed(graph.replay), peak


def timed(go: Callable[[], object]) -> float:
    """Seconds of one call on the GPU: the median of five times, each of enough calls for 20 ms."""
    go()
    once = _events(go, 1)
    n = max(1, round(0.02 / once))
    return statistics.median(_events(go, n) for _ in range(5))


def _events(go: Callable[[], object], n: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(n):
        go()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / n


def measure_copy(device: str, shared: bool) -> float:
    """Bytes a second of a large copy, those read and those written."""
    a = torch.randn(2**28 if device == "cuda" else 2**24, device=device)
    b = torch.empty_like(a)
    if device == "cuda":
        return 2 * a.nbytes / timed(lambda: b.copy_(a))
    return 2 * a.nbytes / min(interleave({"": lambda: b.copy_(a)}, rounds=7, shared=shared)[""])


def draw(file: Path, told: dict[str, Any]) -> None:
    """Time above, memory below; forecasts as lines, what was measured as dots."""
    from matplotlib.ticker import LogLocator, NullLocator

    from clearhead.inside.figure_grid import PlotFigure

    sweeps: dict[str, list[dict[str, Any]]] = told["sweeps"]
    figure = PlotFigure(11, 5.6)
    figure.set_layout_engine("constrained")
    grid = figure.subplots(2, len(sweeps))
    for column, (name, rows) in enumerate(sweeps.items()):
        x = [row[name] for row in rows]
        shown = [("milliseconds", 1e3, "forecast", "seconds"), ("gigabytes", 1e-9, "peak_forecast", "peak_bytes")]
        for row, (unit, factor, forecast, measured) in enumerate(shown):
            axis = grid[row, column]
            axis.plot(x, [factor * each[forecast] for each in rows], color="#0072B2", label="forecast")
            axis.plot(x, [factor * each[measured] for each in rows], "o", color="#D55E00", label="measured")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axis.yaxis.set_minor_locator(NullLocator())
            axis.yaxis.set_major_formatter("{x:g}")
            axis.set_xticks(x[:: 1 if len(x) < 7 else 2], [f"{each:,}" for each in x[:: 1 if len(x) < 7 else 2]])
            axis.set_ylabel(unit if column == 0 else "")
            axis.grid(alpha=0.3)
        grid[1, column].set_xlabel({"length": "tokens of one row", "width": "width", "batch": "rows of a batch"}[name])
    grid[0, 0].legend(frameon=False)
    where = f"{told['threads']} core of an" if told.get("threads") == 1 else "one"
    figure.suptitle(f"A forward pass on {where} {told['device']}: what it takes, and what the machine's ceilings allow")
    figure.savefig(file, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    sys.exit(main())
