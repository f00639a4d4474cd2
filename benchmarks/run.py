"""`make bench`: speed and memory of clearhead, beside other libraries where they do the same work.

    .venv-bench/bin/python benchmarks/run.py                        everything, in under 20 minutes on 2 cores
    .venv-bench/bin/python benchmarks/run.py sliding_window --quick one benchmark, fewer rounds, nothing saved
    .venv-bench/bin/python benchmarks/run.py train_step --nanogpt nanoGPT/model.py
    .venv-bench/bin/python benchmarks/run.py train_step --shared    on a computer that other programs use too

Tables go to the terminal, and with the machine, the versions and the unrounded figures to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib import import_module
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself at each start

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.results import machine, save, versions

BENCHMARKS = (
    *("train_step", "encode", "vit", "startup", "data_parallel"),
    *("attention_memory", "sliding_window", "sparse_attention", "checkpoint", "head_sweep"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure clearhead's speed and memory.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which benchmarks: {', '.join(BENCHMARKS)} (all)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and settings; rough, and not saved")
    parser.add_argument("--shared", action="store_true", help="one thread and CPU time, for a computer in use")
    parser.add_argument("--nanogpt", metavar="PATH", help="nanoGPT's model.py, to time it too")
    options = parser.parse_args()
    for name in options.names:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark is called {name!r}; there are {', '.join(BENCHMARKS)}")

    console = Console()
    here, installed = machine(), versions()
    console.print(f"{here['cpu']}, {here['cores']} cores, {here['threads']} threads, {here['vectors']}")
    console.print(", ".join(f"{package} {version}" for package, version in installed.items()), end="\n\n")
    for name in options.names or BENCHMARKS:
        start = time.perf_counter()
        tables = []
        for table in import_module(f"benchmarks.cpu.{name}").measure(options):
            table.show(console)
            tables.append(table)
        seconds = time.perf_counter() - start
        if not options.quick:
            page = save(f"{name}-shared" if options.shared else name, tables, seconds=seconds)
            console.print(f"[dim]{os.path.relpath(page)}, after {seconds:.0f} s[/dim]\n")


if __name__ == "__main__":
    main()
