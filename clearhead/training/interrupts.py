"""Ctrl-C and SIGTERM during a run: kept until the current step is done, so that a checkpoint can be written."""

from __future__ import annotations

import signal
import time
from types import TracebackType
from typing import Any


class Interrupts:
    """While this is open, the first Ctrl-C or SIGTERM only sets `raised`; the second one raises KeyboardInterrupt.

    With `echo`, a signal within a second of the first is ignored: torchrun sends again what the terminal sent to all processes.
    """

    def __init__(self, *, echo: bool = False) -> None:
        self.raised, self.since, self.echo = False, 0.0, echo
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread: our caller handles signals
                break
        return self

    def _handle(self, number: int, frame: Any) -> None:
        if self.raised and not (self.echo and time.monotonic() < self.since + 1):
            raise KeyboardInterrupt
        self.raised, self.since = True, time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
