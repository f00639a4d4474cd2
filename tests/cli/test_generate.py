"""`clearhead generate` and `clearhead translate`, with tiny random models and their own tokenizers."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app, main
from clearhead.errors import CheckpointError, InputError
from clearhead.generation import Engine

TEXTS = ["the cat sat on the mat", "one two three four", "a dog ran"] * 3


def make(folder: Path, preset: str) -> tuple[ch.Decoder | ch.EncoderDecoder, object]:
    tokenizer = ch.train_tokenizer(texts=TEXTS, kind="bpe", vocab_size=300, add_bos=False)
    small = dict(n_layers=2, d_model=16, n_heads=2, d_head=8, d_ff=24, max_len=61, vocab_size=tokenizer.vocab_size)
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
    options = ("-n", "11", "--temperature", "0.9", "--top-p", "0.5", "--seed", "7", "--lookup")
    assert run("generate", str(tmp_path), "-", *options, stdin="the cat") == f"the cat{drawn}\n"
    assert greedy != drawn


def test_a_draft_model_writes_the_same(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path / "large", "gpt2")
    make(tmp_path / "small", "llama-7b")
    words = ("generate", str(tmp_path / "large"), "-n", "11", "--seed", "7")
    drawn = tokenizer.decode(
        ch.generate(model, [tokenizer.encode("the cat")], max_new_tokens=11, temperature=0.8, top_p=0.95, seed=7)[0]
    )
    assert run(*words, "the cat", "--draft", str(tmp_path / "small")) == f"the cat{drawn}\n"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save(tmp_path / "large")
    assert run(*words, "--chat", "--draft", str(tmp_path / "small"), stdin="the cat\na dog\n") == run(
        *words, "--chat", stdin="the cat\na dog\n"
    )
    ch.train_tokenizer(texts=["other words"] * 3, kind="bpe", vocab_size=280).save(tmp_path / "small")
    with pytest.raises(
        InputError, match=r"--draft .*small' has another vocabulary than the model: \d+ tokens, and the model"
    ):
        run(*words, "the cat", "--draft", str(tmp_path / "small"))


def test_a_stop_ends_the_text_before_it(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path, "gpt2")
    whole = tokenizer.decode(ch.generate(model, [tokenizer.encode("a dog")], max_new_tokens=11)[0])
    stop = whole[5:8]
    text = run("generate", str(tmp_path), "a dog", "-n", "11", "--temperature", "0", "--stop", stop)
    assert text == f"a dog{whole[: whole.index(stop)]}\n"


def test_a_text_that_a_stop_ended_is_not_said_to_be_cut(tmp_path: Path) -> None:
    """Also where the stop is complete with the last token that fits."""
    model, tokenizer = make(tmp_path, "gpt2")
    ids = tokenizer.encode("the cat")
    words = ("generate", str(tmp_path), "the cat", "--temperature", "0.9")
    for seed in map(str, range(20)):
        whole = run(*words, "--seed", seed)
        assert "ended after" in whole
        new = ch.generate(model, [ids], max_new_tokens=61 - len(ids), temperature=0.9, top_p=0.95, seed=int(seed))[0]
        last = tokenizer.decode(new[-1:])
        if last.isascii() and last.strip() and tokenizer.decode(new).count(last) == 1:
            break
    else:
        raise AssertionError("no text ends with a piece that is nowhere else in it")
    assert "ended after" not in run(*words, "--seed", seed, "--stop", last)


def test_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path, "gpt2")
    long = "the cat " * 40
    with pytest.raises(InputError, match=r"has \d+ tokens, but .*max_len=61 leaves room for 50; .*truncate='left'"):
        run("generate", str(tmp_path), long, "-n", "11")
    wanted = ch.generate(model, [tokenizer.encode(long)[-50:]], max_new_tokens=11)[0]
    text = run("generate", str(tmp_path), long, "-n", "11", "--temperature", "0", "--truncate", "left")
    assert text == f"{long}{tokenizer.decode(wanted)}\n"


def test_by_default_the_text_fits_the_model(tmp_path: Path) -> None:
    """The model's 61 tokens are less than the 128 that are written by default."""
    model, tokenizer = make(tmp_path, "gpt2")
    ids = tokenizer.encode("the cat")
    wanted = tokenizer.decode(ch.generate(model, [ids], max_new_tokens=61 - len(ids))[0])
    text = run("generate", str(tmp_path), "the cat", "--temperature", "0")
    assert text.startswith(f"the cat{wanted}\n")
    assert f"ended after {61 - len(ids)} tokens, where the model's max_len=61 is full" in text
    assert "--slide goes on" in text
    long = "the cat " * 40
    with pytest.raises(InputError, match=r"has \d+ tokens, but .*truncate='left'"):
        run("generate", str(tmp_path), long)
    cut = ch.generate(model, [tokenizer.encode(long)[-31:]], max_new_tokens=30)[0]
    text = run("generate", str(tmp_path), long, "--temperature", "0", "--truncate", "left")
    assert text.startswith(f"{long}{tokenizer.decode(cut)}\n")


