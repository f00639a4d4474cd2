"""How long an import takes, in fresh processes, in turns: torch, clearhead, all of clearhead, transformers."""

from __future__ import annotations

import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator

from benchmarks.common.results import Table
from benchmarks.common.timing import how_timed, spread

IMPORTS = {
    "torch": "import torch",
    "clearhead": "import clearhead",
    "clearhead, every name": "import clearhead; [getattr(clearhead, name) for name in clearhead.__all__]",
    "transformers, two models": "from transformers import BertModel, GPT2LMHeadModel",
}


def measure(options: Namespace) -> Iterator[Table]:
    rounds, names = 3 if options.quick else 5, list(IMPORTS)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(-1, rounds):  # the first brings files into memory
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            seconds = import_time(IMPORTS[name], "process_time" if options.shared else "perf_counter")
            if round_ >= 0:
                times[name].append(seconds)
    torch = statistics.median(times["torch"])
    rows = [
        [name, f"{statistics.median(taken):.3f} s", f"{spread(taken):.1%}", f"{statistics.median(taken) / torch:.2f} x"]
        for name, taken in times.items()
    ]
    yield Table(
        title="start-up",
        columns=["import of", "time", "spread", "of torch's"],
        rows=rows,
        note=f"fresh processes; {how_timed(rounds, options.shared)}; `import clearhead` alone loads no torch",
        raw={"times": times},
    )


def import_time(code: str, clock: str) -> float:
    timed = f"import time; start = time.{clock}(); {code}; print(time.{clock}() - start)"
    done = subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])
