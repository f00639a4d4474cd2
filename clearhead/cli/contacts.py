"""`clearhead contacts`: which residues of a protein touch."""

from __future__ import annotations

import csv
import sys
import zipfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from clearhead.cli.arguments import (
    Device,
    ModelName,
    check_output,
    find_device,
    find_model,
    load_tokenizer_of,
    read_lines,
)
from clearhead.cli.console import track
from clearhead.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.data import Tokenizer
    from clearhead.data.fasta import Protein
    from clearhead.models import Encoder

PICTURES = (".png", ".svg", ".pdf")
FastaFile = Annotated[str, typer.Argument(metavar="FASTA", help="A FASTA file of proteins; - reads standard input.")]


def run(
    model: ModelName,
    fasta: FastaFile = "-",
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            "-o",
            help="Write to this file; may be given several times: .csv (a row for each pair), .npz (each protein's matrix by its "
            "name), .png, .svg or .pdf (a picture; of several proteins, one each with its number). Default: csv on stdout.",
        ),
    ] = None,
    separation: Annotated[
        int, typer.Option(min=1, help="In csv, leave out pairs that are closer in the chain than this.")
    ] = 6,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="In csv, leave out pairs of a lower probability.")
    ] = 0.0,
    device: Device = "auto",
) -> None:
    """Predict the contacts of proteins from the attention of an ESM-2, by its contact head."""
    outs = check_outputs(out or [])
    encoder, tokenizer, proteins = load_proteins(model, fasta, device)
    from clearhead.generation.proteins import Residues
    from clearhead.inside.contacts import contact_maps

    rows = [Residues(tokenizer).encode(protein, encoder.config.max_len) for protein in proteins]
    maps = [one.cpu() for one in track(contact_maps(encoder, rows), "looking", len(rows))]
    for file in outs or [None]:
        if file is None or file.suffix == ".csv":
            with table(file, "protein", "i", "j", "residue_i", "residue_j", "probability") as writer:
                for protein, contacts in zip(proteins, maps, strict=True):
                    writer.writerows(pairs(protein, contacts, separation, threshold))
        elif file.suffix == ".npz":
            write_npz(file, proteins, maps)
        else:
            draw(file, proteins, maps)
    if outs:
        written = [each for file in outs for each in (pictures(file, len(maps)) if file.suffix in PICTURES else [file])]
        print(f"contacts of {len(maps)} proteins in {', '.join(map(str, written))}", file=sys.stderr)


def check_outputs(outs: list[Path]) -> list[Path]:
    for file in outs:
        if file.suffix not in (".csv", ".npz", *PICTURES):
            raise InputError(
                f"--out {str(file)!r} has no known ending; got {file.suffix!r}; give .csv, .npz, .png, .svg or .pdf"
            )
        check_output("--out", file)
    if any(file.suffix in PICTURES for file in outs):
        import_module("clearhead.inside.figure_grid")  # says if matplotlib is missing
    return outs


def load_proteins(model: str, fasta: str, device: str) -> tuple[Encoder, Tokenizer, list[Protein]]:
    """An encoder of proteins, its tokenizer, and the proteins of a file."""
    import torch

    from clearhead.checkpoint import load
    from clearhead.data.fasta import read_fasta
    from clearhead.generation.proteins import Residues
    from clearhead.models import Encoder

    lines = read_lines(fasta, "proteins in FASTA: a line >NAME, then the letters")
    path = find_model(model)
    encoder = load(path, dtype=torch.float32, device=find_device(device))
    if not isinstance(encoder, Encoder) or encoder.config.inputs != "tokens":
        raise InputError(
            f"proteins are read by an encoder of tokens; {model!r} has shape={encoder.config.shape!r}, "
            f"inputs={encoder.config.inputs!r}; take an ESM-2"
        )
    tokenizer = load_tokenizer_of(path)
    letters = Residues(tokenizer).ids.keys()
    return encoder, tokenizer, read_fasta(lines, "standard input" if fasta == "-" else fasta, letters)


@contextmanager
def table(file: Path | None, *columns: str) -> Generator[Any]:
    """A csv writer to a file, or to standard output, after its header."""
    stream: TextIO = sys.stdout if file is None else file.open("w", encoding="utf-8", newline="")
    try:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns)
        yield writer
    finally:
        if file is not None:
            stream.close()


def pairs(protein: Protein, contacts: Tensor, separation: int, threshold: float) -> Iterator[tuple[object, ...]]:
    """The rows of a table: positions are counted from 1, and i < j."""
    residues = protein.residues
    for i, row in enumerate(contacts.tolist()):
        for j in range(i + separation, len(row)):
            if row[j] >= threshold:
                yield protein.name, i + 1, j + 1, residues[i], residues[j], f"{row[j]:.6f}"


def write_npz(file: Path, proteins: list[Protein], maps: list[Tensor]) -> None:
    """Each matrix by its protein's name. Not by np.savez, whose own arguments are names that no protein could have."""
    import numpy as np

    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for protein, contacts in zip(proteins, maps, strict=True):
            with archive.open(f"{protein.name}.npy", "w") as stream:
                np.lib.format.write_array(stream, contacts.numpy(), allow_pickle=False)


def pictures(file: Path, n: int) -> list[Path]:
    """The files of n maps: of several, one each with its number."""
    return [file] if n == 1 else [file.with_stem(f"{file.stem}-{number}") for number in range(1, n + 1)]


def draw(file: Path, proteins: list[Protein], maps: list[Tensor]) -> None:
    from clearhead.inside.plots import plot_contacts

    for target, protein, contacts in zip(pictures(file, len(maps)), proteins, maps, strict=True):
        plot_contacts(contacts, protein.residues, title=f"Contacts of {protein.name}").savefig(target)
