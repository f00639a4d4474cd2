"""A run's folder: what lies where, and whether a run may begin or go on there."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

from clearhead.errors import CheckpointError, ConfigError, InputError
from clearhead.training.recipe import Recipe
from clearhead.version import __version__

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers")


def read_run(path: str | Path) -> Recipe:
    """The recipe of a run's folder, to resume it."""
    file = Path(path) / "recipe.toml"
    if not file.is_file():
        raise InputError(
            f"{path} holds no run: there is no recipe.toml; name the folder of a run, e.g. runs/language-1"
        )
    return Recipe.read(file.read_text(encoding="utf-8"), name=str(file))


def next_folder(task: str, under: Path = Path("runs")) -> Path:
    """runs/translate-1, or the next number that is free."""
    taken = [path.name.removeprefix(f"{task}-") for path in under.glob(f"{task}-*")]
    return under / f"{task}-{max((int(name) for name in taken if name.isdigit()), default=0) + 1}"


def open_folder(path: Path, recipe: Recipe, *, resume: bool, device: torch.device) -> None:
    """Make the folder, or check that it holds this run. Fails before any work is done that could be lost."""
    file = path / "recipe.toml"
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; choose another folder with --out")
    if file.exists() and not resume:
        raise InputError(
            f"{path} already holds a run; go on with it: clearhead train --resume {path}, or choose another folder with --out"
        )
    if path.exists() and any(path.iterdir()) and not file.exists():
        raise InputError(f"{path} is not empty and holds no run; choose another folder with --out")
    try:
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        write_text(file, recipe.to_toml())
        write_text(path / "environment.json", json.dumps(environment(device), indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"{path} can not be written to ({error.strerror or error}); choose another folder with --out"
        ) from None


def check_resumable(old: Recipe, new: Recipe) -> None:
    """Refuse to go on with another model or other data under the same name."""
    for part in ("task", "model", "data"):
        if old.tables()[part] != new.tables()[part]:
            raise ConfigError(f"a run goes on with the {part} it began with; start a new one to change it")
    for name in ("optimizer", "lora_rank", "seed"):
        before, now = getattr(old.train, name), getattr(new.train, name)
        if before != now:
            raise ConfigError(f"train.{name}={now!r}, but the run began with {before!r}; start a new one to change it")


def check_space(path: Path, nbytes: int) -> None:
    """Refuse to begin where not even two checkpoints fit."""
    free = shutil.disk_usage(path).free
    if free < nbytes:
        raise CheckpointError(
            f"{path} has {free / 1e9:.2f} GB free, but this run's checkpoints need {nbytes / 1e9:.2f} GB; make room, or "
            f"choose another disk with --out"
        )


def write_text(file: Path, text: str) -> None:
    """A reader sees the old file or the new one, never half of one."""
    work = file.with_name(f".{file.name}.tmp")
    try:
        work.write_text(text, encoding="utf-8")
        os.replace(work, file)
    finally:
        work.unlink(missing_ok=True)


def environment(device: torch.device) -> dict[str, str]:
    """What a run ran on."""
    facts = {"started": datetime.now(timezone.utc).isoformat(timespec="seconds"), "clearhead": __version__}
    facts |= {"python": sys.version.split()[0], "system": platform.platform(), "processor": processor()}
    facts |= {name: version(name) for name in PACKAGES}
    facts["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    facts["threads"] = str(torch.get_num_threads())
    return facts


def processor() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").split("\n") if info.is_file() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()
