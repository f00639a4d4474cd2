"""Checkpoints of a run: torch.distributed.checkpoint with safetensors, so that another number of processes can read them.

A checkpoint is a folder `step-00000400` with each process's tensors and a `state.json`. It is written under a temporary name
and renamed when it is complete: a kill leaves no half checkpoint. Nothing is pickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from clearhead import kernels
from clearhead.checkpoint.checksums import file_checksum, seal
from clearhead.checkpoint.durable_files import sync_file, sync_folder, write_new
from clearhead.checkpoint.run_checkpoint import plain_errors, read_state, read_tensors
from clearhead.errors import CheckpointError
from clearhead.training.distributed import Processes

KEPT = 2  # this many newest checkpoints, and the best one


@dataclass
class State:
    """What a checkpoint holds besides tensors. Data order, dropout and learning rates are functions of the step."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float | None = None  # the best value of the watched metric, and the step it was measured at
    best_step: int = 0
    misses: int = 0  # evaluations since the best one
    losses: list[float] = field(default_factory=list)  # of each step since the last row of metrics.jsonl
    lengths: list[float] = field(default_factory=list)  # the gradients' norm of each of these steps
    predictions: int = 0
    skipped: int = 0  # steps whose gradient was NaN or infinite, which changed nothing
    skips: int = 0  # so many of the last steps in a row
    accumulate: int = 0  # parts of a batch, if memory did not suffice for as many as the recipe says


class Checkpoints:
    """The checkpoints of one run folder. `note` is called with what a user should know."""

    def __init__(
        self,
        folder: Path,
        processes: Processes,
        *,
        keep: int = 0,
        averaged: Callable[[int], bool] = lambda step: True,
        describes: Mapping[str, Any] = MappingProxyType({}),
        note: Callable[[str], None],
    ) -> None:
        """The newest `keep` checkpoints whose step is `averaged` are kept for their mean; one written at Ctrl-C is not averaged.
        `describes` goes into each state.json: what `load` needs to make a model of a checkpoint.
        """
        self.folder, self.processes, self.keep, self.averaged, self.note = folder, processes, keep, averaged, note
        self.describes = describes

    def all(self) -> list[Path]:
        """Every complete checkpoint, the oldest first."""
        return sorted(path for path in self.folder.glob("step-*") if (path / "state.json").is_file())

    def to_average(self, n: int) -> list[Path]:
        """The newest n checkpoints for the mean, the oldest first."""
        return [path for path in self.all() if self.averaged(int(path.name[5:]))][-n:] if n else []

    def at(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def write(self, state: State, tensors: Mapping[str, Tensor]) -> None:
        """Write a checkpoint and remove old ones. All processes must call this."""
        final, work = self.at(state.step), self.folder / f".step-{state.step:08}.tmp"
        first = self.processes.is_first
        self._try(lambda: self._begin(work) if first else None, final)
        self._try(lambda: _save(work, tensors), final)
        self._try(lambda: self._complete(work, final, state) if first else None, final)
        if first:
            self._rotate(state)
        self.processes.barrier()

    def _try(self, stage: Callable[[], None], final: Path) -> None:
        """Run a stage; if it fails in one process, raise in all of them, so that none waits for ever."""
        problem = ""
        try:
            stage()
        except Exception as error:  # a full disk may raise any of torch's and safetensors' errors
            problem = _reason(error)
        if not self.processes.any(bool(problem)):
            return
        shutil.rmtree(final.with_name(f".{final.name}.tmp"), ignore_errors=True)
        done = self.all()
        last = f"the last whole one is {done[-1].name}" if done else "there is none yet"
        raise CheckpointError(
            f"{final} could not be written ({problem or 'another process failed'}); {last}; "
            f"make room or mend the folder, then resume with: clearhead train --resume {self.folder.parent}"
        )

    def _begin(self, work: Path) -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)

    def _complete(self, work: Path, final: Path, state: State) -> None:
        sums: dict[str, int] = {}
        for file in sorted(work.iterdir()):
            sums[file.name] = file_checksum(file)
            sync_file(file)
        facts = {"state": asdict(state), "processes": self.processes.world_size, "crc32": sums, **self.describes}
        text = json.dumps(seal(facts), indent=2)
        write_new(work / "state.json", (text + "\n").encode())
        sync_folder(work)
        shutil.rmtree(final, ignore_errors=True)
        work.rename(final)
        sync_folder(self.folder)

    def _rotate(self, state: State) -> None:
        wanted = {path.name for path in [*self.all()[-KEPT:], *self.to_average(self.keep), self.at(state.best_step)]}
        for path in [*self.folder.glob("step-*"), *self.folder.glob(".step-*.tmp")]:
            if path.name not in wanted:
                shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> tuple[Path, State] | None:
        """The newest checkpoint that is not damaged."""
        found = ((path, self.check(path)) for path in reversed(self.all()))
        return next(((path, state) for path, state in found if state is not None), None)

    def check(self, path: Path) -> State | None:
        """The state of a checkpoint; None, and a note to the user, if its files do not match their checksums."""
        try:
            return State(**read_state(path)["state"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.note(f"{path} is damaged ({_reason(error)}) and passed over")
            return None

    def read(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Fill the tensors from a checkpoint, which any number of processes may have written."""
        try:
            read_tensors(path, tensors)
        except Exception as error:
            raise CheckpointError(
                f"{path} does not fit this run ({_reason(error)}); resume with the recipe it was written by"
            ) from None

    @torch.no_grad()
    def average(self, steps: int, tensors: Mapping[str, Tensor]) -> int:
        """Fill the tensors with their mean over the last checkpoints; returns how many there were. With none, nothing changes."""
        paths = [path for path in self.to_average(steps) if self.check(path) is not None]
        if not paths:
            return 0
        sums = {name: torch.zeros_like(kernels.to_float64(tensor)) for name, tensor in tensors.items()}
        for path in paths:
            self.read(path, tensors)
            for name, tensor in tensors.items():
                sums[name] += kernels.to_float64(tensor)
        for name, tensor in tensors.items():
            tensor.copy_(sums[name] / len(paths))
        return len(paths)


def _save(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

    with plain_errors():
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def _reason(error: BaseException) -> str:
    """The error's message in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().split("\n")[0][:200]
