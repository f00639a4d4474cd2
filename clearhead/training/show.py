"""What a run says while it runs. The library is silent; the command line passes a `Show` that draws."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

Row = dict[str, Any]  # one line of metrics.jsonl


class Show:
    """Says nothing. A subclass overrides what it wants to show."""

    def note(self, text: str) -> None:
        """Something a user should know: lines dropped, a checkpoint passed over."""

    def progress(self, title: str) -> Callable[[int, int], None]:
        """A bar for work before the first step; call it with (done, total)."""
        return lambda done, total: None

    def begin(self, summary: dict[str, str], step: int, steps: int) -> None:
        """All is ready; the first step comes next."""

    def step(self, row: Row) -> None:
        """A logged step."""

    def evaluated(self, row: Row) -> None:
        """An evaluation on held-out data."""

    def end(self) -> None:
        """No more steps: what follows is the result."""


class Interrupts:
    """While this is open, Ctrl-C and a polite kill are kept until a step is done; a second Ctrl-C ends at once.

    With an `echo`, one that follows within a second is no second one: torchrun passes on what the terminal sent to all.
    """

    def __init__(self, *, echo: bool = False) -> None:
        self.raised, self.since, self.echo = False, 0.0, echo
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._keep)
            except ValueError:  # not the main thread: whoever runs us there handles signals
                break
        return self

    def _keep(self, number: int, frame: Any) -> None:
        if self.raised and not (self.echo and time.monotonic() < self.since + 1):
            raise KeyboardInterrupt
        self.raised, self.since = True, time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
