"""Finding: what became of one law. Comparison: the largest difference between two computations of the same numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Outcome = Literal["pass", "fail", "skipped"]
OUTPUT = "output"


@dataclass(frozen=True)
class Finding:
    """One law: whether it holds, the largest error and the one allowed, and why: of the limit, of a failure or of a skip."""

    outcome: Outcome
    reason: str
    error: float | None = None  # relative to the largest number of the expected output
    allowed: float | None = None
    # The same error after each block, where blocks were compared.
    layers: dict[str, float] = field(default_factory=dict)
    law: str = ""  # in words; who runs a check names it


class Skip(Exception):  # noqa: N818 - a reason, not an error
    """A law that can not be checked here; the message is the reason."""


class Comparison:
    """Differences of pairs of tensors under a name: a model's output, or the residual stream after a block."""

    def __init__(self) -> None:
        self.largest: dict[str, float] = {}  # difference
        self.scale: dict[str, float] = {}  # the largest expected number

    def add(self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Compare under each name that both have."""
        for name in expected.keys() & found.keys():
            ours, theirs = found[name].detach().double().cpu(), expected[name].detach().double().cpu()
            if ours.shape != theirs.shape:
                raise ValueError(f"{name} has shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}")
            difference = float((ours - theirs).abs().max()) if ours.numel() else 0.0
            # NaN is larger than any limit.
            self.largest[name] = max(self.largest.get(name, 0.0), math.inf if math.isnan(difference) else difference)
            self.scale[name] = max(self.scale.get(name, 0.0), float(theirs.abs().max()) if theirs.numel() else 0.0)

    @property
    def errors(self) -> dict[str, float]:
        """The largest difference under each name, relative to the largest expected number."""
        return {name: self._relative(name) for name in sorted(self.largest, key=_place)}

    def _relative(self, name: str) -> float:
        difference, scale = self.largest[name], self.scale[name]
        return difference / scale if 0 < scale < math.inf else (math.inf if difference else 0.0)

    def judge(self, allowed: float, reason: str) -> Finding:
        """Whether the output's error is at most `allowed`; of a failure, the first block whose error is above it."""
        errors = self.errors
        error = errors.pop(OUTPUT)
        if error <= allowed:
            return Finding("pass", reason, error, allowed, errors)
        first = next((name for name, each in errors.items() if not each <= allowed), None)
        where = f"first seen after {first}" if first else "no block differs as much" if errors else "in the output"
        return Finding("fail", f"{where}; allowed: {reason}", error, allowed, errors)


def _place(name: str) -> tuple[bool, str, int]:
    """Blocks in the order of the computation, the output last."""
    stack, _, number = name.rpartition(".")
    return name == OUTPUT, "" if stack.startswith("encoder") else stack, int(number) if number.isdecimal() else 0


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)
