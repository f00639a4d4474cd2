"""How the commands print: consoles, tables, rows as CSV or JSON, progress bars."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")
Form = Literal["table", "csv", "json"]


def wide_console(*, stderr: bool = False) -> Console:
    """The terminal; for a pipe, which has no width, a console that is wide enough for every table."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=120)


def plain_table(*columns: str, n_left: int = 1, gap: int = 2) -> Table:
    """A table without lines. The first `n_left` columns are aligned to the left, the others (numbers) to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < n_left else "right", no_wrap=True)
    return table


def write_rows(rows: list[dict[str, Any]], form: Form, base: Mapping[str, float] | None = None) -> None:
    """Rows as CSV or JSON to standard output. `base`, the numbers that the rows are relative to, is written in JSON only."""
    if form == "json":
        typer.echo(json.dumps(rows if base is None else {"base": dict(base), "heads": rows}, indent=2))
        return
    table = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)


def track(items: Iterable[T], title: str, total: int, *, printing: bool = False) -> Iterator[T]:
    """The items, with a progress bar on stderr if that is a terminal.

    `printing`: the loop prints its results. No bar is then shown on a terminal, where the results already show the progress.
    """
    with _stderr_bar(hidden=printing and sys.stdout.isatty()) as bar:
        yield from bar.track(items, total, description=title)


@contextmanager
def progress_bar(title: str, total: int) -> Generator[Callable[..., None]]:
    """A function that moves a progress bar by one, or by its argument. The bar is on stderr, if that is a terminal."""
    with _stderr_bar() as bar:
        task = bar.add_task(title, total=total)
        yield lambda steps=1: bar.advance(task, steps)


def _stderr_bar(*, hidden: bool = False) -> Progress:
    from rich.progress import Progress

    console = Console(stderr=True)
    # With redirect_stdout, rich would print to stderr what the loop prints to stdout.
    return Progress(console=console, transient=True, redirect_stdout=False, disable=hidden or not console.is_terminal)
