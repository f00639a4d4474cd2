"""Masked residues and variants: the same numbers as one plain forward for each, and the two commands for proteins."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EsmConfig, EsmForMaskedLM, EsmTokenizer
from typer.testing import CliRunner

import clearhead as ch
from clearhead.checkpoint import load
from clearhead.cli import app
from clearhead.data.fasta import AMINO_ACIDS, Protein
from clearhead.generation import proteins
from clearhead.generation.proteins import Residues, all_substitutions, parse_variant, residue_scores, variant_effects
from tests.families.compare import saved, tiny

SPECIAL = "<cls> <pad> <eos> <unk>"
VOCAB = [*SPECIAL.split(), *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
KINASE = Protein("kinase", "MKTAYIAKQRQISFVKSHFSRQ")
SIZES: dict[str, Any] = dict(
    vocab_size=33, hidden_size=30, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37
)
SIZES |= dict(max_position_embeddings=41, position_embedding_type="rotary", token_dropout=True, mask_token_id=32)
SIZES |= dict(pad_token_id=1, emb_layer_norm_before=False)
# Differences of log-probabilities of order 10, each rounded at 6e-8 in a few sums.
WITHIN = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ESM-2 as the hub has them: vocab.txt, and no tokenizer.json."""
    path = tmp_path_factory.mktemp("esm")
    saved(tiny(EsmForMaskedLM, EsmConfig(**SIZES)), path)
    (path / "vocab.txt").write_text("\n".join(VOCAB))
    return path


def plain(folder: Path, positions: tuple[int, ...]) -> torch.Tensor:
    """transformers' log-probabilities with these positions masked."""
    tokenizer, model = EsmTokenizer(str(folder / "vocab.txt")), EsmForMaskedLM.from_pretrained(folder).eval()
    tokens = tokenizer(KINASE.residues, return_tensors="pt").input_ids
    tokens[0, list(positions)] = tokenizer.mask_token_id
    with torch.no_grad():
        return model(tokens).logits[0].log_softmax(-1)


def test_effects(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load(folder), ch.load_tokenizer(folder)
    assert isinstance(model, ch.Encoder)
    monkeypatch.setattr(proteins, "AT_ONCE", 3 * 24)  # batches of three rows
    variants = [parse_variant(text, KINASE) for text in ("A4V", "K2R:F14W", "A4W", "Q22M")]
    found = variant_effects(model, tokenizer, KINASE, variants)
    for variant, effect in zip(variants, found, strict=True):
        scores = plain(folder, tuple(one.position for one in variant))
        ids = [(one.position, VOCAB.index(one.mutant), VOCAB.index(one.wild)) for one in variant]
        expected = sum(float(scores[at, mutant] - scores[at, wild]) for at, mutant, wild in ids)
        assert effect == pytest.approx(expected, abs=WITHIN)
        assert abs(expected) > 10 * WITHIN


def test_residues(folder: Path) -> None:
    model, tokenizer = load(folder), ch.load_tokenizer(folder)
    assert isinstance(model, ch.Encoder)
    found = residue_scores(model, tokenizer, KINASE)
    assert found.shape == (22, 20)
    for at in (1, 9, 22):
        expected = plain(folder, (at,))[at, [VOCAB.index(letter) for letter in AMINO_ACIDS]]
        torch.testing.assert_close(found[at - 1], expected, rtol=0, atol=WITHIN)


def test_all_substitutions() -> None:
    found = [str(one) for (one,) in all_substitutions(Protein("x", "AX"))]
    assert found[:3] == ["A1C", "A1D", "A1E"]
    assert len(found) == 19 + 20  # X is none of the twenty
    assert "A1A" not in found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A4", "'A4' is no substitution; got 'A4'; write residue"),
        ("A4X", "is no substitution"),
        ("A04V", "is no substitution"),
        ("A99V", "lies behind the 22 residues of 'kinase'"),
        ("M4V", "M4V says M at 4, but 'kinase' has A there; positions are counted from 1"),
        ("A4V:A4W", "changes position 4 twice"),
    ],
)
def test_wrong_variants(text: str, words: str) -> None:
    with pytest.raises(ch.InputError) as error:
        parse_variant(text, KINASE)
    assert words in str(error.value)


