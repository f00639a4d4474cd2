"""`clearhead train` on the command line."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

import clearhead as ch
from clearhead.cli import main
from clearhead.training import Recipe, read_run, sizing
from training.tiny_runs import (
    command,
    make_recipe,
    metrics,
    plain_environment,
    weights,
    write_lines,
    write_pairs,
    write_pictures,
    write_table,
    write_text,
)

pytestmark = pytest.mark.usefixtures("unchecked")  # typer hands over what the annotations do not say

# Any recipe, made tiny.
TINY = [
    "model.n_layers=1",
    "model.d_model=8",
    "model.n_heads=2",
    "model.d_ff=13",
    "data.tokenizer=chars",
    "data.length=29",
    "train.steps=3",
    "train.batch_tokens=131",
    "train.evaluate_every=3",
    "train.log_every=1",
    "train.samples=2",
    "train.score_rows=2",
    "train.tensorboard=false",
    "train.device=cpu",
    "train.patience=0",
    "train.average=0",
]
PICTURES = ["model.image_size=8", "model.patch_size=4", "data.valid_share=0.3", "data.shift=1"]


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Clearhead:
    """The command line in this process: what it returns and prints."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys
        monkeypatch.chdir(folder)
        for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "CLEARHEAD_DEBUG"):
            monkeypatch.delenv(name, raising=False)

    def __call__(self, *arguments: object, tiny: bool = True) -> Ran:
        settings = [word for setting in TINY for word in ("--set", setting)] if tiny else []
        self.monkeypatch.setattr(sys, "argv", ["clearhead", *map(str, arguments), *settings])
        try:
            main()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0
        said = self.capsys.readouterr()
        return Ran(code, said.out, said.err)


@pytest.fixture
def clearhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Clearhead:
    return Clearhead(tmp_path, monkeypatch, capsys)


def assert_trained(ran: Ran, folder: Path, *words: str) -> Recipe:
    assert (ran.code, ran.err) == (0, ""), ran
    for word in ("parameters", "forecast", "step 3: loss", "tokens/s", "step 3, held out: loss", *words):
        assert word in ran.out
    # The summary comes before the first step, the result after the last; no line is broken, coloured or drawn over.
    assert ran.out.index("parameters") < ran.out.index("step 1: loss") < ran.out.index("result, on held-out data")
    assert f"model   {folder}\nreport  {folder}/report.html\nnext    clearhead " in ran.out
    assert f"clearhead explore {folder} " in ran.out.splitlines()[-1]
    assert not set("\x1b\r") & set(ran.out)
    assert "<svg" in (folder / "report.html").read_text(encoding="utf-8")
    ch.load(folder)
    return read_run(folder)


def test_language(clearhead: Clearhead, tmp_path: Path) -> None:
    write_text(tmp_path / "data")
    write_lines(tmp_path / "data" / "b.txt", [f"{i} lines more" for i in range(31)])
    ran = clearhead("train", "language", "data/a.txt", "data/b.txt")
    recipe = assert_trained(
        ran, Path("runs/language-1"), "bits/byte", "tokens to learn from", "decoder, 1 layers of width 8"
    )
    assert recipe.data.files == (str(tmp_path / "data" / "a.txt"), str(tmp_path / "data" / "b.txt"))
    ran = clearhead("train", "language", "data/a.txt", "--out", "here")
    assert "wanted" not in ran.out  # a text can go on in many ways
    (generate,) = re.findall(r"^next    clearhead (generate here .*)$", ran.out, re.MULTILINE)
    again = clearhead(*shlex.split(generate), "--device", "cpu", tiny=False)
    assert again.code == 0, again.err


def test_mask_and_then_classify_from_it(clearhead: Clearhead, tmp_path: Path) -> None:
    write_text(tmp_path)
    assert_trained(clearhead("train", "mask", "a.txt", "--out", "masked", "-s", "data.documents=line"), Path("masked"))
    write_table(tmp_path)
    sizes = {"model.n_layers=1", "model.d_model=8", "model.n_heads=2", "model.d_ff=13", "data.tokenizer=chars"}
    settings = [word for setting in TINY if setting not in sizes for word in ("--set", setting)]
    ran = clearhead("train", "classify", "a.csv", "--from", "masked", "--out", "labels", *settings, tiny=False)
    recipe = assert_trained(ran, Path("labels"), "accuracy")
    assert recipe.model["from"] == str(tmp_path / "masked")


