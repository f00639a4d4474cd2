"""`clearhead generate` and `clearhead translate`, with tiny models of random weights and their own tokenizers."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.cli.generate import hold_back
from clearhead.errors import InputError

TEXTS = ["the cat sat on the mat", "one two three four", "a dog ran"] * 3


def make(folder: Path, preset: str) -> tuple[ch.Decoder | ch.EncoderDecoder, object]:
    tokenizer = ch.train_tokenizer(texts=TEXTS, kind="bpe", vocab_size=300, add_bos=False)
    small = dict(n_layers=2, d_model=16, n_heads=2, d_head=8, d_ff=24, max_len=61, vocab_size=300)
    model = ch.build(ch.preset(preset, **small), seed=3).eval()
    eos = (tokenizer.eos,)
    model.generation = ch.Generation(bos=tokenizer.bos, eos=eos, pad=tokenizer.pad, decoder_start=tokenizer.bos)
    ch.save(model, folder)
    tokenizer.save(folder)
    return model, tokenizer


def run(*words: str, stdin: str = "") -> str:
    found = CliRunner().invoke(app, list(words), input=stdin, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def test_generate_writes_what_the_library_does(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path, "gpt2")
    ids = tokenizer.encode("the cat")
    greedy = tokenizer.decode(ch.generate(model, [ids], max_new_tokens=11)[0])
    assert run("generate", str(tmp_path), "the cat", "-n", "11", "--temperature", "0") == f"the cat{greedy}\n"
    drawn = tokenizer.decode(ch.generate(model, [ids], max_new_tokens=11, temperature=0.9, top_p=0.5, seed=7)[0])
    options = ("-n", "11", "--temperature", "0.9", "--top-p", "0.5", "--seed", "7")
    assert run("generate", str(tmp_path), "-", *options, stdin="the cat") == f"the cat{drawn}\n"
    assert greedy != drawn


def test_a_stop_ends_the_text_before_it(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path, "gpt2")
    whole = tokenizer.decode(ch.generate(model, [tokenizer.encode("a dog")], max_new_tokens=11)[0])
    stop = whole[5:8]
    text = run("generate", str(tmp_path), "a dog", "-n", "11", "--temperature", "0", "--stop", stop)
    assert text == f"a dog{whole[: whole.index(stop)]}\n"


@pytest.mark.parametrize("stops", [["cd"], ["cde", "d"], ["z"], []])
@pytest.mark.parametrize("pieces", [["abcdef"], list("abcdef"), ["ab", "c", "", "def"]])
def test_what_is_held_back(pieces: list[str], stops: list[str]) -> None:
    wanted = {"cd": "ab", "cde": "abc", "z": "abcdef"}  # of "cde" and "d", "d" is complete first
    assert "".join(hold_back(iter(pieces), stops)) == wanted[[*stops, "z"][0]]


def test_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path, "gpt2")
    long = "the cat " * 40
    with pytest.raises(InputError, match=r"too long: \d+ tokens \+ max_new_tokens=11 > max_len=61"):
        run("generate", str(tmp_path), long, "-n", "11")
    wanted = ch.generate(model, [tokenizer.encode(long)[-50:]], max_new_tokens=11)[0]
    text = run("generate", str(tmp_path), long, "-n", "11", "--temperature", "0", "--truncate")
    assert text == f"{long}{tokenizer.decode(wanted)}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x", "--top-p", "7"], "top_p must be above 0 and at most 1; got 7"),
        (["x", "--stop", ""], "--stop is empty"),
        (["x", "--chat"], "--chat asks for your lines one by one"),
    ],
)
def test_mistakes(tmp_path: Path, words: list[str], said: str) -> None:
    make(tmp_path, "gpt2")
    with pytest.raises(InputError, match=said):
        run("generate", str(tmp_path), *words)


def test_chat_answers_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = make(tmp_path, "gpt2")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    tokenizer.save(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    lines = run("generate", str(tmp_path), "--chat", "-n", "5", "--temperature", "0", stdin="one\ntwo\n")
    first = tokenizer.decode(ch.generate(model, [tokenizer.encode("uone", special=False)], max_new_tokens=5)[0])
    asked = f"uonea{first.strip()}utwo"
    second = tokenizer.decode(ch.generate(model, [tokenizer.encode(asked, special=False)], max_new_tokens=5)[0])
    assert lines == f"{first}\n{second}\n"


def test_translate_keeps_the_order_and_empty_lines(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path / "m", "transformer-base")
    sources = ["the cat", "", "one two three four five six", "a"]
    ids = [[*tokenizer.encode(text), tokenizer.eos] for text in sources if text]
    wanted = iter(tokenizer.decode(out) for out in ch.translate(model, ids, beams=3, max_new_tokens=9))
    file = tmp_path / "in.txt"
    file.write_text("\n".join(sources) + "\n")
    text = run("translate", str(tmp_path / "m"), str(file), "--beams", "3", "--max-new-tokens", "9")
    assert text == "".join((next(wanted) if source else "") + "\n" for source in sources)


def test_a_source_that_is_too_long(tmp_path: Path) -> None:
    make(tmp_path, "transformer-base")
    long = "short\n" + "the cat " * 80 + "\n"
    with pytest.raises(InputError, match=r"line 2 has \d+ tokens, but the model reads at most 61"):
        run("translate", str(tmp_path), stdin=long)
    assert run("translate", str(tmp_path), "--truncate", "--max-new-tokens", "3", stdin=long).count("\n") == 2


@pytest.mark.parametrize(("command", "preset"), [("generate", "transformer-base"), ("translate", "gpt2")])
def test_the_wrong_shape(tmp_path: Path, command: str, preset: str) -> None:
    make(tmp_path, preset)
    with pytest.raises(InputError, match=rf"{command} takes .* has shape="):
        run(command, str(tmp_path), stdin="x\n")
