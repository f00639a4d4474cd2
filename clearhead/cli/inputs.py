"""What the commands share: where a model is, which lines a file has, a bar of progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from clearhead.errors import InputError

T = TypeVar("T")

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model's folder or file, or its name on the hub (owner/name).")
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda ... auto takes a GPU if there is one.")]


def find_model(name: str) -> Path:
    """The folder or file of a model; a hub name is fetched."""
    from clearhead.checkpoint.hub import download

    return Path(name) if Path(name).exists() else download(name)


def find_device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise InputError(f"--device {name!r} can not be used here ({reason}); try cpu, or leave it out") from None
    return name


def read_lines(name: str) -> list[str]:
    """The lines of a text file, or with "-" of standard input."""
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{name!r} can not be read ({error.strerror or error}); is the path right?") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{name!r} is no text in UTF-8 ({error}); convert it first") from None
    # Not splitlines: it would also cut at characters that are part of a text.
    lines = [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]
    if not any(line.strip() for line in lines):
        shown = "standard input" if name == "-" else repr(name)
        raise InputError(f"{shown} holds no text; give one text a line")
    return lines


def follow(items: Iterable[T], title: str, total: int, *, printing: bool = False) -> Iterator[T]:
    """The items, with a bar on stderr if that is a terminal. Where the loop prints to one, that is progress enough."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    hidden = not console.is_terminal or (printing and sys.stdout.isatty())
    # Redirected, what the loop prints to stdout would end up on stderr.
    with Progress(console=console, transient=True, redirect_stdout=False, disable=hidden) as bar:
        yield from bar.track(items, total, description=title)
