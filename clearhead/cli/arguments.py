"""Arguments and options that several commands share, and how they are read."""

from __future__ import annotations

import sys
import warnings
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.data import Tokenizer
    from clearhead.models import Decoder, Encoder, EncoderDecoder

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model's folder or file, or its name on the hub (hf:owner/name).")
]
LineFile = Annotated[str, typer.Argument(metavar="FILE", help="A file with one text a line; - reads standard input.")]
Beams = Annotated[int, typer.Option(min=1, help="Texts kept at each step; 1 is greedy.")]
Truncate = Annotated[
    bool, typer.Option("--truncate", help="Cut a text that is too long at its end. Without it, that is an error.")
]
Quantize = Annotated[
    Literal["int8", "int4"] | None,
    typer.Option(help="Hold the weights in 8 or 4 bits: faster and smaller, a little less exact."),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda ... auto takes a GPU if there is one.")]


def find_model(name: str) -> Path:
    """The folder or file of a model. A name on the hub is downloaded. Of a run that goes on or was stopped, its step is said."""
    from clearhead.checkpoint.hub import download

    path = Path(name) if Path(name).exists() else download(name)
    if (path / "checkpoints").is_dir():
        from clearhead.checkpoint.run_checkpoint import unfinished

        if note := unfinished(path):
            typer.echo(f"clearhead: {note}", err=True)
            warnings.filterwarnings("ignore", message=".* is not finished: this is")  # `load` says it again
    return path


def find_device(name: str) -> str:
    """The name of a device that works here; "auto" is a GPU if there is one, else the CPU."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise InputError(f"--device {name!r} can not be used here ({reason}); try cpu, or leave it out") from None
    return name


def load_model(path: Path, device: str, quantize: str | None = None) -> Decoder | EncoderDecoder | Encoder:
    """The model in a folder or file, ready to run."""
    from clearhead.checkpoint import load

    if quantize is None:
        return load(path, device=device)
    from clearhead.quantization.integer import quantize as quantize_model

    # Quantised before it moves: the device may be too small for the full weights.
    return quantize_model(load(path), quantize).to(device)


def load_tokenizer_of(model_path: Path) -> Tokenizer:
    """The tokenizer in a model's folder, inside its .gguf file, or beside its file."""
    from clearhead.data import load_tokenizer

    holds_it = model_path.is_dir() or model_path.suffix == ".gguf"
    return load_tokenizer(model_path if holds_it else model_path.parent)


def check_folder(option: str, file: Path | None) -> None:
    """Refuse an output file whose folder does not exist, before any work is done for it."""
    if file is not None and not file.parent.is_dir():
        raise InputError(f"{option} {str(file)!r}: there is no folder {str(file.parent)!r}; make it first")


def open_binary(name: str) -> str | BytesIO:
    """A file's name as it is; for "-" the bytes of standard input."""
    return BytesIO(sys.stdin.buffer.read()) if name == "-" else name


def read_text(text: str) -> str:
    """A text from the command line, or for "-" all of standard input without its last line break."""
    if text != "-":
        return text
    if sys.stdin.isatty():
        typer.echo("clearhead: write your prompt; Ctrl-D on a line of its own ends it", err=True)
    text = _decode(sys.stdin.buffer.read(), "standard input")
    if not text.strip():
        raise InputError("standard input holds no text; pipe a prompt in, or give one after the model")
    return text.removesuffix("\n").removesuffix("\r")


def read_lines(name: str) -> list[str]:
    """The lines of a text file, or for "-" of standard input."""
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise InputError(f"{name!r} can not be read ({error.strerror or error}); is the path right?") from None
    shown = "standard input" if name == "-" else repr(name)
    # Not splitlines: it also splits at characters that are part of a text.
    lines = [line.rstrip("\r") for line in _decode(raw, shown).removesuffix("\n").split("\n")]
    if not any(line.strip() for line in lines):
        raise InputError(f"{shown} holds no text; give one text a line")
    return lines


def _decode(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is no text in UTF-8 ({error}); convert it first") from None
