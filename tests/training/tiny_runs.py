"""Tiny runs for tests: small data files, and recipes that train in less than a second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from clearhead.training import Callbacks, Recipe, Result, train
from clearhead.training.callbacks import Row
from clearhead.training.metrics_log import read_repeatable
from clearhead.training.recipe import Data

ROOT = Path(__file__).resolve().parents[2]
SMALL = dict(n_layers=1, d_model=8, n_heads=2, d_ff=13, dropout=0.1, norm="rms", positions="rotary")


def write_lines(file: Path, lines: list[str]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(file)


def write_pairs(folder: Path, n: int = 61) -> tuple[str, str]:
    """Numbers, and their digits in another order."""
    numbers = [str(7919 * i % 99991) for i in range(1, n + 1)]
    return write_lines(folder / "a.source", numbers), write_lines(folder / "a.target", [x[::-1] for x in numbers])


def write_text(folder: Path, n: int = 97) -> str:
    return write_lines(folder / "a.txt", [f"line {i} has {i * i} in it" for i in range(n)])


def write_table(folder: Path, n: int = 53) -> str:
    return write_lines(
        folder / "a.csv", ["text,label", *(f"{i} is said,{'odd' if i % 2 else 'even'}" for i in range(n))]
    )


def write_pictures(folder: Path, n: int = 7) -> str:
    from PIL import Image

    for label, shade in (("dark", 40), ("light", 200)):
        (folder / "pictures" / label).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            pixels = np.full((8, 8, 3), shade + i, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / label / f"{i}.png")
    return str(folder / "pictures")


def make_recipe(
    task: str, folder: Path, *, model: dict[str, Any] | None = None, start: Path | None = None, **changes: Any
) -> Recipe:
    """A tiny recipe of a task, its data written into `folder`; with `start`, from that run's model."""
    data: dict[str, Any] = dict(tokenizer="chars", length=29)
    match task:
        case "translate":
            source, target = write_pairs(folder)
            data |= dict(source=source, target=target)
        case "pictures":
            data |= dict(files=write_pictures(folder), shift=1, flip=True, valid_share=0.3)
            model = dict(inputs="patches", image_size=8, patch_size=4, positions="learned") | (model or {})
        case "classify":
            data |= dict(files=write_table(folder))
        case _:
            data |= dict(files=write_text(folder))
    train: dict[str, Any] = dict(steps=6, batch_tokens=131, warmup=2, log_every=1, evaluate_every=3, checkpoint_every=3)
    train |= dict(samples=1, score_rows=2, tensorboard=False, evaluate_rows=11, device="cpu")
    for name, value in changes.items():
        (data if name in {field.name for field in fields(Data)} else train)[name] = value
    shape = {"language": "decoder", "translate": "encoder-decoder"}.get(task, "encoder")
    model = {"shape": shape, **SMALL, **(model or {})} if start is None else {"from": str(start), "dropout": 0.1}
    tables = {"task": "classify" if task == "pictures" else task, "data": data, "train": train}
    return Recipe.from_tables({**tables, "model": model})


class Watching(Callbacks):
    """Keeps what a run reports; sends Ctrl-C at step `stop`."""

    def __init__(self, stop: int = 0) -> None:
        self.stop, self.notes, self.rows, self.valid = stop, [], [], []
        self.summary: dict[str, str] = {}
        self.began = -1

    notes: list[str]
    rows: list[Row]
    valid: list[Row]

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, summary: dict[str, str], step: int, steps: int) -> None:
        self.summary, self.began = summary, step

    def step(self, row: Row) -> None:
        self.rows.append(row)
        if row["step"] == self.stop:
            os.kill(os.getpid(), signal.SIGINT)

    def evaluated(self, row: Row) -> None:
        self.valid.append(row)


def stop_and_resume(recipe: Recipe, out: Path, *stops: int) -> Result:
    """The run, interrupted when the row of each of these steps is logged, and resumed.

    A CPU logs a row after its step. A GPU computes the next step by then, which is still finished.
    """
    for number, stop in enumerate(stops):
        result = train(recipe, out, resume=number > 0, show=Watching(stop))
        assert (result.is_complete, result.step) == (False, stop + (recipe.train.device == "cuda"))
    return train(recipe, out, resume=True)


metrics = read_repeatable  # what two equal runs have in common


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint that one process wrote."""
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def steps_kept(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*"))


def command(*arguments: str | Path, processes: int = 0, cwd: Path = ROOT, timeout: float = 100.0) -> Any:
    """`clearhead ...` in a process of its own, or with `processes` as torchrun starts it."""
    python = torchrun(processes) if processes else [sys.executable, "-m", "clearhead"]
    return subprocess.run(
        [*python, *map(str, arguments)],
        cwd=cwd,
        env=plain_environment(),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=timeout,
    )


def torchrun(processes: int) -> list[str]:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, "-m", *launcher, "-m", "clearhead"]


def plain_environment() -> dict[str, str]:
    """This process's environment without variables that colour the output; one thread."""
    kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "PYTHONPATH": path}
