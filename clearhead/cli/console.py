"""Where commands print."""

from __future__ import annotations

from rich.console import Console


def wide_console() -> Console:
    """The terminal; for a pipe, which has no width to fit, one wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=120)
