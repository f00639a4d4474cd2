"""`clearhead embed`: one vector a text, for search and comparison."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clearhead.cli.arguments import (
    Column,
    Device,
    LineFile,
    ModelName,
    Truncate,
    check_output,
    find_device,
    find_model,
    read_texts,
)
from clearhead.cli.console import track
from clearhead.errors import InputError

if TYPE_CHECKING:
    import numpy as np

Pool = Literal["model", "mean", "first"]


def run(
    model: ModelName,
    file: LineFile = "-",
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
    column: Column = None,
    truncate: Truncate = False,
    device: Device = "auto",
) -> None:
    """Turn each line of a file into a vector, in order: a row of numbers for each text."""
    lines = read_texts(file, column)
    check_output("--out", out)
    import torch

    from clearhead.checkpoint import load
    from clearhead.checkpoint.sentence_transformers import max_text_length
    from clearhead.data import load_tokenizer
    from clearhead.generation.embeddings import embed
    from clearhead.models import Encoder

    path = find_model(model)
    encoder = load(path, dtype=torch.float32, device=find_device(device))
    if not isinstance(encoder, Encoder) or encoder.config.inputs != "tokens":
        raise InputError(
            f"embed takes an encoder of texts; {model!r} has shape={encoder.config.shape!r}, "
            f"inputs={encoder.config.inputs!r}; take a BERT, a MiniLM or an ESM"
        )
    max_len = max_text_length(path, encoder.config.max_len)
    tokenizer = load_tokenizer(path)
    vectors = embed(
        encoder, tokenizer, lines, max_len=max_len, pool=pool, truncate=truncate, tokens=tokens, follow=track
    )
    write_vectors(vectors, out)


def write_vectors(vectors: np.ndarray, out: Path | None) -> None:
    """Vectors to a file (.npy or text), or as text to standard output."""
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
