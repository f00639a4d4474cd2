"""`clearhead embed`: one vector a text, for search and comparison."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clearhead.cli.inputs import Device, ModelName, find_device, find_model, follow, read_lines
from clearhead.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from clearhead.data import Tokenizer
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
    batch: Annotated[int, typer.Option(min=1, help="Texts computed at once.")] = 32,
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
    from clearhead.models import Encoder

    place = find_model(model)
    encoder = load(place, dtype=torch.float32, device=find_device(device))
    if not isinstance(encoder, Encoder) or encoder.config.inputs != "tokens":
        raise InputError(
            f"embed takes an encoder of texts; {model!r} has shape={encoder.config.shape!r}, "
            f"inputs={encoder.config.inputs!r}; take a BERT, a MiniLM or an ESM"
        )
    max_len = find_limit(place, encoder)
    vectors = embed(encoder, load_tokenizer(place), lines, max_len=max_len, pool=pool, batch=batch, cut=truncate)
    write(vectors, out)


def find_limit(place: Path, model: Encoder) -> int:
    """The most tokens in a text: what the model was trained with, where its files say so, else its positions."""
    from clearhead.checkpoint.files import read_json

    told = place / "sentence_bert_config.json"
    limit = read_json(told).get("max_seq_length") if told.is_file() else None
    return min(limit, model.config.max_len) if isinstance(limit, int) and limit > 0 else model.config.max_len


def embed(
    model: Encoder,
    tokenizer: Tokenizer,
    texts: list[str],
    *,
    max_len: int,
    pool: Pool = "model",
    batch: int = 32,
    cut: bool,
) -> np.ndarray:
    """A row for each text. Texts of like length are computed together, so that little is spent on padding."""
    import numpy as np
    import torch

    lengths = check_lengths(tokenizer, texts, max_len, cut=cut)
    order = sorted(range(len(texts)), key=lambda i: -lengths[i])  # the longest first: too large a batch fails at once
    parts = [order[first : first + batch] for first in range(0, len(order), batch)]
    vectors = np.zeros((len(texts), model.config.d_model), np.float32)
    device = next(model.parameters()).device
    for part in follow(parts, "embedding", len(parts)):
        tokens, real = tokenizer.batch([texts[i] for i in part], max_len=max_len, truncate="right" if cut else None)
        with torch.no_grad():
            vectors[part] = one_each(model, tokens.to(device), real.to(device), pool).cpu().numpy()
    return vectors


def one_each(model: Encoder, tokens: Tensor, real: Tensor, pool: Pool) -> Tensor:
    import torch.nn.functional as F

    from clearhead.models.head import Pool as Pooling

    states = model.states(tokens, real)
    if pool == "model":
        return model.pooled(states, real)
    return F.normalize(Pooling(d_model=model.config.d_model, kind=pool)(states, real), dim=-1)


def check_lengths(tokenizer: Tokenizer, texts: list[str], max_len: int, *, cut: bool) -> list[int]:
    """How many tokens each text has; one that has none, or too many, is an error that says which."""
    lengths = [len(tokenizer.encode(text)) for text in texts]
    for number, length in enumerate(lengths, 1):
        if length == 0:
            raise InputError(f"line {number} holds no token; remove it, or write something there")
        if length > max_len and not cut:
            raise InputError(
                f"line {number} has {length} tokens, and the model takes {max_len}; shorten it, or cut such lines with --truncate"
            )
    return lengths


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