@pytest.mark.parametrize("preset", ["gpt2", "llama-7b"])
def test_a_text_slides_past_the_models_length(tmp_path: Path, preset: str) -> None:
    """Each window is the last half of the text so far, a prompt of its own: the same ids as one call after another."""
    model, tokenizer = make(tmp_path, preset)
    model.generation = ch.Generation(bos=tokenizer.bos)  # no end token: every window is filled
    ch.save(model, tmp_path)
    ids, new = tokenizer.encode("the cat"), 150
    text, n = list(ids), len(ids)
    while len(text) < n + new:
        window = text if len(text) < 61 else text[-31:]
        text += ch.generate(model, [window], max_new_tokens=min(61 - len(window), n + new - len(text)))[0]
    words = ["generate", str(tmp_path), "the cat", "-n", str(new), "--temperature", "0", "--slide"]
    shown = CliRunner().invoke(app, words)
    assert shown.stdout == f"the cat{tokenizer.decode(text[n:])}\n"
    assert "the text slides: the model reads 61 tokens, and goes on from the last 31 of them" in shown.stderr
    assert shown.stderr.count("slides") == 1
    long = "the cat " * 40
    assert CliRunner().invoke(app, ["generate", str(tmp_path), long, "-n", "3", "--slide"]).stdout.startswith(long)
    short = run("generate", str(tmp_path), "the cat", "-n", "9", "--temperature", "0", "--slide")
    assert short == run("generate", str(tmp_path), "the cat", "-n", "9", "--temperature", "0")
    for other in (("--regex", "a"), ("--chat",), ("--truncate", "left")):
        with pytest.raises(InputError, match=f"--slide is for plain texts.*got {other[0]}"):
            run("generate", str(tmp_path), *([] if other == ("--chat",) else ["x"]), "--slide", *other)


def test_a_stop_text_over_the_border_of_two_windows(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path, "gpt2")
    model.generation = ch.Generation(bos=tokenizer.bos)
    ch.save(model, tmp_path)
    words = ["generate", str(tmp_path), "the cat", "-n", "100", "--temperature", "0", "--slide"]
    whole = CliRunner().invoke(app, words).stdout.removeprefix("the cat")[:-1]
    ids = tokenizer.encode("the cat")
    border = len(tokenizer.decode(ch.generate(model, [ids], max_new_tokens=61 - len(ids))[0]))
    stop = whole[border - 2 : border + 2]
    cut = CliRunner().invoke(app, [*words, "--stop", stop]).stdout
    assert cut == f"the cat{whole[: whole.index(stop)]}\n"


def test_the_checkpoints_longest_text_is_the_default(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path, "transformer-base")
    ids = [*tokenizer.encode("the cat"), tokenizer.eos]
    model.generation = dataclasses.replace(model.generation, max_length=6, eos=())
    ch.save(model, tmp_path)
    assert len(ch.translate(model, [ids])[0]) == 5  # the start token is one of the 6
    assert len(ch.translate(model, [ids], max_new_tokens=9)[0]) == 9
    written = run("translate", str(tmp_path), stdin="the cat\n")
    assert written == tokenizer.decode(ch.translate(model, [ids])[0]) + "\n"


