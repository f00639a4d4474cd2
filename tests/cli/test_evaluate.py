"""`clearhead evaluate` against the same metrics computed directly."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.errors import ConfigError, InputError

TEXT = "the cat sat on the mat and one two three dogs ran\nfour five six\n"


def make(folder: Path, preset: str, **fields: Any) -> tuple[Any, Any]:
    tokenizer = ch.train_tokenizer(texts=[TEXT] * 3, kind="bpe", vocab_size=280, add_bos=False)
    small = dict(n_layers=2, d_model=16, n_heads=2, d_head=8, d_ff=24, max_len=61, vocab_size=280, init_std=0.3)
    model = ch.build(ch.preset(preset, **{**small, **fields}), seed=3).eval()
    model.generation = ch.Generation(bos=tokenizer.bos, eos=(tokenizer.eos,), decoder_start=tokenizer.bos)
    ch.save(model, folder)
    tokenizer.save(folder)
    return model, tokenizer


def measure(*words: object) -> dict[str, Any]:
    found = CliRunner().invoke(app, ["evaluate", *map(str, words), "--json"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_perplexity_of_a_text(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path / "m", "gpt2")
    (tmp_path / "a.txt").write_text(TEXT)
    ids = torch.tensor([[*tokenizer.encode(TEXT), tokenizer.eos]])
    with torch.no_grad():
        loss = F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])
    row = measure(tmp_path / "m", tmp_path / "a.txt", "--length", ids.shape[1] - 1)
    # float32: only the order of summation differs
    assert row["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert row["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
    bits = float(loss) / 0.6931471805599453 * ids.shape[1] / len(TEXT.encode())
    assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised(tmp_path: Path, kind: str) -> None:
    quantized = pytest.importorskip("clearhead.quantization.integer")
    model, tokenizer = make(tmp_path / "m", "gpt2", d_ff=32, d_model=32, d_head=16)
    (tmp_path / "a.txt").write_text(TEXT)
    ids = torch.tensor([[*tokenizer.encode(TEXT), tokenizer.eos]])
    words = (tmp_path / "m", tmp_path / "a.txt", "--length", ids.shape[1] - 1, "--quantize", kind)
    row = measure(*words)
    found: list[float] = []
    for change in (lambda model: model, lambda model: quantized.quantize(model, kind)):
        with torch.no_grad():
            found.append(float(F.cross_entropy(change(model)(ids[:, :-1])[0], ids[0, 1:]).exp()))
    assert row["perplexity"] == pytest.approx(found[0], rel=1e-5)
    # With few rows, int8 weights may also be multiplied as int8.
    assert row[kind]["perplexity"] == pytest.approx(found[1], rel=1e-3)
    lines = CliRunner().invoke(app, ["evaluate", *map(str, words)], catch_exceptions=False).output.splitlines()[-3:]
    assert lines[0].startswith(f"as it is  loss {row['loss']:.4f}")
    assert lines[1].startswith(f"{kind}      loss {row[kind]['loss']:.4f}")
    assert f"perplexity {row[kind]['perplexity'] / row['perplexity'] - 1:+.2%}" in lines[2]


def test_quantised_for_a_text(tmp_path: Path) -> None:
    quantized = pytest.importorskip("clearhead.quantization.integer")
    model, tokenizer = make(tmp_path / "m", "gpt2", d_ff=32, d_model=32, d_head=16)
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("\n".join([TEXT] * 40))
    ids = torch.tensor([[*tokenizer.encode(TEXT), tokenizer.eos]])
    words = (tmp_path / "m", tmp_path / "a.txt", "--length", ids.shape[1] - 1, "--quantize", "int4")
    found = measure(*words, "--calibrate", tmp_path / "b.txt")["int4"]["loss"]
    quantized.quantize(model, "int4", calibrate=[tokenizer.encode("\n".join([TEXT] * 40))])
    with torch.no_grad():
        loss = F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])
    assert found == pytest.approx(float(loss), rel=1e-4)
    assert found != measure(*words)["int4"]["loss"]
    with pytest.raises(InputError, match="is for --quantize int4 or w4a8; got None"):
        measure(tmp_path / "m", tmp_path / "a.txt", "--calibrate", tmp_path / "b.txt")


def test_bleu_of_translations(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path / "m", "transformer-base")
    sources, targets = ["the cat sat", "one two three", "dogs ran"], ["the mat sat on", "one two", "the dogs"]
    (tmp_path / "a").write_text("\n".join(sources) + "\n")
    (tmp_path / "b").write_text("\n".join(targets) + "\n")
    ids = [[*tokenizer.encode(text), tokenizer.eos] for text in sources]
    room = 2 * max(map(len, ids)) + 20
    outputs = [tokenizer.decode(out) for out in ch.translate(model, ids, beams=3, max_new_tokens=room)]
    row = measure(tmp_path / "m", "--source", tmp_path / "a", "--target", tmp_path / "b", "--beams", 3)
    assert row["bleu"] == pytest.approx(sacrebleu.corpus_bleu(outputs, [targets]).score)
    assert row["chrf"] == pytest.approx(sacrebleu.corpus_chrf(outputs, [targets]).score)


def test_a_table_of_pairs_is_as_good_as_two_files(tmp_path: Path) -> None:
    make(tmp_path / "m", "transformer-base")
    pairs = [("the cat sat", "the mat"), ("one two three", "one two"), ("", "dogs"), ("dogs ran", "the dogs")]
    for name, column in (("a", 0), ("b", 1)):
        (tmp_path / name).write_text("".join(f"{pair[column]}\n" for pair in pairs))
    (tmp_path / "pairs.csv").write_text("source,target\n" + "".join(f"{','.join(pair)}\n" for pair in pairs))
    row = measure(tmp_path / "m", "--source", tmp_path / "a", "--target", tmp_path / "b")
    ran = CliRunner().invoke(app, ["evaluate", str(tmp_path / "m"), str(tmp_path / "pairs.csv"), "--json"])
    assert json.loads(ran.stdout) == row
    assert ran.stderr.count("1 of 4 rows dropped: empty (pairs.csv:4)") == 1  # read once, told once
    with pytest.raises(ConfigError, match=r"learns from data.target, and there is none; name --target, or a table of"):
        measure(tmp_path / "m", tmp_path / "a")


def test_standard_output_holds_the_result_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped lines, and scores that need a package, are said on standard error."""
    make(tmp_path / "m", "transformer-base")
    monkeypatch.setitem(sys.modules, "sacrebleu", None)  # not installed
    for name in ("a", "b"):
        (tmp_path / name).write_text("the cat\n\ndogs ran\n")
    words = ("--source", str(tmp_path / "a"), "--target", str(tmp_path / "b"), "--json")
    ran = CliRunner().invoke(app, ["evaluate", str(tmp_path / "m"), *words], catch_exceptions=False)
    assert "bleu" not in json.loads(ran.stdout)
    assert "1 of 3 pairs dropped: empty" in ran.stderr
    assert "BLEU and chrF are not measured: sacrebleu is missing; pip install 'clearhead[eval]'" in ran.stderr


