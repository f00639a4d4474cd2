"""What the commands share: where a model is and how it is held, what a file or standard input says, a bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.models import Decoder, Encoder, EncoderDecoder

T = TypeVar("T")

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model's folder or file, or its name on the hub (owner/name).")
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda ... auto takes a GPU if there is one.")]

Quantize = Annotated[
    Literal["int8", "int4"] | None,
    typer.Option(help="Hold the weights in 8 or 4 bits: faster and smaller, a little less exact."),
]


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


def load_model(place: Path, device: str, quantize: str | None = None) -> Decoder | EncoderDecoder | Encoder:
    """The model in a folder or file, ready to run."""
    from clearhead.checkpoint import load

    if quantize is None:
        return load(place, device=device)
    from clearhead.quantization.integer import quantize as hold_in_fewer_bits

    # Where it is read to: a device may have no room for what it holds before.
    return hold_in_fewer_bits(load(place), quantize).to(device)


def read_text(given: str) -> str:
    """A text given on the command line, or with "-" standard input's, without the line break that ends it."""
    if given != "-":
        return given
    if sys.stdin.isatty():
        typer.echo("clearhead: write your prompt; Ctrl-D on a line of its own ends it", err=True)
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is no text in UTF-8 ({error}); convert it first") from None
    if not text.strip():
        raise InputError("standard input holds no text; pipe a prompt in, or give one after the model")
    return text.removesuffix("\n").removesuffix("\r")


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
