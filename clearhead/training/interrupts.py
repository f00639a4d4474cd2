"""Ctrl-C and SIGTERM during a run. At once while data is prepared; within the loop after the current step, which is then saved."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """The first signal, where nothing is lost by stopping at once."""


class Interrupts:
    """While this is open, the first Ctrl-C or SIGTERM raises `Interrupted`; within `held`, it only sets `raised`.

    The second one raises KeyboardInterrupt. With `echo`, a signal within a second of the first is ignored: torchrun sends again
    what the terminal sent to all processes.
    """

    def __init__(self, *, echo: bool = False) -> None:
        self.raised, self.since, self.echo, self._holds = False, 0.0, echo, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread: our caller handles signals
                break
        return self

    @contextmanager
    def held(self) -> Generator[None]:
        """The first signal waits: who asks for `raised` decides when to stop."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False

    def _handle(self, number: int, frame: Any) -> None:
        if self.raised:
            if self.echo and time.monotonic() < self.since + 1:
                return
            raise KeyboardInterrupt
        self.raised, self.since = True, time.monotonic()
        if not self._holds:
            raise Interrupted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