def test_translate_reads_tables(tmp_path: Path) -> None:
    make(tmp_path / "m", "transformer-base")
    model = str(tmp_path / "m")
    plain = run("translate", model, stdin="the cat\na dog\n")
    files = {
        "a.csv": "source,target\nthe cat,x\na dog,y\n",
        "b.tsv": "the cat\tx\na dog\ty\n",
        "c.jsonl": '{"source": "the cat"}\n{"source": "a dog"}\n',
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        assert run("translate", model, str(tmp_path / name)) == plain, name
    (tmp_path / "d.jsonl").write_text('{"en": "the cat"}\n{"en": "a dog"}\n')
    assert run("translate", model, str(tmp_path / "d.jsonl"), "--column", "en") == plain
    with pytest.raises(InputError, match=r"no column 'source', only 'en'; name the column of the texts with --column"):
        run("translate", model, str(tmp_path / "d.jsonl"))


def test_errors_of_the_library_name_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, "gpt2")
    for words, message in {
        ("x", "--top-p", "7"): "--top-p must be above 0 and at most 1; got 7",
        ("x", "-n", "70"): "--max-new-tokens 70 leaves no room for a prompt: the model's max_len=61",
        ("the cat " * 40, "-n", "9"): "or cut its start: --truncate 'left'",
    }.items():
        monkeypatch.setattr("sys.argv", ["clearhead", "generate", str(tmp_path), *words])
        with pytest.raises(SystemExit):
            main()
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--min-new-tokens", "5", "-n", "3"], "--min-new-tokens 5 is more than --max-new-tokens 3; change one"),
        (["x", "--top-p", "7"], "top_p must be above 0 and at most 1; got 7"),
        (["x", "--stop", ""], "a stop is empty"),
        (["x", "-n", "70"], "max_new_tokens=70 leaves no room for a prompt"),
        (["-"], "standard input holds no text"),
        (["x", "--regex", "("], "does not compile"),
        (["x", "--regex", "a", "--choice", "b"], "got regex and choices"),
        (["x", "--json-schema", "gone.json"], "neither a JSON object nor a file"),
        (
            ["x", "--json-schema", '{"type": "integer", "minimum": 5, "maximum": 3}'],
            "cannot be followed|matches no text",
        ),
        (["x", "--min-new-tokens", "-1"], "min_new_tokens must be 0 or more"),
        (["x", "--chat"], "--chat asks for your lines one by one"),
        (["x", "--system", "be kind"], "--system 'be kind' is of a conversation, and this is none; add --chat"),
    ],
)
def test_generate_refusals(tmp_path: Path, arguments: list[str], message: str) -> None:
    make(tmp_path, "gpt2")
    with pytest.raises(InputError, match=message):
        run("generate", str(tmp_path), *arguments)


def test_no_prompt_and_no_bos(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path, "gpt2")
    written = tokenizer.decode(ch.generate(model, [[]], max_new_tokens=5)[0])
    assert run("generate", str(tmp_path), "", "-n", "5", "--temperature", "0") == f"{written}\n"
    model.generation = ch.Generation(eos=model.generation.eos)
    ch.save(model, tmp_path)
    with pytest.raises(InputError, match="prompt is empty, and the model has no bos"):
        run("generate", str(tmp_path), "", "-n", "5")


def test_every_option_reaches_the_strategy(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path, "gpt2")
    options = dict(temperature=1.3, top_k=40, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.5)
    options |= dict(frequency_penalty=0.7, no_repeat_ngram=2, min_new_tokens=3, top_p=0.9, seed=4)
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    wanted = tokenizer.decode(ch.generate(model, [tokenizer.encode("the")], max_new_tokens=21, **options)[0])
    assert run("generate", str(tmp_path), "the", "-n", "21", *words) == f"the{wanted}\n"


def test_the_last_line_break_of_a_pipe_is_removed(tmp_path: Path) -> None:
    make(tmp_path, "gpt2")
    words = ("generate", str(tmp_path), "-", "-n", "5", "--temperature", "0")
    assert run(*words, stdin="the cat\n") == run(*words, stdin="the cat")


def test_constrained_output(tmp_path: Path) -> None:
    make(tmp_path / "m", "gpt2")
    model = str(tmp_path / "m")
    assert re.fullmatch(r"the [a-c]{3}\n", run("generate", model, "the ", "--regex", "[a-c]{3}", "-n", "20"))
    assert run("generate", model, "the ", "--choice", "cat", "--choice", "dog", "-n", "20") in (
        "the cat\n",
        "the dog\n",
    )
    schema = '{"enum": [true, "cat", 12.5]}'
    (tmp_path / "s.json").write_text(schema)
    for given in (schema, str(tmp_path / "s.json")):
        text = run("generate", model, "the ", "--json-schema", given, "-n", "20")
        assert json.loads(text.removeprefix("the ")) in (True, "cat", 12.5)
    found = CliRunner().invoke(app, ["generate", model, "the ", "--regex", "[a-c]{30}", "-n", "4"])
    assert "cut after 4 tokens, before the text was complete" in found.stderr


