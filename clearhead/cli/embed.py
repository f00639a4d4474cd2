"""`clearhead embed`: one vector a text, for search and comparison."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clearhead.cli.arguments import Device, ModelName, find_device, find_model, follow, read_lines
from clearhead.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from clearhead.models import Encoder

Pool = Literal["model", "mean", "first"]


def run(
    model: ModelName,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file with one text a line; - reads standard input.")
    ] = "-",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write the vectors to this file: .npy, or else text. Default: text on stdout."
        ),
    ] = None,
    pool: Annotated[
        Pool,
        typer.Option(
            help="How a vector is made of the states: as the model's files say, or their mean or first, of length 1."
        ),
    ] = "model",
    tokens: Annotated[int, typer.Option(min=0, help="The most tokens computed at once; 0: what suits the device.")] = 0,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut a text that is too long at its end. Without it, that is an error.")
    ] = False,
    device: Device = "auto",
) -> None:
    """Turn each line of a file into a vector, in order: a row of numbers for each text."""
    lines = read_lines(file)
    if out is not None and not out.parent.is_dir():
        raise InputError(f"--out {str(out)!r}: there is no folder {str(out.parent)!r}; make it first")
    import torch

    from clearhead.checkpoint import load
    from clearhead.data import load_tokenizer
    from clearhead.generation.embeddings import embed
    from clearhead.models import Encoder

    place = find_model(model)
    encoder = load(place, dtype=torch.float32, device=find_device(device))
    if not isinstance(encoder, Encoder) or encoder.config.inputs != "tokens":
        raise InputError(
            f"embed takes an encoder of texts; {model!r} has shape={encoder.config.shape!r}, "
            f"inputs={encoder.config.inputs!r}; take a BERT, a MiniLM or an ESM"
        )
    max_len = find_limit(place, encoder)
    tokenizer = load_tokenizer(place)
    vectors = embed(
        encoder, tokenizer, lines, max_len=max_len, pool=pool, truncate=truncate, tokens=tokens, follow=follow
    )
    write(vectors, out)


def find_limit(place: Path, model: Encoder) -> int:
    """The most tokens in a text: what the model was trained with, where its files say so, else its positions."""
    from clearhead.checkpoint.weight_files import read_json

    told = place / "sentence_bert_config.json"
    limit = read_json(told).get("max_seq_length") if told.is_file() else None
    return min(limit, model.config.max_len) if isinstance(limit, int) and limit > 0 else model.config.max_len


def write(vectors: np.ndarray, out: Path | None) -> None:
    import numpy as np

    if out is None:
        np.savetxt(sys.stdout, vectors, fmt="%.7g")
        return
    try:
        with out.open("wb") as stream:
            if out.suffix == ".npy":
                np.save(stream, vectors)
            else:
                np.savetxt(stream, vectors, fmt="%.7g")
    except OSError as error:
        raise InputError(f"{str(out)!r} can not be written ({error.strerror or error}); choose another --out") from None
    print(f"{len(vectors)} vectors of {vectors.shape[1]} numbers in {out}", file=sys.stderr)