def test_translate(clearhead: Clearhead, tmp_path: Path) -> None:
    write_pairs(tmp_path)
    ran = clearhead("train", "translate", "--source", "a.source", "--target", "a.target", "--out", "x")
    assert_trained(ran, Path("x"), "BLEU", "chrF", "exact match", "padding", "encoder-decoder, 1+1 layers")
    assert " -> " in ran.out
    held = ["--valid-source", "a.source", "--valid-target", "a.target"]
    ran = clearhead("train", "translate", "--source", "a.source", "--target", "a.target", "--out", "y", *held)
    assert "61 to learn from, 61 held out" in ran.out


def test_classify_a_table(clearhead: Clearhead, tmp_path: Path) -> None:
    write_table(tmp_path)
    ran = clearhead("train", "classify", "a.csv", "--out", "x")
    assert_trained(ran, Path("x"), "accuracy", "2: even, odd")
    assert ch.load("x").config.labels == ("even", "odd")


def test_classify_pictures(clearhead: Clearhead, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path)
    ran = clearhead("train", "classify", folder, "--out", "x", *(f"--set={setting}" for setting in PICTURES))
    assert_trained(ran, Path("x"), "accuracy", "2: dark, light", "3 x 8 x 8, 5 tokens each")
    assert ch.load("x").config.inputs == "patches"


def test_a_batch_holds_a_picture(clearhead: Clearhead, tmp_path: Path) -> None:
    folder, small = write_pictures(tmp_path), ["--set=model.image_size=8", "--set=model.patch_size=4"]
    ran = clearhead("train", "classify", folder, *small, "--set=train.batch_tokens=3", tiny=False)
    assert "train.batch_tokens=3 is less than one picture of 5 tokens; raise it to 5 or more" in ran.err


def test_lora_from_a_model(clearhead: Clearhead, tmp_path: Path) -> None:
    write_text(tmp_path)
    clearhead("train", "language", "a.txt", "--out", "base")
    settings = [
        "-s",
        "train.steps=3",
        "-s",
        "data.length=29",
        "-s",
        "train.batch_tokens=131",
        "-s",
        "train.log_every=1",
    ]
    settings += ["-s", "train.device=cpu", "-s", "train.evaluate_every=3"]
    arguments = ("train", "language", "a.txt", "--from", "base", "--lora", "rank=4,alpha=8", "--out", "x")
    recipe = assert_trained(clearhead(*arguments, *settings, tiny=False), Path("x"), "LoRA: ", "of them learn")
    assert (recipe.train.lora_rank, recipe.train.lora_alpha) == (4, 8.0)
    repeated = ("--lora", "rank=4", "--lora", "alpha=8", "--show-recipe")
    ran = clearhead("train", "language", "a.txt", "--from", "base", *repeated, tiny=False)
    assert (Recipe.read(ran.out).train.lora_rank, Recipe.read(ran.out).train.lora_alpha) == (4, 8.0)
    ran = clearhead("train", "language", "a.txt", "--lora", "rnk=4", tiny=False)
    assert ran == (1, "", "clearhead: --lora 'rnk=4' is not understood; write rank=8, or rank=8,alpha=16\n")
    ran = clearhead("train", "language", "a.txt", "--from", "nowhere", tiny=False)
    assert ran.code == 1
    assert "nowhere" in ran.err