def test_scores_and_alternatives(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path, "gpt2")
    words = ("generate", str(tmp_path), "the cat", "-n", "4", "--temperature", "0", "--alternatives", "3")
    title, *rows, total = run(*words).splitlines()
    assert title.split() == ["token", "probability", "log", "instead"]
    ids = tokenizer.encode("the cat")
    score = 0.0
    for row in rows:
        with torch.no_grad():
            likely = model(torch.tensor([ids]))[0, -1].log_softmax(-1).sort(descending=True)
        id, value = int(likely.indices[0]), float(likely.values[0])
        assert f"{math.exp(value):.2%}" in row
        assert f"{value:.4f}" in row
        for other in (1, 2):
            assert f"{math.exp(float(likely.values[other])):.1%}" in row
        score += value
        ids.append(id)
    assert len(rows) == 4
    assert total.startswith(f"4 tokens: log-probability {score:.4f}, perplexity {math.exp(-score / 4):.4f}")


def test_generate_as_json(tmp_path: Path) -> None:
    make(tmp_path, "gpt2")
    options = ("the cat", "-n", "5", "--temperature", "0")
    plain = run("generate", str(tmp_path), *options)
    written = json.loads(run("generate", str(tmp_path), *options, "--json"))
    assert written == {"text": plain.removeprefix("the cat").removesuffix("\n")}
    scored = json.loads(run("generate", str(tmp_path), *options, "--json", "--alternatives", "2"))
    assert scored["text"] == written["text"]
    assert len(scored["tokens"]) == 5
    assert all(token["log"] == token["alternatives"][0]["log"] for token in scored["tokens"]), "greedy takes the first"
    with pytest.raises(InputError, match="--json prints one object, and --chat answers line by line"):
        run("generate", str(tmp_path), "--chat", "--json")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights(tmp_path: Path, kind: str) -> None:
    quantized = pytest.importorskip("clearhead.quantization.integer")
    model, tokenizer = make(tmp_path, "gpt2")
    wanted = ch.generate(quantized.quantize(model, kind), [tokenizer.encode("the")], max_new_tokens=9)[0]
    text = run("generate", str(tmp_path), "the", "-n", "9", "--temperature", "0", "--quantize", kind)
    assert text == f"the{tokenizer.decode(wanted)}\n"


def test_quantised_for_a_text(tmp_path: Path) -> None:
    quantized = pytest.importorskip("clearhead.quantization.integer")
    _, tokenizer = make(tmp_path, "gpt2")
    sizes = dict(n_layers=2, d_model=64, n_heads=2, d_ff=96, max_len=61, vocab_size=tokenizer.vocab_size)
    model = ch.build(ch.preset("gpt2", **sizes), seed=3).eval()
    ch.save(model, tmp_path)
    (tmp_path / "a.txt").write_text("\n".join(["the cat sat on the mat", "one two three four"] * 40) + "\n")
    ids = tokenizer.encode((tmp_path / "a.txt").read_text().removesuffix("\n"))
    wanted = ch.generate(
        quantized.quantize(model, "int4", calibrate=[ids]), [tokenizer.encode("the")], max_new_tokens=9
    )[0]
    words = ("generate", str(tmp_path), "the", "-n", "9", "--temperature", "0")
    assert (
        run(*words, "--quantize", "int4", "--calibrate", str(tmp_path / "a.txt")) == f"the{tokenizer.decode(wanted)}\n"
    )
    for kind in ((), ("--quantize", "int8")):
        with pytest.raises(InputError, match=r"--calibrate .*a\.txt' is for --quantize int4 or w4a8; got (None|int8)"):
            run(*words, *kind, "--calibrate", str(tmp_path / "a.txt"))


def test_ctrl_c_ends_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, "gpt2")
    step, calls = Engine.step, 0

    def interrupted(self: Engine) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    monkeypatch.setattr("sys.argv", ["clearhead", "generate", str(tmp_path), "the cat", "-n", "9"])
    with pytest.raises(SystemExit) as found:
        main()
    printed = capsys.readouterr()
    assert found.value.code == 130
    assert printed.out.startswith("the cat")
    assert printed.out.endswith("\n")
    assert "Traceback" not in printed.err


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
    assert run("translate", str(tmp_path), "--truncate", "right", "--max-new-tokens", "3", stdin=long).count("\n") == 2


def test_n_best_with_scores(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path, "transformer-base")
    ids = [[*tokenizer.encode(text), tokenizer.eos] for text in ("the cat", "one two")]
    options: dict[str, Any] = dict(beams=3, n_best=2, max_new_tokens=9, length_penalty=0.5)
    found = ch.translate(model, ids, return_scores=True, **options)
    words = ("--beams", "3", "--n-best", "2", "--max-new-tokens", "9", "--length-penalty", "0.5")
    rows = [
        line.split("\t") for line in run("translate", str(tmp_path), *words, stdin="the cat\n\none two\n").splitlines()
    ]
    wanted = [
        [str(n), f"{h.score:.4f}", tokenizer.decode(h.tokens)] for n, hs in zip((1, 3), found, strict=True) for h in hs
    ]
    assert rows == [*wanted[:2], ["2", "", ""], *wanted[2:]]


