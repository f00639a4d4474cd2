"""The folder of a run: opened, checked, read again to resume."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

from clearhead.checkpoint.durable_files import NOT_A_LINK, sweep, try_lock, write_text
from clearhead.checkpoint.run_checkpoint import steps_of
from clearhead.checkpoint.saving import STAGE
from clearhead.errors import CheckpointError, ConfigError, InputError
from clearhead.training.distributed import Processes
from clearhead.training.recipe import Recipe
from clearhead.version import __version__

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers")
LOCK = ".lock"
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


@contextmanager
def run_folder(out: str | Path | None, task: str, processes: Processes) -> Generator[Path]:
    """The run's folder, the same for all processes, locked. Errors of its disk while this is open become one CheckpointError."""
    folder = processes.broadcast(next_folder(task) if out is None else Path(out))
    is_new = processes.broadcast(not folder.exists())
    try:
        with run_lock(folder, processes):
            yield folder
    except (ConfigError, InputError):
        if is_new and processes.is_first and not has_begun(folder):
            discard(folder)
        raise
    except OSError as error:
        if error.errno not in DISK:
            raise
        raise CheckpointError(
            f"{error.filename or folder} could not be written ({error.strerror}); checkpoints written before are whole; make room "
            f"or mend the folder, then resume with: clearhead train --resume {folder}"
        ) from None


@contextmanager
def run_lock(folder: Path, processes: Processes) -> Generator[None]:
    """Refuse a folder in which another process trains. The lock goes with this process, however it ends."""
    file, handle, is_taken = folder / LOCK, None, False
    if processes.is_first:
        with suppress(OSError):  # a folder that can not be written to: `open_folder` says so
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(file, os.O_CREAT | os.O_RDWR | NOT_A_LINK, 0o666)
            # The file may have been removed between its opening and its locking: then the lock is not on the file that others see.
            is_taken = not try_lock(handle) or not file.exists() or not os.path.samestat(os.fstat(handle), file.stat())
    try:
        if processes.any(is_taken):
            raise InputError(
                f"{folder} is in use: another process trains in it now; wait until it ends, or choose another with out=FOLDER"
            )
        yield
    finally:
        if handle is not None:
            if not is_taken:
                with suppress(OSError):
                    os.unlink(file)
            os.close(handle)


def discard(folder: Path) -> None:
    """Remove what a run wrote that failed before its first step, and nothing else."""
    for name in (
        "recipe.toml",
        "environment.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "preprocessor_config.json",
    ):
        (folder / name).unlink(missing_ok=True)
    for empty in (folder / "checkpoints", folder):
        with suppress(OSError):  # not empty: it stays
            empty.rmdir()


def read_run(path: str | Path) -> Recipe:
    """The recipe of a run's folder, to resume it."""
    file = Path(path) / "recipe.toml"
    if not file.is_file():
        raise InputError(
            f"{path} holds no run: there is no recipe.toml; name the folder of a run, e.g. runs/language-1"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} can not be read ({error}); is it a run's folder?") from None
    return Recipe.read(text, name=str(file))


def next_folder(task: str, under: Path = Path("runs")) -> Path:
    """runs/translate-1, or the next number that is free."""
    taken = [path.name.removeprefix(f"{task}-") for path in under.glob(f"{task}-*")]
    return under / f"{task}-{max((int(name) for name in taken if name.isdecimal()), default=0) + 1}"


def check_folder(path: Path, *, resume: bool) -> None:
    """Refuse a folder that holds anything but this run."""
    file = path / "recipe.toml"
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; choose another folder with out=FOLDER")
    if file.exists() and not resume and has_begun(path):
        raise InputError(
            f"{path} already holds a run; go on with it: clearhead train --resume {path}, or choose another folder with out=FOLDER"
        )
    # Hidden files are left by a kill before the recipe was written.
    if path.exists() and not file.exists() and any(not each.name.startswith(".") for each in path.iterdir()):
        raise InputError(f"{path} is not empty and holds no run; choose another folder with out=FOLDER")


def open_folder(path: Path, recipe: Recipe, *, resume: bool, device: torch.device) -> None:
    """Make the folder, or check that it holds this run. Called before any work that could be lost."""
    check_folder(path, resume=resume)
    try:
        path.mkdir(parents=True, exist_ok=True)
        clear_leftovers(path)
        if not resume:  # a run that failed before its first step may have left these
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (path / name).unlink(missing_ok=True)
        write_text(path / "recipe.toml", recipe.to_toml())
        (path / "checkpoints").mkdir(exist_ok=True)
        write_text(path / "environment.json", json.dumps(environment(device), indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"{path} can not be written to ({error.strerror or error}); choose another folder with out=FOLDER"
        ) from None


def clear_leftovers(path: Path) -> None:
    """Remove what killed processes left: half-written files, folders of saves. The run's lock is held: nobody writes them now."""
    sweep(path, STAGE)
    for work in path.glob(".*.tmp"):
        with suppress(OSError):  # a folder is none of ours
            os.unlink(work)


def has_begun(path: Path) -> bool:
    """Whether the folder holds anything that took time to compute."""
    return (path / "metrics.jsonl").exists() or (path / "config.json").exists() or any((path / "checkpoints").glob("*"))


def newest_saved(path: Path) -> int:
    """The step of the newest checkpoint; 0 if there is none."""
    return max((int(step.name.removeprefix("step-")) for step in steps_of(path)), default=0)


def check_resumable(old: Recipe, new: Recipe) -> None:
    """Refuse to resume a run with another model or other data."""
    old, new = (Recipe.read(recipe.to_toml()) for recipe in (old, new))  # as read back from TOML: lists for tuples
    for part in ("task", "model", "data"):
        if old.tables()[part] != new.tables()[part]:
            raise ConfigError(f"a run goes on with the {part} it began with; start a new one to change it")
    for name in ("optimizer", "muon_beta2", "lora_rank", "seed"):
        before, now = getattr(old.train, name), getattr(new.train, name)
        if before != now:
            raise ConfigError(f"train.{name}={now!r}, but the run began with {before!r}; start a new one to change it")


def check_space(path: Path, nbytes: int) -> None:
    """Refuse to start if the disk has no room for the checkpoints."""
    free = shutil.disk_usage(path).free
    if free < nbytes:
        raise CheckpointError(
            f"{path} has {free / 1e9:.2f} GB free, but this run's checkpoints need {nbytes / 1e9:.2f} GB; make room, or "
            f"choose another disk with out=FOLDER"
        )


def environment(device: torch.device) -> dict[str, str]:
    """Versions, system and device of a run."""
    facts = {"started": datetime.now(timezone.utc).isoformat(timespec="seconds"), "clearhead": __version__}
    facts |= {"python": sys.version.split()[0], "system": platform.platform(), "processor": processor()}
    facts |= {name: version(name) for name in PACKAGES}
    facts["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    facts["threads"] = str(torch.get_num_threads())
    return facts


def processor() -> str:
    """The processor's name, if the system has one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").split("\n") if info.is_file() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()
