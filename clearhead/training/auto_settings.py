"""What `auto` means in a run: whether its step is compiled, and the type of the residual stream.

The trainer decides it once, before the first step, and the run's recipe holds what was decided: a resumed run decides nothing.
How long compiling took is kept in the cache folder for later runs on the same GPU.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from clearhead.checkpoint.durable_files import write_text
from clearhead.config import Config
from clearhead.kernels import has_triton
from clearhead.kernels.native_library import cache_folder
from clearhead.training.distributed import Processes
from clearhead.training.recipe import Recipe, Train

# The share of a step that compiling saves, in bfloat16 and in fp8, and the seconds of a first compilation: GPT-2 124M on one H200
# (docs/speed.md).
SAVED, FIRST_GUESS = 0.15, 30.0


@dataclass(frozen=True)
class Machine:
    """What the rules ask about the device."""

    device: str  # cpu, cuda ...
    name: str = ""
    world_size: int = 1
    has_triton: bool = True
    has_fp8: bool = False

    @classmethod
    def of(cls, processes: Processes) -> Machine:
        is_cuda = processes.device.type == "cuda"
        name = torch.cuda.get_device_name(processes.device) if is_cuda else ""
        has_fp8 = is_cuda and torch.cuda.get_device_capability(processes.device) >= (8, 9)
        return cls(processes.device.type, name, processes.world_size, has_triton(), has_fp8)


def choose_compile(t: Train, machine: Machine, step_seconds: float, compile_seconds: float) -> tuple[bool, str]:
    """Whether to compile, and why. `step_seconds`: the forecast of a step that is not compiled."""
    if t.compile != "auto":
        return t.compile, ""
    if machine.device != "cuda":
        return False, "compiling was no faster on a CPU" if machine.device == "cpu" else "only measured on CUDA"
    for reason, holds in (
        ("torch compiles for a GPU with triton, which is not installed", not machine.has_triton),
        ("several processes", machine.world_size > 1),
        ("train.deterministic: a compiler may choose other kernels next time", t.deterministic),
        ("train.checkpointing", t.checkpointing),
        ("LoRA", t.lora_rank > 0),
    ):
        if holds:
            return False, reason
    saved = t.steps * step_seconds * SAVED
    sums = f"it takes about {compile_seconds:.0f} s and saves about {saved:,.0f} s of {t.steps * step_seconds:,.0f} s"
    return saved > compile_seconds, sums


def choose_stream(t: Train, machine: Machine, *, compiled: bool, bfloat16: bool) -> str:
    """The type of the residual stream: bfloat16 where products are and the step is compiled, which makes it faster there."""
    if t.stream != "auto":
        return t.stream
    return "bfloat16" if machine.device == "cuda" and compiled and bfloat16 and not t.lora_rank else "float32"


def keep_decided(asked: Train, before: Train) -> Train:
    """For a resumed run: what was decided when it began, where the recipe says auto."""
    decided = {name: getattr(before, name) for name in ("compile", "stream") if getattr(asked, name) == "auto"}
    return replace(asked, **decided)


def explain(asked: Train, settled: Train, machine: Machine, why: str) -> str:
    """What was decided, for the summary before the first step."""
    parts = ["compiled" if settled.compile else "not compiled"]
    if asked.compile == "auto":
        parts[0] += f" (auto: {why})"
    if machine.device == "cuda":
        parts.append(f"residual stream in {settled.stream}" + " (auto)" * (asked.stream == "auto"))
    may_fp8 = machine.has_fp8 and machine.world_size == 1 and not settled.lora_rank
    if may_fp8 and settled.compile and settled.precision in ("auto", "bfloat16"):
        parts.append("products in 8 bits are faster: train.precision=fp8")
    return "; ".join(parts)


def program(config: Config, recipe: Recipe) -> dict[str, Any]:
    """What compiled code depends on."""
    t = recipe.train
    names = ("batch_tokens", "accumulate", "precision", "stream", "label_smoothing", "mask_share", "deterministic")
    names += ("batch_doublings", "length_doublings")
    return (
        asdict(config)
        | {"task": recipe.task, "length": recipe.data.length}
        | {name: getattr(t, name) for name in names}
    )


class CompileTimes:
    """The seconds of first steps of compiled runs, by GPU and torch version, and there by program."""

    def __init__(self, machine: Machine, program: Mapping[str, Any]) -> None:
        self.place = f"{machine.name}, torch {torch.__version__}"
        text = json.dumps(program, sort_keys=True, default=str)
        self.program = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.file = cache_folder() / "compile_seconds.json"

    def _read(self) -> dict[str, dict[str, float]]:
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
            return {str(place): {str(k): float(v) for k, v in times.items()} for place, times in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def forecast(self) -> float:
        """This program's last time, whose compiled code is kept, too; else the longest of the others; else a guess."""
        times = self._read().get(self.place, {})
        return times.get(self.program, max(times.values(), default=FIRST_GUESS))

    def keep(self, seconds: float) -> None:
        """Remember a first step's time. A cache folder that can not be written to is no error: the next run guesses again."""
        known = self._read()
        known.setdefault(self.place, {})[self.program] = round(seconds, 1)
        with suppress(OSError):
            self.file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            write_text(self.file, json.dumps(known, indent=1) + "\n")
