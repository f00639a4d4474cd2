"""Whole runs: their results, and their files after an error."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import clearhead as ch
from clearhead.errors import CheckpointError, ClearheadError, ConfigError
from clearhead.training import loop, train
from clearhead.training.callbacks import Row
from clearhead.training.interrupts import Interrupts
from clearhead.training.loop import configure_torch
from clearhead.training.recipe import Train
from training.tiny_runs import Watching, make_recipe, metrics, read_checkpoint, steps_kept, weights

TASKS = ["language", "mask", "translate", "classify", "pictures"]


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_run_leaves_a_folder_that_everything_takes(task: str, tmp_path: Path) -> None:
    recipe = make_recipe(task, tmp_path)
    result = train(recipe, tmp_path / "x", show=(show := Watching()))
    assert (result.folder, result.step, result.is_complete) == (tmp_path / "x", 6, True)
    names = {path.name for path in result.folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "recipe.toml", "metrics.jsonl", "report.html", "checkpoints"}
    assert ("tokenizer.json" in names) == (task != "pictures")
    assert not [name for name in names if name.startswith(".")]
    model = ch.load(result.folder)
    assert sum(p.numel() for p in model.parameters()) > 0
    assert {"model", "training", "device", "forecast", "checkpoints"} <= show.summary.keys()
    assert [row["kind"] for row in metrics(result.folder)] == [
        *["train"] * 3,
        "valid",
        *["train"] * 3,
        "valid",
        "result",
    ]


def test_what_is_compiled_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code is kept in the user's cache folder, unless the user has set another one."""
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # remembered, so that what is written below is taken back
    ours = str(tmp_path / "compiled")
    for chosen, compile, device, kept in (
        (None, False, "cuda", None),
        (None, "auto", "cpu", None),
        (None, "auto", "cuda", ours),
        (None, True, "cpu", ours),
        ("/elsewhere", True, "cuda", "/elsewhere"),
    ):
        if chosen is None:
            monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        else:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen)
        configure_torch(Train(compile=compile), torch.device(device))  # type: ignore[arg-type]
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == kept


def test_a_narrow_stream_needs_narrow_products(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"train\.stream=bfloat16 needs .* set train\.precision=bfloat16, or train\.stream=float32"
    ):
        train(make_recipe("language", tmp_path, stream="bfloat16", precision="float32"), tmp_path / "x")


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_narrow_stream_is_handed_on(norm: str) -> None:
    model = ch.build(ch.preset("gpt2", n_layers=2, d_model=8, n_heads=2, vocab_size=11, max_len=7, norm=norm))
    assert isinstance(model, ch.Decoder)
    tokens = torch.tensor([[1, 2, 3]])
    model.stream = torch.bfloat16
    with ch.probe(model, "blocks.*.residual") as seen, torch.autocast("cpu", torch.bfloat16):
        model(tokens)
    assert {seen[site].dtype for site in seen} == {torch.bfloat16}
    with ch.probe(model, "blocks.*.residual") as seen:  # used as it is, a trained model is itself again
        model(tokens)
    assert {seen[site].dtype for site in seen} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_run_learns(task: str, tmp_path: Path) -> None:
    recipe = make_recipe(
        task, tmp_path, steps=60, lr=0.02, evaluate_every=60, checkpoint_every=60, model=dict(dropout=0.0)
    )
    train(recipe, tmp_path / "x", show=(show := Watching()))
    first, last = (sum(row["loss"] for row in rows) / 5 for rows in (show.rows[:5], show.rows[-5:]))
    assert last < 0.9 * first


def test_the_embedded_digits_train(tmp_path: Path) -> None:
    cadence = ["train.steps=2", "train.evaluate_rows=20", "train.score_rows=3", "train.samples=1", "train.device=cpu"]
    recipe = ch.training.find_recipe("digits").with_set(cadence)
    assert train(recipe, tmp_path / "digits").metrics["accuracy"] > 0


def test_a_name_is_a_recipe_and_folders_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = make_recipe("language", tmp_path, steps=1)
    assert train(recipe).folder == Path("runs/language-1")
    assert train(recipe).folder == Path("runs/language-2")
    with pytest.raises(
        ConfigError, match=r"there is no recipe 'langauge', and no .toml file of that name; did you mean 'language'"
    ):
        train("langauge")


def send(number: int, times: int) -> type[Watching]:
    class Sending(Watching):
        def step(self, row: Row) -> None:
            super().step(row)
            if row["step"] == 2:
                for _ in range(times):
                    os.kill(os.getpid(), number)

    return Sending


