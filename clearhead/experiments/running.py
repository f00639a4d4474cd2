"""Run an experiment, and write what it gave: page.md, figure.svg and result.json."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from clearhead.checkpoint.durable_files import write_text
from clearhead.errors import InputError
from clearhead.experiments.catalogue import Entry, load_experiment
from clearhead.experiments.page import page
from clearhead.experiments.result import Result
from clearhead.training.run_folder import processor
from clearhead.training.threads import num_threads


@dataclass(frozen=True)
class Report:
    """A result, and how it came about."""

    name: str
    question: str
    command: str
    machine: str
    seconds: float  # of processor time
    result: Result


def run(entry: Entry, *, size: str = "usual", n_seeds: int = 1, text: Path | None = None) -> Report:
    """Measure and conclude, on one thread: models are small, and so the numbers do not depend on how many cores there are."""
    if text is not None and not entry.reads_text:
        raise InputError(f"{entry.name} makes its own data; got a text, {text}; leave it out")
    if n_seeds < 1:
        raise InputError(f"an experiment needs a seed; got seeds={n_seeds}; nearest valid: 1")
    module = load_experiment(entry)
    began = time.process_time()
    with num_threads(1):
        given = (module.SIZES[size], range(n_seeds))
        measured = module.measure(*given, text) if entry.reads_text else module.measure(*given)
    options = [f"--seeds {n_seeds}"] * (n_seeds > 1) + [f"--{size}"] * (size != "usual")
    options += [f"--text {text}"] if text else []
    return Report(
        name=entry.name,
        question=entry.question,
        command=" ".join(["clearhead experiment", entry.name, *options]),
        machine=f"{processor()}, one thread, torch {torch.__version__}, Python {sys.version.split()[0]}",
        seconds=time.process_time() - began,
        result=module.conclude(measured),
    )


def write(report: Report, folder: Path) -> None:
    """The page, its figure and the numbers. The figure's module comes first: without matplotlib nothing is written."""
    from clearhead.experiments import figure

    folder.mkdir(parents=True, exist_ok=True)
    figure.write(report.result, folder / "figure.svg")
    write_text(folder / "page.md", page(report.question, measured_on(report), report.result, "figure.svg"))
    write_text(folder / "result.json", json.dumps(asdict(report), indent=1) + "\n")


def measured_on(report: Report) -> str:
    return f"Measured by `{report.command}` in {report.seconds:.0f} s of processor time: {report.machine}."
