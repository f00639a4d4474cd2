"""`clearhead variants`: how likely a protein's residues and variants are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.arguments import Device, ModelName, check_output
from clearhead.cli.console import track
from clearhead.cli.contacts import FastaFile, load_proteins, table
from clearhead.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.data.fasta import Protein


def run(
    model: ModelName,
    fasta: FastaFile = "-",
    mutation: Annotated[
        list[str] | None,
        typer.Option(
            "--mutation",
            "-m",
            metavar="A23V",
            help="Only this variant; may be given several times. Several substitutions at once: A23V:K40R. Needs a FASTA of one "
            "protein. Without it: each position with each of the 19 other amino acids.",
        ),
    ] = None,
    residues: Annotated[
        bool,
        typer.Option("--residues", help="The residues' own scores instead: log p(residue) at each position, masked."),
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write csv to this file. Default: stdout.")] = None,
    device: Device = "auto",
) -> None:
    """Score variants by masked marginals: log p(mutant) - log p(wild) at masked positions, in nats; above 0 is likelier."""
    check_output("--out", out)
    if mutation and residues:
        raise InputError(f"--residues scores the protein as it is; got --mutation {mutation[0]}; leave one out")
    encoder, tokenizer, proteins = load_proteins(model, fasta, device)
    from clearhead.generation.proteins import all_substitutions, parse_variant, residue_scores, variant_effects

    if mutation and len(proteins) != 1:
        raise InputError(f"--mutation is of one protein; {fasta!r} holds {len(proteins)}; give a FASTA of one")
    if residues:
        with table(out, "protein", "position", "residue", "log_prob", "likeliest", "likeliest_log_prob") as writer:
            for protein in proteins:
                writer.writerows(residue_rows(protein, residue_scores(encoder, tokenizer, protein, track)))
        return
    with table(out, "protein", "variant", "effect") as writer:
        for protein in proteins:
            variants = [parse_variant(text, protein) for text in mutation or ()] or all_substitutions(protein)
            effects = variant_effects(encoder, tokenizer, protein, variants, track)
            writer.writerows(
                (protein.name, ":".join(map(str, variant)), f"{effect:.5f}")
                for variant, effect in zip(variants, effects, strict=True)
            )


def residue_rows(protein: Protein, scores: Tensor) -> list[tuple[Any, ...]]:
    """For each position its residue and the likeliest one. A residue that is none of the twenty, such as X, has no score."""
    from clearhead.data.fasta import AMINO_ACIDS

    rows: list[tuple[Any, ...]] = []
    for position, (residue, row) in enumerate(zip(protein.residues, scores.tolist(), strict=True), 1):
        best = max(range(len(row)), key=row.__getitem__)
        own = row[AMINO_ACIDS.index(residue)] if residue in AMINO_ACIDS else math.nan
        rows.append((protein.name, position, residue, f"{own:.5f}", AMINO_ACIDS[best], f"{row[best]:.5f}"))
    return rows
