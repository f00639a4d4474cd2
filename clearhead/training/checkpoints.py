"""Checkpoints of a run: torch's distributed ones, as safetensors, so that any number of processes reads what any other wrote.

A checkpoint is a folder `step-000400` with each process's tensors and a `state.json`. It is written under another name and
renamed when it is whole; what a kill leaves half is never taken for one. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from clearhead.errors import CheckpointError
from clearhead.training.processes import Processes

KEPT = 2  # the newest ones; the best is kept too


@dataclass
class State:
    """Where a run stands, beside its tensors. Order, dropout and rates are functions of the step: there is no more to it."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float | None = None  # the best value of the watched metric, and the step it was measured at
    best_step: int = 0
    misses: int = 0  # evaluations since then


class Checkpoints:
    """The checkpoints of one run folder. `say` is told what a user should know."""

    def __init__(self, folder: Path, processes: Processes, *, kept: int = KEPT, say: Callable[[str], None]) -> None:
        self.folder, self.processes, self.kept, self.say = folder, processes, max(KEPT, kept), say

    def all(self) -> list[Path]:
        """Every whole checkpoint, the oldest first."""
        return sorted(path for path in self.folder.glob("step-*") if (path / "state.json").is_file())

    def at(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def write(self, state: State, tensors: Mapping[str, Tensor]) -> None:
        """Write a checkpoint and remove those no longer wanted. All processes call this together."""
        final, work = self.at(state.step), self.folder / f".step-{state.step:08}.tmp"
        problem = ""
        try:
            if self.processes.is_first:
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir(parents=True)
            self.processes.wait()
            writer = HuggingFaceStorageWriter(str(work), save_distributed=True)
            with alone_is_fine():
                dcp.save(dict(tensors), storage_writer=writer)
            if self.processes.is_first:
                self._complete(work, final, state)
        except (OSError, dcp.api.CheckpointException, RuntimeError) as error:  # a full disk comes as any of them
            problem = _reason(error)
        if self.processes.any(bool(problem)):
            shutil.rmtree(work, ignore_errors=True)
            done = self.all()
            last = f"the last whole one is {done[-1].name}" if done else "there is none yet"
            raise CheckpointError(
                f"{final} could not be written ({problem or 'another process failed'}); {last}; "
                f"make room or mend the folder, then resume with: clearhead train --resume {self.folder.parent}"
            )
        if self.processes.is_first:
            self._rotate(state)
        self.processes.wait()

    def _complete(self, work: Path, final: Path, state: State) -> None:
        sums: dict[str, int] = {}
        for file in sorted(work.iterdir()):
            sums[file.name] = checksum(file)
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        text = json.dumps({"state": asdict(state), "processes": self.processes.world, "crc32": sums}, indent=2)
        with (work / "state.json").open("w", encoding="utf-8") as stream:
            stream.write(text + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        shutil.rmtree(final, ignore_errors=True)
        work.rename(final)

    def _rotate(self, state: State) -> None:
        wanted = {path.name for path in self.all()[-self.kept :]} | {self.at(state.best_step).name}
        for path in [*self.folder.glob("step-*"), *self.folder.glob(".step-*.tmp")]:
            if path.name not in wanted:
                shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> tuple[Path, State] | None:
        """The newest checkpoint whose files are what was written; a damaged one is passed over, and said."""
        for path in reversed(self.all()):
            try:
                told = json.loads((path / "state.json").read_text(encoding="utf-8"))
                for name, wanted in told["crc32"].items():
                    if checksum(path / name) != wanted:
                        raise ValueError(f"{name} does not match its checksum")
                return path, State(**told["state"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                self.say(f"{path} is damaged ({error}) and passed over; going back to the one before")
        return None

    def read(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Fill the tensors from a checkpoint, whatever number of processes wrote it."""
        wanted = dict(tensors)
        try:
            with alone_is_fine():
                dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(path)))
        except (OSError, dcp.api.CheckpointException, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path} does not fit this run ({_reason(error)}); resume with the recipe it was written by"
            ) from None

    @torch.no_grad()
    def average(self, steps: int, tensors: Mapping[str, Tensor]) -> int:
        """Fill the tensors with their mean over the last checkpoints; returns of how many."""
        paths = self.all()[-steps:]
        sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in tensors.items()}
        for path in paths:
            self.read(path, tensors)
            for name, tensor in tensors.items():
                sums[name] += tensor
        for name, tensor in tensors.items():
            tensor.copy_(sums[name] / len(paths))
        return len(paths)


@contextmanager
def alone_is_fine() -> Generator[None]:
    """torch warns where there is only one process, which is the usual case here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(2**22):
            value = zlib.crc32(block, value)
    return value


def _reason(error: BaseException) -> str:
    """The cause, in one line. torch wraps what went wrong in each process."""
    if isinstance(error, dcp.api.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().split("\n")[0][:200]
