"""What a run reports while it runs. `display.Display` prints it; the rest of the library prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]  # one line of metrics.jsonl


class Callbacks:
    """Each method does nothing; a subclass overrides those it needs."""

    def note(self, text: str) -> None:
        """Something a user should know: dropped lines, a damaged checkpoint."""

    def progress(self, title: str) -> Callable[[int, int], None]:
        """A progress bar for work beside the steps (data, evaluations): a function of (done, total)."""
        return lambda done, total: None

    def begin(self, summary: dict[str, str], step: int, steps: int) -> None:
        """Called before the first step."""

    def step(self, row: Row) -> None:
        """Called after each logged step."""

    def evaluated(self, row: Row) -> None:
        """Called after each evaluation on held-out data."""

    def end(self) -> None:
        """Called after the last step, before the result is written."""
