"""Arguments and options that several commands share, and how they are read."""

from __future__ import annotations

import socket
import sys
import warnings
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clearhead.errors import CheckpointError, InputError, did_you_mean

if TYPE_CHECKING:
    from clearhead.data import Tokenizer
    from clearhead.models import Decoder, Encoder, EncoderDecoder

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model's folder or file, or its name on the hub (hf:owner/name).")
]
LineFile = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="A file with one text a line, or a table (.csv, .tsv, .jsonl); - reads standard input."
    ),
]
Beams = Annotated[int, typer.Option(min=1, help="Texts kept at each step; 1 is greedy.")]
Truncate = Annotated[
    bool, typer.Option("--truncate", help="Cut a text that is too long at its end. Without it, that is an error.")
]
QuantizeKind = Literal["int8", "int4", "w8a8", "w4a8"]
Quantize = Annotated[
    QuantizeKind | None,
    typer.Option(
        help="Hold the weights in 8 or 4 bits: faster and smaller, a little less exact. a8: inputs of products have 8 bits too."
    ),
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="With --quantize int4 or w4a8: a text of the kind that the model will read. Weights are rounded so that results on "
        "up to 4,096 tokens of it change least: less is lost, and loading takes longer.",
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
Column = Annotated[
    str | None, typer.Option(help="The column of the texts, where FILE is a table. Without: text.", metavar="NAME")
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda ... auto takes a GPU if there is one.")]


def find_model(name: str) -> Path:
    """The folder or file of a model. A name on the hub is downloaded. Of a run that goes on or was stopped, its step is said."""
    from clearhead.checkpoint.hub import download

    path = Path(name)
    if not path.exists():
        if len(path.parts) > 1 and path.parent.is_dir() and not name.startswith("hf:"):
            siblings = [str(each) for each in path.parent.iterdir()]
            hint = did_you_mean(name, siblings) if siblings else "that folder is empty"
            raise InputError(f"there is nothing at {name!r}; a model of the hub is hf:owner/name; {hint:.300}")
        path = download(name)
    if (path / "checkpoints").is_dir():
        from clearhead.checkpoint.run_checkpoint import unfinished

        if note := unfinished(path):
            typer.echo(f"clearhead: {note}", err=True)
            warnings.filterwarnings("ignore", message=".* is not finished: this is")  # `load` says it again
    return path


def find_device(name: str) -> str:
    """The name of a device that works here; "auto" is a GPU if there is one, else the CPU."""
    import torch

    from clearhead import kernels

    if name == "auto":
        return kernels.best_device()
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise InputError(f"--device {name!r} can not be used here ({reason}); try cpu, or leave it out") from None
    return name


def load_model(
    path: Path, device: str, quantize: str | None = None, calibrate: str | None = None
) -> Decoder | EncoderDecoder | Encoder:
    """The model in a folder or file, ready to run."""
    from clearhead.checkpoint import load

    check_calibrate(quantize, calibrate)
    if quantize is None:
        return load(path, device=device)
    from clearhead.quantization.integer import quantize as quantize_model

    # Quantised before it moves: the device may be too small for the full weights.
    return quantize_model(load(path), quantize, calibrate=read_calibration(calibrate, path)).to(device)


def check_calibrate(quantize: str | None, calibrate: str | None) -> None:
    """Refuse a text for calibration that would have no effect."""
    if calibrate is not None and quantize not in ("int4", "w4a8"):
        raise InputError(f"--calibrate {calibrate!r} is for --quantize int4 or w4a8; got {quantize}; leave it out")


def read_calibration(file: str | None, model_path: Path) -> list[list[int]] | None:
    """A text as ids of the model's tokenizer."""
    return None if file is None else [load_tokenizer_of(model_path).encode("\n".join(read_lines(file, "a text")))]


def load_tokenizer_of(model_path: Path) -> Tokenizer:
    """The tokenizer in a model's folder, inside its .gguf file, or beside its file."""
    from clearhead.data import load_tokenizer

    holds_it = model_path.is_dir() or model_path.suffix == ".gguf"
    try:
        return load_tokenizer(model_path if holds_it else model_path.parent)
    except CheckpointError:
        from clearhead.checkpoint.loading import open_checkpoint

        config = open_checkpoint(model_path).config  # what is no model at all is said to be that
        if config.inputs == "patches":
            raise InputError(
                f"{model_path} is a model of pictures: it has no tokenizer, and takes no text; give it to classify or explore"
            ) from None
        raise


def check_output(option: str, file: Path | None) -> None:
    """Refuse an output file that can not be written, before any work is done for it."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise InputError(f"{option} {str(file)!r}: there is no folder {str(file.parent)!r}; make it first")
    if file.exists() and not file.is_file() and not file.is_dir():
        return  # a pipe or a device: to open it twice may change it
    is_new = not file.exists()
    try:
        with file.open("ab"):
            pass
        if is_new:
            file.unlink()
    except OSError as error:
        raise InputError(
            f"{option} {str(file)!r} can not be written ({error.strerror or error}); name another file"
        ) from None


def check_port(host: str, port: int) -> None:
    """Refuse an address that can not be listened on, before a model is loaded for it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"port {port} of {host} can not be listened on ({reason}); choose another with --port; 0 takes a free one"
        ) from None


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


def read_lines(name: str, wanted: str = "one text a line") -> list[str]:
    """The lines of a text file, or for "-" of standard input."""
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        hint = "is the path right?"
        if " " in name and isinstance(error, FileNotFoundError):
            hint = "a file is read here; give a text through a pipe: echo 'TEXT' | clearhead ... -"
        raise InputError(f"{name!r:.60} can not be read ({error.strerror or error}); {hint}") from None
    shown = "standard input" if name == "-" else repr(name)
    # Not splitlines: it also splits at characters that are part of a text.
    lines = [line.rstrip("\r") for line in _decode(raw, shown).removesuffix("\n").split("\n")]
    if not any(line.strip() for line in lines):
        raise InputError(f"{shown} holds no text; give {wanted}")
    return lines


def read_texts(name: str, column: str | None = None, columns: tuple[str, str] = ("text", "label")) -> list[str]:
    """The texts of a file: its lines, or of a table (.csv, .tsv, .jsonl, .parquet) the column of texts, as `evaluate` reads it.

    Without `column` it is the first of `columns`, beside the second, which is not needed; without a header the first of two, or the
    only one.
    """
    from clearhead.data.corpora import expand_files, read_labelled
    from clearhead.data.corpus_files import find_kind
    from clearhead.data.filters import Policy

    if name == "-" or (find_kind(Path(name)) == "text" and column is None):
        return read_lines(name)
    (path,) = expand_files(name)
    if column is not None:
        return _read_column(path, column)
    try:
        return [text for text, _ in read_labelled(path, columns=columns, policy=Policy(empty="keep"))]
    except InputError as error:
        try:  # a table of texts without labels
            return _read_column(path, columns[0])
        except InputError:
            reason = str(error).partition("; name the columns")[0]
            raise InputError(f"{reason}; name the column of the texts with --column") from None


def _read_column(path: Path, column: str) -> list[str]:
    from clearhead.data.corpus_files import read_rows
    from clearhead.data.filters import Policy, TextFilter

    text_filter = TextFilter(Policy(empty="keep"))
    rows = read_rows(path, (column,), text_filter.findings)
    kept = (text_filter.apply(values, "rows", [path], number) for number, values in rows)
    return [row.values[0] for row in kept if row is not None]


def _decode(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is no text in UTF-8 ({error}); convert it first") from None