def test_evaluations_are_a_small_share_and_show_progress(tmp_path: Path) -> None:
    """At most about a tenth of the time of the steps between, but one batch. The last one takes all rows."""
    seen: dict[str, list[tuple[int, int]]] = {}

    class Drawing(Watching):
        def progress(self, title: str) -> Callable[[int, int], None]:
            return lambda done, total: seen.setdefault(title, []).append((done, total))

    changes: dict[str, Any] = dict(
        evaluate_rows=-1, valid_share=0.6, batch_tokens=2 * 29, steps=20, checkpoint_every=20
    )
    train(make_recipe("language", tmp_path, **changes, evaluate_every=10), tmp_path / "x", show=Drawing())
    done = seen["evaluating"]
    ends = [total for at, total in done if at == total]
    rows = 0.3 * 10 * 2  # a pass takes a third of a step's time
    assert ends[0] == ends[1] <= rows < ends[2]
    assert done[: ends[0] + 1] == [(i, ends[0]) for i in range(ends[0] + 1)]
    seen.clear()
    changes["evaluate_rows"] = 0
    train(make_recipe("language", tmp_path, **changes, evaluate_every=10), tmp_path / "y", show=Drawing())
    assert len({total for _, total in seen["evaluating"]}) == 1  # 0: all rows, always


def test_python_shows_what_the_command_line_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("language", tmp_path)
    train(recipe, tmp_path / "silent")
    assert capsys.readouterr().out == ""
    train(recipe, tmp_path / "shown", show=True)
    shown = capsys.readouterr().out
    for words in (
        "parameters",
        "forecast",
        "step 3: loss",
        "step 3, held out: loss",
        "result, on held-out data",
        "report.html",
    ):
        assert words in shown

    class ZMQInteractiveShell:  # what IPython has in a notebook's kernel
        pass

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=ZMQInteractiveShell))
    train(recipe, tmp_path / "notebook")
    assert "result, on held-out data" in capsys.readouterr().out
    train(recipe, tmp_path / "asked", show=False)
    assert capsys.readouterr().out == ""


