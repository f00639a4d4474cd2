"""`clearhead classify`: texts or pictures into a model's classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.arguments import (
    Column,
    Device,
    ModelName,
    Truncate,
    find_device,
    find_model,
    open_binary,
    read_texts,
)
from clearhead.cli.console import track
from clearhead.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.models import Encoder

Batch = tuple[list[str], "Tensor", "Tensor | None"]  # the texts or file names, the model's input, and its mask


def run(
    model: ModelName,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Files with one text a line, or tables of texts (.csv, .tsv, .jsonl), or for a model of pictures the pictures; "
            "- reads standard input.",
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="Show this many classes for each, the likeliest first.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Texts or pictures computed at once.")] = 32,
    column: Column = None,
    truncate: Truncate = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each input, a line each.")] = False,
    device: Device = "auto",
) -> None:
    """Say which class each text (a line) or picture (a file) belongs to: class, probability, input, separated by tabs."""
    import torch

    from clearhead.checkpoint import load
    from clearhead.models import Encoder

    path, device = find_model(model), find_device(device)
    encoder = load(path, dtype=torch.float32, device=device)
    if not isinstance(encoder, Encoder) or encoder.config.head != "classes":
        raise InputError(
            f"classify takes a model that ends in classes; {model!r} has shape={encoder.config.shape!r}, "
            f"head={encoder.config.head!r}; take one for sequence or picture classification"
        )
    if encoder.config.inputs == "patches":
        if column is not None or truncate:
            raise InputError(f"{model!r} classifies pictures; --column and --truncate are for texts; leave them out")
        batches = read_images(path, encoder, files, batch)
        count = len(files)
    else:
        lines = [line for file in files for line in read_texts(file, column)]
        batches = read_batches(path, encoder, lines, batch, truncate=truncate)
        count = len(lines)
    for names, inputs, mask in track(batches, "classifying", -(-count // batch), printing=True):
        with torch.no_grad():
            logits = encoder(inputs.to(device), mask if mask is None else mask.to(device))
        print_classes(names, logits, encoder, top, as_json=as_json)


def print_classes(names: list[str], logits: Tensor, model: Encoder, top: int, *, as_json: bool) -> None:
    """A line for each input: its `top` classes with their probabilities, and its name."""
    labels = model.config.labels or [str(i) for i in range(model.config.n_classes)]
    if model.config.problem == "single_label":
        logits = logits.softmax(-1)
    elif model.config.problem == "multi_label":  # each class by itself: the probabilities do not add up to 1
        logits = logits.sigmoid()
    best = logits.topk(min(top, len(labels)), -1)
    for name, values, indices in zip(names, best.values.tolist(), best.indices.tolist(), strict=True):
        classes = [(labels[i], value) for i, value in zip(indices, values, strict=True)]
        if as_json:
            found = [{"class": label, "value": value} for label, value in classes]
            typer.echo(json.dumps({"input": name, "classes": found}, ensure_ascii=False))
        else:
            typer.echo("\t".join([*(f"{label}\t{value:.4f}" for label, value in classes), name]))


def read_batches(path: Path, model: Encoder, lines: list[str], batch: int, *, truncate: bool) -> Iterator[Batch]:
    """Batches of token ids. Lines that are too long are refused before the first batch is computed."""
    from clearhead.data import load_tokenizer
    from clearhead.generation.embeddings import read

    tokenizer, max_len = load_tokenizer(path), model.config.max_len
    read(tokenizer, lines, max_len, truncate=truncate)
    for first in range(0, len(lines), batch):
        part = lines[first : first + batch]
        yield part, *tokenizer.batch(part, max_len=max_len, truncate="right" if truncate else None)


def read_images(path: Path, model: Encoder, files: list[str], batch: int) -> Iterator[Batch]:
    """Batches of images, preprocessed as the model's files say."""
    import torch

    from clearhead.data.images import load_image, read_preprocessing

    preprocessing = read_preprocessing(path, model.config.image_size)
    for first in range(0, len(files), batch):
        part = files[first : first + batch]
        images = [load_image(open_binary(file), preprocessing, n_channels=model.config.n_channels) for file in part]
        yield part, torch.stack(images), None
