"""`clearhead check`: a table or JSON, an exit code for scripts, and options that fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.errors import InputError
from clearhead.laws import LAWS

TEXT = "the cat sat on the mat and one two three dogs ran\nfour five six\n" * 9
ONLY = [word for name in LAWS if name not in ("weights", "fused", "cached", "int8") for word in ("--skip", name)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = ch.train_tokenizer(texts=[TEXT], kind="bpe", vocab_size=280, add_bos=False)
    small = dict(n_layers=2, d_model=16, n_heads=2, d_head=8, d_ff=24, max_len=61, vocab_size=280, init_std=0.3)
    ch.save(ch.build(ch.preset("gpt2", **small), seed=3).eval(), tmp_path / "m")
    tokenizer.save(tmp_path / "m")
    (tmp_path / "a.txt").write_text(TEXT)
    return tmp_path


def call(*words: object) -> Any:
    return CliRunner().invoke(app, ["check", *map(str, words)], catch_exceptions=False)


def test_a_sound_model(folder: Path) -> None:
    done = call(folder / "m", "--text", folder / "a.txt", "--layers", *ONLY)
    assert done.exit_code == 0, done.output
    assert "fused = explicit" in done.output
    assert "after blocks.1" in done.output
    assert done.output.splitlines()[-1] == f"5 pass, {len(LAWS) - 4} skipped"
    found = json.loads(call(folder / "m", "--json", *ONLY).stdout)
    assert (found["pass"], found["fail"], found["skipped"]) == (4, 0, len(LAWS) - 3)
    laws = {each["law"]: each for each in found["laws"]}
    assert laws["fused = explicit"]["error"] <= laws["fused = explicit"]["allowed"]
    assert set(laws["fused = explicit"]["layers"]) == {"blocks.0", "blocks.1"}
    assert laws["int8 against full weights"]["reason"] == "there is no text to measure on; give one with --text"


def test_a_broken_model_exits_with_1(folder: Path) -> None:
    model = ch.load(folder / "m")
    with torch.no_grad():
        model.tokens.weight[0, 0] = torch.nan  # type: ignore[index]
    ch.save(model, folder / "m")
    done = call(folder / "m", "--json")
    assert done.exit_code == 1
    (law,) = json.loads(done.stdout)["laws"]
    assert law["outcome"] == "fail"
    assert law["reason"] == "NaN or infinite: tokens.weight (1 tensors)"


WRONG = {
    "check takes a model or --resume RECIPE; got neither": (),
    "check takes a model or --resume RECIPE; got both": ("m", "--resume", "language"),
    "--text is for a model; got --resume language": ("--resume", "language", "--text", "a.txt"),
    "--steps and --set are for --resume; got the model 'm'": ("m", "--steps", "3"),
    "can not be read": ("{folder}/m", "--text", "{folder}/b.txt"),
    "holds 0 tokens; give a longer one": ("{folder}/m", "--text", "{folder}/empty.txt"),
    "no law 'cache' to skip; did you mean 'cached'": ("{folder}/m", "--skip", "cache"),
}


@pytest.mark.parametrize("words", WRONG)
def test_options_that_do_not_fit(words: str, folder: Path) -> None:
    (folder / "empty.txt").write_text("")
    with pytest.raises(InputError) as error:
        call(*(each.format(folder=folder) for each in WRONG[words]))
    assert words in str(error.value)
