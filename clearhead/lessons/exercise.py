"""What an exercise is: a function to write, cases to compare it on, laws that it must obey, and the mistakes that are known.

The `stub` is a real function of the exercise's file: its source is what a student gets. A student's function is compared with the
`reference`, a naive computation, on each of the `cases`. Where it differs, the known mistakes are computed on the same cases: the
one whose results are the student's is the diagnosis. `laws` are what a comparison with numbers can not say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
Args = tuple[Any, ...]
# What is wrong, in words, with its numbers; None if the law holds.
Law = Callable[[Function], str | None]


@dataclass(frozen=True)
class Mistake:
    """A mistake that is often made: a sentence for it, and the function of one who makes it.

    `measure` computes a number on the student's own function that shows the mistake; it follows the sentence.
    """

    words: str
    variant: Function
    measure: Callable[[Function], str] | None = None


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise. Its name is that of its stub.

    `answer` solves it; `sources` are the functions and classes of this library where the same is done in earnest. `proves` says
    what a function that passes has been shown to do. `observe(function, *args)` is what is compared with `reference(*args)`:
    the function's result, unless the exercise says otherwise.
    """

    stub: Function
    answer: Function
    hints: tuple[str, ...]
    proves: str
    reference: Function | None = None
    observe: Callable[..., Any] = lambda function, *args: function(*args)
    cases: Callable[[], dict[str, Args]] = dict
    mistakes: tuple[Mistake, ...] = ()
    laws: Mapping[str, Law] = field(default_factory=dict[str, Law])
    sources: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return self.stub.__name__


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn_ids(*shape: int, below: int, seed: int = 0) -> Tensor:
    """Random token ids, the same for the same seed."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))
