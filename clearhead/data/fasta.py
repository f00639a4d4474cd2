"""FASTA: proteins as text. A line `>name ...` starts a protein, and the lines after it are its residues."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from clearhead.errors import InputError

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"  # the twenty of the genetic code, by their letters


@dataclass(frozen=True)
class Protein:
    name: str  # the first word of its header
    residues: str  # capital letters


def read_fasta(lines: Sequence[str], source: str, letters: Collection[str] = AMINO_ACIDS) -> list[Protein]:
    """The proteins of a FASTA file, in order. Small letters (repeats, by convention) are read as capital ones.

    `letters` are those that a residue may have. `source` is the file's name for errors: without a header, with a name that comes
    twice, a protein without residues, a letter that is none of a residue.
    """
    found: dict[str, list[str]] = {}
    name = None
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if line.startswith(">"):
            name = next(iter(line[1:].split()), "")
            if not name or name in found:
                what = f"the name {name!r:.60} comes twice" if name else "a header without a name"
                raise InputError(f"{source}, line {number}: {what}; got {line!r:.60}; give each protein its own name")
            found[name] = []
        elif line and not line.startswith(";"):  # ; starts a comment in old files
            if name is None:
                raise InputError(
                    f"{source}, line {number}: residues before any header; got {line!r:.60}; start with a line such as >name"
                )
            at = next((at for at, letter in enumerate(line.upper()) if letter not in letters), None)
            if at is not None:
                raise InputError(
                    f"{source}, line {number}: {line[at]!r}, at place {at + 1} of the line, is no residue that this model knows "
                    f"({''.join(sorted(letters))}); {_advice(line[at])}"
                )
            found[name].append(line.upper())
    if not found:
        raise InputError(f"{source} holds no protein: 0 lines start with >; give a FASTA file")
    empty = next((name for name, parts in found.items() if not parts), None)
    if empty is not None:
        raise InputError(f"{source}: the protein {empty!r:.60} has 0 residues; remove its header, or add its residues")
    return [Protein(name, "".join(parts)) for name, parts in found.items()]


def _advice(letter: str) -> str:
    if letter in "-.":
        return "this is a gap of an alignment: remove the gaps"
    return "this is a stop: remove it" if letter == "*" else "correct it, or leave this protein out"