def test_timing_a_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe("language", tmp_path, accumulate=2)
    train(recipe, tmp_path / "x")
    monkeypatch.setattr(loop.Trainer, "time_step", lambda self: None)
    train(recipe, tmp_path / "y")
    assert weights(tmp_path / "x") == weights(tmp_path / "y")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_saves(number: int, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    result = train(make_recipe("language", tmp_path), tmp_path / "x", show=send(number, 1)())
    assert (result.is_complete, result.step, result.metrics) == (False, 2, {})
    assert steps_kept(tmp_path / "x") == [2]
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_at_once(number: int, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        train(make_recipe("language", tmp_path), tmp_path / "x", show=send(number, 2)())
    assert steps_kept(tmp_path / "x") == []
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_data_is_prepared_ends_at_once(number: int, tmp_path: Path) -> None:
    class Sending(Watching):
        def note(self, text: str) -> None:
            super().note(text)
            if "tokenizer" in text:
                os.kill(os.getpid(), number)

        def begin(self, summary: dict[str, str], step: int, steps: int) -> None:
            pytest.fail("it went on")

    before, recipe = signal.getsignal(number), make_recipe("language", tmp_path)
    result = train(recipe, tmp_path / "x", show=Sending())
    assert (result.is_complete, result.step, result.metrics) == (False, 0, {})
    assert signal.getsignal(number) == before
    train(recipe, tmp_path / "x", resume=True)
    train(recipe, tmp_path / "y")
    assert weights(tmp_path / "x") == weights(tmp_path / "y")


def test_a_signal_during_the_last_evaluation_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is in the last checkpoint: nothing is lost, and the run can go on."""

    def send(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")

    recipe = make_recipe("language", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "choose_weights", send)
        result = train(recipe, tmp_path / "x")
    assert (result.is_complete, result.step) == (False, recipe.train.steps)
    assert train(recipe, tmp_path / "x", resume=True).is_complete


def test_signals_elsewhere_than_in_the_main_thread_are_not_ours() -> None:
    problems: list[BaseException] = []

    def work() -> None:
        try:
            with Interrupts() as interrupts:
                assert not interrupts.raised
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not problems


@contextmanager
def largest_file(nbytes: int) -> Generator[None]:
    """The kernel lets no file grow beyond this size: like a full disk, with another error number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Filling(Watching):
    """From now on no file may be larger than `nbytes`."""

    def __init__(self, moment: str, nbytes: int) -> None:
        super().__init__()
        self.moment, self.nbytes, self.limit = moment, nbytes, None

    def fill(self, moment: str) -> None:
        if moment == self.moment:
            self.limit = largest_file(self.nbytes)
            self.limit.__enter__()

    def note(self, text: str) -> None:
        self.fill("tokenizer" if "tokenizer" in text else "")

    def progress(self, title: str):  # type: ignore[no-untyped-def]
        self.fill("tokenising")
        return super().progress(title)

    def step(self, row: Row) -> None:
        self.fill(f"step {row['step']}")

    def evaluated(self, row: Row) -> None:
        self.fill(f"evaluation {row['step']}")

    def end(self) -> None:
        self.fill("end")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "nbytes", "words", "left"),
    [
        ("tokenizer", 10, "could not be written", []),
        ("tokenising", 10, "the store", []),
        ("step 4", 5, "could not be written", [3]),
        ("evaluation 6", 2000, "step-00000006 could not be written", [3]),
        ("end", 2000, "could not be written", [3, 6]),
    ],
)
def test_a_full_disk_is_one_clear_line(moment: str, nbytes: int, words: str, left: list[int], tmp_path: Path) -> None:
    recipe = make_recipe("translate", tmp_path)
    train(recipe, tmp_path / "alone" / "x")
    show = Filling(moment, nbytes)
    try:
        with pytest.raises(CheckpointError) as error:
            train(recipe, tmp_path / "full" / "x", show=show)
    finally:
        assert show.limit is not None
        show.limit.__exit__(None, None, None)
    assert words in str(error.value)
    assert os.strerror(errno.EFBIG) in str(error.value)
    assert "\n" not in str(error.value)
    assert steps_kept(tmp_path / "full" / "x") == left
    assert not list((tmp_path / "full" / "x" / "checkpoints").glob(".*"))
    # With room again, the run goes on as if nothing had happened.
    train(recipe, tmp_path / "full" / "x", resume=True, show=(show_after := Watching()))
    assert show_after.began == (left[-1] if left else 0)
    assert weights(tmp_path / "full" / "x") == weights(tmp_path / "alone" / "x")
    assert metrics(tmp_path / "full" / "x") == metrics(tmp_path / "alone" / "x")


def test_a_disk_that_is_full_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(CheckpointError, match=r"0\.00 GB free, but this run's checkpoints need .* out=FOLDER"):
        train(make_recipe("language", tmp_path), tmp_path / "x")


def read_only_folder(tmp_path: Path) -> Path:
    """A folder that not even root can write to, as tests may run as root."""
    if os.geteuid() == 0:
        return Path("/sys/clearhead-run")
    (tmp_path / "locked").mkdir(mode=0o500)
    return tmp_path / "locked" / "x"


def test_a_read_only_folder_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"can not be written to \(.*\); choose another folder with out=FOLDER"
    ) as error:
        train(make_recipe("language", tmp_path), read_only_folder(tmp_path))
    assert "\n" not in str(error.value)


