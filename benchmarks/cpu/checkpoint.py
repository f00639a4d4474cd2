"""Loading a 1 GB checkpoint: time, and the most memory the process ever held, against transformers."""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import torch

import clearhead as ch
from benchmarks.common.results import Table
from benchmarks.common.timing import in_fresh_process

LAYERS = 12  # of a LLaMA shape: 264 M parameters, 1.06 GB in float32


def measure(options: Namespace) -> list[Table]:
    rounds = 1 if options.quick else 3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        in_fresh_process(make, str(path))
        size = sum(file.stat().st_size for file in path.iterdir())
        contenders = {"clearhead": with_clearhead, "transformers": with_transformers}
        for work in contenders.values():
            in_fresh_process(work, str(path))  # the file comes from the page cache for both
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, work in contenders.items():
                found[name].append(in_fresh_process(work, str(path)))
    rows = [
        [
            name,
            f"{statistics.median(seconds for seconds, _ in seen):.2f} s",
            f"{statistics.median(held for _, held in seen) / 2**20:,.0f} MiB",
            f"{statistics.median(held for _, held in seen) / size:.2f}",
        ]
        for name, seen in found.items()
    ]
    return [
        Table(
            title="load a float32 LLaMA checkpoint",
            columns=["library", "time until every weight was used once", "memory at its peak", "times the file"],
            rows=rows,
            note=f"{size / 1e9:.2f} GB, page cache warm, a fresh process each; medians of {rounds} rounds in turns",
            raw={"found": found, "bytes": size},
        )
    ]


def make(path: str) -> None:
    config = ch.preset("llama-7b", n_layers=LAYERS, d_model=1024, n_heads=16, d_ff=4096)
    ch.save(ch.build(config), path, format="hf")


def with_clearhead(path: str) -> tuple[float, int]:
    from clearhead.checkpoint import load

    before = _peak()
    start = time.perf_counter()
    model = load(path)
    return _used(model, start, before)


def with_transformers(path: str) -> tuple[float, int]:
    import transformers
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    before = _peak()
    start = time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(path)
    return _used(model, start, before)


def _used(model: torch.nn.Module, start: float, before: int) -> tuple[float, int]:
    """Seconds and memory until every weight was read once: one that is only mapped costs when it is first used."""
    for parameter in model.parameters():
        parameter.detach().sum()
    return time.perf_counter() - start, _peak() - before


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