def test_other_models(folder: Path, tmp_path: Path) -> None:
    tokenizer = ch.load_tokenizer(folder)
    headless = ch.build(ch.preset("esm2-8m", n_layers=1, d_model=20, n_heads=2))
    assert isinstance(headless, ch.Encoder)
    with pytest.raises(ch.InputError, match=r"got head='none', mask token 32; take a checkpoint"):
        variant_effects(headless, tokenizer, KINASE, all_substitutions(KINASE))
    (tmp_path / "text.txt").write_text("a few words of text, no proteins\n" * 50)
    words = ch.train_tokenizer([tmp_path / "text.txt"], vocab_size=300)
    with pytest.raises(ch.InputError, match=r"not one of proteins: its vocabulary of \d+ lacks"):
        Residues(words)
    with pytest.raises(ch.InputError, match=r"'long' has 40 residues, and the model takes 39; cut it"):
        Residues(tokenizer).encode(Protein("long", "A" * 40), 41)


def call(*args: object) -> str:
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exit_code == 0, done.exception
    return done.stdout


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    (tmp_path / "two.fasta").write_text(f">{KINASE.name} first\n{KINASE.residues}\n>file/2\nGAVLIMCFYW\n")
    return tmp_path / "two.fasta"


@pytest.mark.slow  # matplotlib
def test_contacts_command(folder: Path, fasta: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("c.csv", "c.npz", "c.png")]
    told = CliRunner().invoke(app, ["contacts", str(folder), str(fasta), *(f"--out={file}" for file in files)]).stderr
    assert all(file in told for file in map(str, [*files[:2], tmp_path / "c-1.png", tmp_path / "c-2.png"]))
    with np.load(files[1]) as archive:
        arrays = dict(archive)
    assert {name: array.shape for name, array in arrays.items()} == {"kinase": (22, 22), "file/2": (10, 10)}
    rows = list(csv.DictReader(io.StringIO(files[0].read_text())))
    assert len(rows) == sum(range(1, 22 - 5)) + sum(range(1, 10 - 5))
    assert all(int(row["j"]) - int(row["i"]) >= 6 for row in rows)
    for row in rows[::7]:
        i, j = int(row["i"]) - 1, int(row["j"]) - 1
        assert float(row["probability"]) == pytest.approx(arrays[row["protein"]][i, j], abs=1e-6)
    first = rows[0]
    assert (first["residue_i"], first["residue_j"]) == (KINASE.residues[0], KINASE.residues[6])
    assert not files[2].exists()
    assert [(tmp_path / f"c-{number}.png").read_bytes()[:4] for number in (1, 2)] == [b"\x89PNG"] * 2
    few = call("contacts", folder, fasta, "--threshold", "1", "--separation", "1")
    assert few.splitlines() == ["protein,i,j,residue_i,residue_j,probability"]


def test_variants_command(folder: Path, fasta: Path, tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(call("variants", folder, fasta))))
    assert len(rows) == 19 * (22 + 10)
    one = tmp_path / "one.fasta"
    one.write_text(f">kinase\n{KINASE.residues}\n")
    (row,) = csv.DictReader(io.StringIO(call("variants", folder, one, "-m", "a4v")))
    assert row == next(row for row in rows if row["variant"] == "A4V")
    call("variants", folder, one, "--residues", "--out", tmp_path / "r.csv")
    scored = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text())))
    assert "".join(row["residue"] for row in scored) == KINASE.residues
    assert all(float(row["log_prob"]) <= float(row["likeliest_log_prob"]) for row in scored)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("contacts", "--out", "c.txt"), "'c.txt' has no known ending; got '.txt'; give .csv"),
        (("variants", "-m", "A4V"), "--mutation is of one protein;"),
        (("variants", "-m", "A4V", "--residues"), "leave one out"),
    ],
)
def test_refused_commands(args: tuple[str, ...], words: str, folder: Path, fasta: Path) -> None:
    done = CliRunner().invoke(app, [args[0], str(folder), str(fasta), *args[1:]])
    assert isinstance(done.exception, ch.InputError)
    assert words in str(done.exception)


def test_an_empty_file_is_told_what_belongs_there(tmp_path: Path) -> None:
    (tmp_path / "empty.fasta").touch()
    ran = CliRunner().invoke(app, ["contacts", "nope", str(tmp_path / "empty.fasta")])
    assert ran.exit_code == 1
    assert "holds no text; give proteins in FASTA: a line >NAME" in str(ran.exception)