def test_a_trace_is_written_and_drawn(tmp_path: Path) -> None:
    make(tmp_path / "m", "transformer-base")
    words = ["translate", str(tmp_path / "m"), "--beams", "3", "--max-new-tokens", "5"]
    plain = run(*words, stdin="the cat\n\none two\n")
    found = CliRunner().invoke(app, [*words, "--trace", str(tmp_path / "t.json")], input="the cat\n\none two\n")
    assert found.stdout == plain
    assert "How line 1 was found" in found.stderr
    assert "2 searches in" in found.stderr
    searches = json.loads((tmp_path / "t.json").read_text())["searches"]
    assert [each["line"] for each in searches] == [1, 3]
    assert [each["source"]["text"] for each in searches] == ["the cat", "one two"]
    assert [each["finished"][0]["text"] for each in searches] == [line for line in plain.splitlines() if line]


@pytest.mark.slow
def test_many_lines_stay_in_order(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path, "transformer-base")
    lines = ["the cat " * (1 + at % 7) + f"{at}" for at in range(300)]
    ids = [[*tokenizer.encode(line), tokenizer.eos] for line in lines]
    wanted = [tokenizer.decode(out) for out in ch.translate(model, ids, beams=2, max_new_tokens=3)]
    text = run("translate", str(tmp_path), "--beams", "2", "--max-new-tokens", "3", stdin="\n".join(lines))
    assert text.splitlines() == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "t.json", "--beams", "1"], "--trace is of a search"),
        (["--trace", "gone/t.json"], "there is no folder 'gone'"),
        (["--trace", "."], "--trace '.' can not be written"),
        (["--n-best", "5"], "got --n-best 5, --beams 4"),
        (["--max-new-tokens", "99"], "--max-new-tokens 99 is more than the model's max_len=61"),
    ],
)
def test_translate_refusals(tmp_path: Path, arguments: list[str], message: str) -> None:
    make(tmp_path, "transformer-base")
    with pytest.raises(InputError, match=message):
        run("translate", str(tmp_path), *arguments, stdin="the\n")


def test_a_sentence_is_no_file(tmp_path: Path) -> None:
    make(tmp_path, "transformer-base")
    with pytest.raises(
        InputError, match=r"'A man walks.' can not be read .*give a text through a pipe: echo 'TEXT' \|"
    ):
        run("translate", str(tmp_path), "A man walks.")


def test_an_empty_prompt_leaves_room_for_bos(tmp_path: Path) -> None:
    model, _ = make(tmp_path, "gpt2")
    assert f"ended after {model.config.max_len - 1} tokens" in run("generate", str(tmp_path), "")


def test_what_is_no_model_is_said_to_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokenizer is looked for first, but what is missing is the model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("words")
    with pytest.raises(CheckpointError, match=r"empty is no folder with a config\.json"):
        run("generate", "empty", "the")
    with pytest.raises(CheckpointError, match=r"notes\.txt is no file of weights that is known"):
        run("generate", "notes.txt", "the")
    with pytest.raises(
        CheckpointError, match="'gpt2' is a preset, sizes without weights; train a model, or give a folder"
    ):
        run("generate", "gpt2", "the")
    make(tmp_path, "gpt2")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="no tokenizer is known by these names"):
        run("generate", str(tmp_path), "the")


def test_a_mistyped_path_does_not_go_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str) -> Path:
        asked.append(name)
        return tmp_path / "runs" / "dates-1"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("clearhead.checkpoint.hub.download", download)
    make(tmp_path / "runs" / "dates-1", "gpt2")
    with pytest.raises(
        InputError, match=r"there is nothing at 'runs/date-1'; .*hf:owner/name; did you mean 'runs/dates-1'\?$"
    ):
        run("generate", "runs/date-1", "the")
    assert asked == []
    run("generate", "hf:owner/name", "the", "-n", "2")
    run("generate", "owner/name", "the", "-n", "2")  # `download` itself refuses a name without hf:
    assert asked == ["hf:owner/name", "owner/name"]


@pytest.mark.parametrize(("command", "preset"), [("generate", "transformer-base"), ("translate", "gpt2")])
def test_the_wrong_shape(tmp_path: Path, command: str, preset: str) -> None:
    make(tmp_path, preset)
    with pytest.raises(InputError, match=rf"{command} takes .* has shape="):
        run(command, str(tmp_path), stdin="x\n")