def test_show_recipe(clearhead: Clearhead, tmp_path: Path) -> None:
    write_text(tmp_path)
    ran = clearhead(
        "train", "language", "a.txt", "--show-recipe", "--too-long", "cut", "--empty=keep", "--bad-bytes=drop"
    )
    assert (ran.code, ran.err) == (0, "")
    recipe = Recipe.read(ran.out)
    lines = [line for line in ran.out.splitlines() if " = " in line]
    assert [line for line in lines if "  # " not in line] == []
    assert any(
        line.startswith('schedule = "wsd"') and line.endswith("one of: constant, cosine, noam, wsd") for line in lines
    )
    assert recipe.train.steps == 3
    assert (recipe.data.too_long, recipe.data.empty, recipe.data.bad_bytes) == ("cut", "keep", "drop")
    assert recipe.data.files == (str(tmp_path / "a.txt"),)
    assert not (tmp_path / "runs").exists()
    # What it printed can be trained.
    (tmp_path / "mine.toml").write_text(ran.out, encoding="utf-8")
    assert_trained(clearhead("train", "mine.toml", "--out", "x", tiny=False), Path("x"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["language", "a.txt", "-s", "train.stepps=5"],
            "a recipe has no field train.stepps; did you mean 'train.steps'?",
        ),
        (["language", "a.txt", "-s", "steps=5"], "write part.field=value, e.g. train.steps=500"),
        (["language", "a.txt", "-s", "train.steps=many"], "train.steps='many' is a str; give a value of type int"),
        (
            ["language", "a.txt", "-s", "train.optimizer=adam"],
            "train.optimizer='adam' is not known; did you mean 'adamw'?",
        ),
        (["language", "a.txt", "--empty", "maybe"], "data.empty='maybe' is not known"),
        (
            ["langage", "a.txt"],
            "there is no recipe 'langage', and no .toml file of that name; did you mean 'language'?",
        ),
        (["nothing.toml"], "the recipe 'nothing.toml' can not be read"),
        ([], "nothing to learn was named; try: clearhead train language data/*.txt"),
        (["language"], "the task 'language' learns from data.files, and there is none; name files on the command line"),
        (["translate", "--source", "a.txt"], "learns from data.target, and there is none; name --target"),
        (["language", "nowhere.txt"], "nowhere.txt"),
        (["classify", "a.txt"], "a.txt"),
        (["--resume", "nowhere"], "nowhere holds no run: there is no recipe.toml"),
        (["language", "--resume", "x"], "--resume x goes on with the data it began with"),
        (
            ["--resume", "x", "--from", "y"],
            "--resume x goes on with the data it began with, in the same folder; got --from;",
        ),
        (["--resume", "x", "--valid", "a.txt"], "got --valid; leave that out, or start a new run"),
        (["--resume", "x", "--valid-source", "a.txt"], "got --valid-source; leave that out"),
        (["--resume", "x", "--out", "y"], "got --out; leave that out"),
        (["language", "a.txt", "--source", "a.txt"], "the task 'language' does not read data.source"),
        (["language", "a.txt", "--valid-source", "a.txt"], "--valid-source is for translate"),
        (
            ["translate", "--source", "a.txt", "--target", "a.txt", "--valid", "a.txt"],
            "learns from data.valid_target, and",
        ),
        (
            ["translate", "a.txt", "a.txt"],
            "name --target, or a table of pairs (.csv, .tsv, .jsonl ...), on the command line",
        ),
        (["translate", "a.txt", "--source", "a.txt", "--target", "a.txt"], "does not read data.files;"),
        (["translate", "--source", "a", "--target", "b", "--valid-target", "c"], "held-out targets have no sources"),
        (["language", "a.txt", "--lora", "alpha=3"], "--lora 'alpha=3' has no rank, and would train all weights"),
        (["language", "a.txt", "--lora", "rank=0"], "--lora 'rank=0' has no rank, and would train all weights"),
        (["language", "a.txt", "--lora", "rank=8", "--lora", "rank=9"], "--lora 'rank=8,rank=9' is not understood"),
        (
            ["language", "a.txt", "--lora", "rank=8"],
            "got train.lora_rank=8 without model.from; name a model with --from",
        ),
        (["language", "a.txt", "-s", "train.lora_alpha=3"], "train.lora_alpha=3.0 has no effect without LoRA"),
        (["language", "a.txt", "-s", "train.batch_tokens=3"], "less than one window of data.length=256 tokens"),
        (
            ["language", "a.txt", "--from", ".", "-s", "data.tokenizer=chars"],
            "data.tokenizer is of a tokenizer to be trained",
        ),
        (
            ["language", "a.txt", "--from", ".", "-s", "data.vocab_size=99"],
            "data.vocab_size is of a tokenizer to be trained",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(clearhead: Clearhead, tmp_path: Path, arguments: list[str], message: str) -> None:
    write_text(tmp_path)
    ran = clearhead("train", *arguments, tiny=False)
    assert ran.code == 1, ran
    assert ran.err.startswith("clearhead: ")
    assert ran.err.count("\n") == 1
    assert message in ran.err


def test_pairs_may_be_in_one_table(clearhead: Clearhead, tmp_path: Path) -> None:
    source, target = (Path(name).read_text().split() for name in write_pairs(tmp_path))
    rows = [f"{first},{second}\n" for first, second in zip(source, target, strict=True)]
    (tmp_path / "pairs.csv").write_text("source,target\n" + "".join(rows))
    (tmp_path / "held.csv").write_text("".join(rows[:7]))
    ran = clearhead("train", "translate", "pairs.csv", "--valid", "held.csv", "--out", "table")
    assert ran.code == 0, ran
    assert "61 to learn from, 7 held out" in ran.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["language"], "the task 'language' learns from data.files, and there is none; name files on the command line"),
        (["translate", "--source", "a.txt"], "learns from data.target, and there is none; name --target"),
        (
            ["language", "a.txt", "--out", "taken"],
            "taken is not empty and holds no run; choose another folder with --out",
        ),
        (["a.txt"], "'a.txt' is no task; name the task before the data: clearhead train language a.txt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_found_before_the_machine_is_measured(
    clearhead: Clearhead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sizing, "measure_rate", lambda: pytest.fail("the machine was measured"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_text(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("words")
    ran = clearhead("train", *arguments, tiny=False)
    assert (ran.code, ran.out) == (1, "")
    assert message in ran.err


def test_wrong_usage_is_2(clearhead: Clearhead) -> None:
    assert clearhead("train", "--no-such-flag", tiny=False).code == 2


def test_debug_shows_where(clearhead: Clearhead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_DEBUG", "1")
    with pytest.raises(ch.ClearheadError, match="no field"):
        clearhead("train", "language", "-s", "train.stepps=5", tiny=False)


BAD = {
    "bad_bytes": (b"one line\nsecond \xff\n", "a.source:2 is not UTF-8: byte 0xff", "--bad-bytes=drop", "dropped: invalid UTF-8"),
    "empty": (b"one line\n\nthree\n", "a.source:2 is empty", "--empty=drop", "dropped: empty"),
    "too_long": (b"one\n" + b"x" * 10_000_000 + b"\nthree\n", "a.source:2 has at least", "--too-long=drop", "more than 29 tokens"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", BAD)
def test_bad_lines_are_named_and_a_flag_decides(kind: str, clearhead: Clearhead, tmp_path: Path) -> None:
    content, message, flag, said = BAD[kind]
    (tmp_path / "a.source").write_bytes(content + b"more\n" * 9)
    write_lines(tmp_path / "a.target", ["out"] * (content.count(b"\n") + 9))
    pairs = ["train", "translate", "--source", "a.source", "--target", "a.target"]
    refuse = f"--{kind.replace('_', '-')}=error"
    ran = clearhead(*pairs, "--out", "x", refuse)
    assert ran.code == 1
    assert message in ran.err
    assert ran.err.count("\n") == 1
    ran = clearhead(*pairs, "--out", "y", flag)
    assert ran.code == 0, ran
    assert said in ran.out
    assert "1 of " in ran.out
    assert "a.source:2" in ran.out


def test_unequal_line_counts(clearhead: Clearhead, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.source", ["in"] * 13)
    write_lines(tmp_path / "a.target", ["out"] * 11)
    pairs = ["train", "translate", "--source", "a.source", "--target", "a.target"]
    ran = clearhead(*pairs)
    assert ran.code == 1
    assert "13" in ran.err
    assert "11" in ran.err
    assert clearhead(*pairs, "--unequal", "cut", "--out", "y").code == 0


def test_windows_files(clearhead: Clearhead, tmp_path: Path) -> None:
    """A byte order mark at the start and CRLF line ends are not part of any line."""
    source, target = write_pairs(tmp_path)
    plain = clearhead("train", "translate", "--source", source, "--target", target, "--out", "plain/x")
    for file in (source, target):
        Path(file).write_bytes(b"\xef\xbb\xbf" + Path(file).read_bytes().replace(b"\n", b"\r\n"))
    other = clearhead("train", "translate", "--source", source, "--target", target, "--out", "other/x")
    assert plain.code == other.code == 0
    assert weights(tmp_path / "plain" / "x") == weights(tmp_path / "other" / "x")


def test_resume_with_more_steps(clearhead: Clearhead, tmp_path: Path) -> None:
    write_text(tmp_path)
    clearhead("train", "language", "a.txt", "--out", "x")
    ran = clearhead("train", "--resume", "x", "--set", "train.steps=5", tiny=False)
    assert ran.code == 0, ran
    assert "going on from step 3" in ran.out
    assert "tokens/s since step 3, " in ran.out
    assert [row["step"] for row in metrics(tmp_path / "x") if row["kind"] == "train"] == [1, 2, 3, 4, 5]
    ran = clearhead("train", "--resume", "x", "--set", "model.d_ff=17", tiny=False)
    assert ran.err == "clearhead: a run goes on with the model it began with; start a new one to change it\n"
    ran = clearhead("train", "language", "a.txt", "--out", "x")
    assert "x already holds a run; go on with it: clearhead train --resume x" in ran.err


def test_help_loads_no_torch() -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "clearhead", "train", "--help"],
        env=plain_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0
    loaded = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines() if line.startswith("import time:")}
    assert "clearhead.cli" in loaded
    assert not {name.partition(".")[0] for name in loaded} & {"torch", "numpy", "tokenizers", "safetensors"}
    for word in ("--resume", "--lora", "--set", "--source", "--from", "--show-recipe", "--bad-bytes", "--out"):
        assert word in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "a polite kill"])
def test_stopped_by_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    """In a process of its own: it saves, prints how to resume, and exits with 130."""
    recipe = make_recipe("language", tmp_path, steps=100_000, checkpoint_every=100_000, evaluate_every=100_000)
    (tmp_path / "tiny.toml").write_text(recipe.to_toml(), encoding="utf-8")
    running = subprocess.Popen(
        [sys.executable, "-m", "clearhead", "train", "tiny.toml", "--out", "x"],
        cwd=tmp_path,
        env=plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    while not running.stdout.readline().startswith("step 7:"):
        assert running.poll() is None
    os.kill(running.pid, number)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (130, "")
    assert "everything is saved. Go on with:\n  clearhead train --resume x\n" in out
    (saved,) = (tmp_path / "x" / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    ran = command("train", "--resume", "x", "--set", f"train.steps={step + 2}", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert f"going on from step {step:,}\n" in ran.stdout


def test_without_settings_sizes_and_steps_are_chosen(
    clearhead: Clearhead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the recipe that is shown and stored, with the reason as a comment; --minutes asks for more."""
    monkeypatch.setattr(sizing, "measure_rate", lambda: 15e9)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_lines(tmp_path / "a.txt", ["some words to learn from"] * 10_000)
    shown = [
        clearhead("train", "language", "a.txt", "--show-recipe", *more, tiny=False)
        for more in ((), ("--minutes", "500"))
    ]
    short, long = (Recipe.read(ran.out) for ran in shown)
    assert shown[0].out.startswith("# chosen for this machine (15.0 GFLOP/s in training)")
    assert short.model["d_model"] < long.model["d_model"]
    assert short.train.threads == 1
    ran = clearhead(
        "train",
        "language",
        "a.txt",
        "--minutes",
        "0.1",
        "--out",
        "x",
        "-s",
        "train.steps=2",
        "-s",
        "data.vocab_size=300",
        tiny=False,
    )
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("chosen for this machine")
    stored = read_run(Path("x"))
    assert stored.train.steps == 2
    assert stored.model["d_model"] < long.model["d_model"]


def test_minutes_without_effect_are_refused(clearhead: Clearhead, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(make_recipe("language", tmp_path).to_toml(), encoding="utf-8")
    ran = clearhead("train", "mine.toml", "--minutes", "5", tiny=False)
    assert ran.err == (
        "clearhead: --minutes 5 has no effect: a recipe's file says its sizes and steps; leave it out, and set train.steps\n"
    )
    ran = clearhead("train", "--resume", "x", "--minutes", "5", tiny=False)
    assert "got --minutes; leave that out" in ran.err


@pytest.mark.slow
def test_stopped_while_the_tokenizer_is_trained(tmp_path: Path) -> None:
    """With many different words: counting and merging them takes long, and does not return to Python meanwhile."""
    numbers = " ".join(f"{7919 * i % 9999991:x}{104729 * i % 999983:x}" for i in range(600_000))
    write_lines(tmp_path / "long.txt", [numbers[at : at + 100] for at in range(0, len(numbers), 100)])
    running = subprocess.Popen(
        [
            sys.executable,
            "-u",
            "-m",
            "clearhead",
            "train",
            "language",
            "long.txt",
            "--out",
            "x",
            "--set",
            "data.vocab_size=60000",
        ],
        cwd=tmp_path,
        env=plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    while not running.stdout.readline().startswith("training a bpe tokenizer"):
        assert running.poll() is None
    time.sleep(3)
    began = time.monotonic()
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert time.monotonic() < began + 5
    assert (running.returncode, err) == (130, "")
    assert out.startswith(
        "stopped before the first step; its recipe and finished parts of the data are kept. Go on with:\n"
    )
    assert "clearhead train --resume x\n" in out


def test_a_mistake_before_the_first_step_leaves_nothing(clearhead: Clearhead, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    ran = clearhead("train", "language", "empty.txt", "--out", "x")
    assert ran.code == 1
    assert "there is no text in " in ran.err
    assert "empty.txt; give files" in ran.err
    write_text(tmp_path)
    ran = clearhead("train", "language", "a.txt", "--out", "x", "--set", "model.norm=rsm")
    assert "norm='rsm' is not known; did you mean 'rms'?" in ran.err
    assert "tokenizer" not in ran.out  # said before any data was read
    assert not (tmp_path / "x").exists()
    (tmp_path / "x").mkdir()  # a folder of the user's own stays
    assert clearhead("train", "language", "empty.txt", "--out", "x").code == 1
    assert (tmp_path / "x").is_dir()
