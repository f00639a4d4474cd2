"""FASTA files: what is read, and what is refused with the line's number."""

from __future__ import annotations

import pytest

from clearhead.data.fasta import Protein, read_fasta
from clearhead.errors import InputError


def test_read() -> None:
    lines = ["; old comment", "", ">one first protein", "MKT", "  llw ", "", ">sp|P1|TWO", "ACDEF\r"]
    assert read_fasta(lines, "x.fasta") == [Protein("one", "MKTLLW"), Protein("sp|P1|TWO", "ACDEF")]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["", "; none"], "x.fasta holds no protein: 0 lines start with >; give a FASTA file"),
        (["MKT"], "line 1: residues before any header; got 'MKT'; start with a line such as >name"),
        ([">a", "MK", ">a", "MK"], "line 3: the name 'a' comes twice; got '>a'; give each"),
        (["> ", "MK"], "line 1: a header without a name; got '>'; give each"),
        ([">a", ">b", "MK"], "the protein 'a' has 0 residues; remove its header"),
        (
            [">a", "MK", "MJK"],
            r"line 3: 'J', at place 2 of the line, is no residue that this model knows (ACDEFGHIKLMNPQRSTVWY)",
        ),
        ([">a", "M-K"], "a gap of an alignment: remove the gaps"),
        ([">a", "MK*"], "this is a stop: remove it"),
        ([">a", "M K"], "' ', at place 2"),
    ],
)
def test_refusals(lines: list[str], words: str) -> None:
    with pytest.raises(InputError) as error:
        read_fasta(lines, "x.fasta")
    assert words in str(error.value)


def test_the_models_letters() -> None:
    assert read_fasta([">a", "MXK"], "x", "MKX") == [Protein("a", "MXK")]