def test_a_folder_that_becomes_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe("language", tmp_path)
    train(recipe, tmp_path / "x", show=Watching(stop=4))
    mkdir = Path.mkdir

    def refuse(path: Path, *arguments: object, **options: object) -> None:
        if path.name.startswith(".step-"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, *arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(CheckpointError, match="Read-only file system") as error:
            train(recipe, tmp_path / "x", resume=True)
    assert "the last whole one is step-00000004" in str(error.value)
    assert f"clearhead train --resume {tmp_path / 'x'}" in str(error.value)
    assert train(recipe, tmp_path / "x", resume=True).is_complete


@pytest.mark.parametrize(
    "cadence", [dict(checkpoint_every=1), dict(checkpoint_every=2, log_every=100), dict(max_skips=0), dict(max_skips=3)]
)
def test_a_loss_that_is_no_number(cadence: dict[str, Any], tmp_path: Path) -> None:
    recipe = make_recipe(
        "language", tmp_path, lr=1e30, clip=0.0, schedule="constant", warmup=0, evaluate_every=6, **cadence
    )
    with pytest.raises(
        ConfigError, match=r"no number .* train\.lr=1e\+30 may be too high.* the checkpoints .*are unharmed"
    ):
        train(recipe, tmp_path / "x")
    for checkpoint in (tmp_path / "x" / "checkpoints").glob("step-*"):
        assert all(bool(tensor.isfinite().all()) for tensor in read_checkpoint(checkpoint).values())
    assert not (tmp_path / "x" / "model.safetensors").exists()


def test_early_stopping(tmp_path: Path) -> None:
    """A learning rate of nearly 0 does not change the accuracy: the first evaluation stays the best."""
    changes: dict[str, Any] = dict(
        steps=50, evaluate_every=2, patience=3, best="accuracy", lr=1e-12, checkpoint_every=50
    )
    recipe = make_recipe("language", tmp_path, **changes)
    result = train(recipe, tmp_path / "x", show=(show := Watching()))
    assert (result.step, result.is_complete) == (8, True)
    assert [row["step"] for row in show.valid] == [2, 4, 6, 8]
    assert "the result is step 2, the best on held-out data" in show.notes
    assert "stopped at step 8 of 50: no better for 3 evaluations (train.patience)" in show.notes
    # Resumed, it stops at the same step again.
    before = weights(tmp_path / "x")
    assert train(recipe, tmp_path / "x", resume=True).step == 8
    assert weights(tmp_path / "x") == before


@pytest.mark.parametrize(("average", "said"), [(5, "the mean of the last 2 checkpoints"), (1, "the last checkpoint, ")])
def test_the_mean_of_checkpoints_is_counted(average: int, said: str, tmp_path: Path) -> None:
    recipe = make_recipe("language", tmp_path, steps=6, checkpoint_every=3, average=average)
    train(recipe, tmp_path / "x", show=(show := Watching()))
    assert any(note.startswith(f"the result is {said}") for note in show.notes), show.notes
    assert not any(note.startswith("stopped") for note in show.notes)


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["best", "last"])
def test_which_weights_are_the_result(keep: str, tmp_path: Path) -> None:
    """With a far too high learning rate the loss jumps, and the best step is not the last."""
    changes: dict[str, Any] = dict(steps=12, evaluate_every=1, lr=0.3, warmup=0, schedule="constant", evaluate_rows=0)
    recipe = make_recipe("language", tmp_path, keep=keep, **changes)
    result = train(recipe, tmp_path / "x", show=(show := Watching()))
    losses = [row["loss"] for row in show.valid]
    assert min(losses) < losses[-1]
    assert result.metrics["loss"] == (min(losses) if keep == "best" else losses[-1])


def test_the_best_by_a_metric_that_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)  # not installed
    with pytest.raises(ConfigError, match=r"train\.best='bleu' is not measured here; choose one of: loss, .*exact"):
        train(make_recipe("translate", tmp_path, best="bleu"), tmp_path / "x")


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.device='quantum' can not be used here .* try cpu"):
        train(make_recipe("language", tmp_path, device="quantum"), tmp_path / "x")


@pytest.mark.slow
def test_lora_merges_what_it_learnt(tmp_path: Path) -> None:
    """The merged result has the held-out loss that the run measured with LoRA."""
    base = train(make_recipe("language", tmp_path), tmp_path / "base").folder
    recipe = make_recipe("language", tmp_path, start=base, lora_rank=3, lr=0.01, steps=4, evaluate_every=4, keep="last")
    result = train(recipe, tmp_path / "x", show=(show := Watching()))
    assert any("LoRA" in note and "numbers learn" in note for note in show.notes)
    assert {name.partition(".lora")[2] for name in load_file(tmp_path / "x" / "model.safetensors")} == {""}
    again = make_recipe("language", tmp_path, start=result.folder, lr=1e-30, steps=1, evaluate_every=1, keep="last")
    repeated = train(again, tmp_path / "again")
    # W + BA in one product or two: float32 rounds them differently
    assert repeated.metrics["loss"] == pytest.approx(result.metrics["loss"], rel=1e-5)


def test_the_environment_is_written_down(tmp_path: Path) -> None:
    train(make_recipe("language", tmp_path, steps=1), tmp_path / "x")
    facts = json.loads((tmp_path / "x" / "environment.json").read_text())
    assert facts["torch"] == torch.__version__.partition("+")[0] or facts["torch"] == torch.__version__
    assert {"clearhead", "python", "system", "device", "threads"} <= facts.keys()


def test_errors_are_of_the_tree(tmp_path: Path) -> None:
    with pytest.raises(ClearheadError, match=r"learns from data\.files, and there is none"):
        train(ch.training.find_recipe("language"), tmp_path / "x")
