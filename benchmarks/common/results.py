"""Tables for the terminal and for results/, and what every figure must be read with: the machine and the versions."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    raw: dict[str, Any] = field(default_factory=dict)  # the figures behind the rows, unrounded; for the JSON only

    def show(self, console: Console) -> None:
        table = RichTable(title=self.title, title_justify="left", title_style="bold", caption=self.note or None)
        table.caption_justify = "left"
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        console.print()


def save(name: str, tables: list[Table], *, seconds: float) -> Path:
    """Write one benchmark's tables and circumstances; the newest run replaces the one before."""
    RESULTS.mkdir(exist_ok=True)
    page = RESULTS / f"{name}.json"
    found = {
        "benchmark": name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "seconds": round(seconds, 1),
        "machine": machine(),
        "versions": versions(),
        "tables": [asdict(table) for table in tables],
    }
    page.write_text(json.dumps(found, indent=2) + "\n")
    return page


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load": [round(x, 2) for x in os.getloadavg()],  # above the benchmark's own threads: other programs were busy
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("clearhead", "torch", "transformers", "x-transformers", "ctranslate2", "onnxruntime"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
