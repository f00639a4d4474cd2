"""`clearhead classify`: texts or pictures into a model's classes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.arguments import Device, ModelName, find_device, find_model, follow, read_lines
from clearhead.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.models import Encoder

Batch = tuple[list[str], "Tensor", "Tensor | None"]  # what was read, as it enters the model, and its mask


def run(
    model: ModelName,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Files with one text a line, or for a model of pictures the pictures; - reads standard input.",
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="Show this many classes for each, the likeliest first.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Texts or pictures computed at once.")] = 32,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut a text that is too long at its end. Without it, that is an error.")
    ] = False,
    device: Device = "auto",
) -> None:
    """Say which class each text (a line) or picture (a file) belongs to: class, probability, input, separated by tabs."""
    import torch

    from clearhead.checkpoint import load
    from clearhead.models import Encoder

    place, where = find_model(model), find_device(device)
    encoder = load(place, dtype=torch.float32, device=where)
    if not isinstance(encoder, Encoder) or encoder.config.head != "classes":
        raise InputError(
            f"classify takes a model that ends in classes; {model!r} has shape={encoder.config.shape!r}, "
            f"head={encoder.config.head!r}; take one for sequence or picture classification"
        )
    if encoder.config.inputs == "patches":
        batches = read_pictures(place, encoder, files, batch)
        count = len(files)
    else:
        lines = [line for file in files for line in read_lines(file)]
        batches = read_texts(place, encoder, lines, batch, cut=truncate)
        count = len(lines)
    labels = encoder.config.labels or [str(i) for i in range(encoder.config.n_classes)]
    for names, inputs, mask in follow(batches, "classifying", -(-count // batch), printing=True):
        with torch.no_grad():
            scores = encoder(inputs.to(where), mask if mask is None else mask.to(where))
        # One class is no choice but a measure: its score is the answer.
        chances = scores if len(labels) == 1 else scores.softmax(-1)
        best = chances.topk(min(top, len(labels)), -1)
        for name, values, indices in zip(names, best.values.tolist(), best.indices.tolist(), strict=True):
            shown = [f"{labels[i]}\t{value:.4f}" for i, value in zip(indices, values, strict=True)]
            typer.echo("\t".join([*shown, name]))


def read_texts(place: Path, model: Encoder, lines: list[str], batch: int, *, cut: bool) -> Iterator[Batch]:
    from clearhead.data import load_tokenizer
    from clearhead.generation.embeddings import read

    tokenizer, max_len = load_tokenizer(place), model.config.max_len
    read(tokenizer, lines, max_len, truncate=cut)
    for first in range(0, len(lines), batch):
        part = lines[first : first + batch]
        yield part, *tokenizer.batch(part, max_len=max_len, truncate="right" if cut else None)


def read_pictures(place: Path, model: Encoder, files: list[str], batch: int) -> Iterator[Batch]:
    import torch

    from clearhead.data.images import load_image, read_preprocessing

    prepare = read_preprocessing(place, model.config.image_size)
    for first in range(0, len(files), batch):
        part = files[first : first + batch]
        sources = [BytesIO(sys.stdin.buffer.read()) if file == "-" else file for file in part]
        pictures = [load_image(source, prepare, n_channels=model.config.n_channels) for source in sources]
        yield part, torch.stack(pictures), None