def test_accuracy_of_labels_in_the_models_own_order(tmp_path: Path) -> None:
    fields = dict(head="classes", labels=("up", "down", "left"), n_classes=3, pooler=False, pool="mean")
    model, tokenizer = make(tmp_path / "m", "bert-base", **fields)
    rows = [
        ("the cat sat", "left"),
        ("one two", "down"),
        ("dogs ran on the mat", "up"),
        ("four", "left"),
        ("six", "down"),
    ]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    with torch.no_grad():
        guesses = [int(model(torch.tensor([tokenizer.encode(text)])).argmax()) for text, _ in rows]
    right = sum(model.config.labels[guess] == label for guess, (_, label) in zip(guesses, rows, strict=True))
    assert measure(tmp_path / "m", tmp_path / "a.csv")["accuracy"] == pytest.approx(right / len(rows))
    (tmp_path / "b.csv").write_text("text,label\nthe cat,dwon\none,up\n")
    with pytest.raises(InputError, match=r"label 'dwon', which is none of the 3 known; did you mean 'down'"):
        measure(tmp_path / "m", tmp_path / "b.csv")


def test_refusals(tmp_path: Path) -> None:
    make(tmp_path / "t", "transformer-base")
    with pytest.raises(InputError, match=r"translates; give --source and --target, or a table of pairs"):
        measure(tmp_path / "t")
    make(tmp_path / "g", "gpt2")
    with pytest.raises(InputError, match=r"measured on files, and none was named"):
        measure(tmp_path / "g")
    make(tmp_path / "b", "bert-base", pooler=False)
    with pytest.raises(InputError, match=r"ends in states, with nothing to measure"):
        measure(tmp_path / "b", "x.txt")
    with pytest.raises(InputError, match=r"--beams 3 is for a translator; .* is measured as 'language'; leave it out"):
        measure(tmp_path / "g", "x.txt", "--beams", 3)
    with pytest.raises(InputError, match=r"--length 99999 is more than the model reads at once; give 61 or less"):
        measure(tmp_path / "g", "x.txt", "--length", 99999)
    with pytest.raises(ConfigError, match=r"the task 'language' does not read data.source"):
        measure(tmp_path / "g", "x.txt", "--source", "x.txt")
