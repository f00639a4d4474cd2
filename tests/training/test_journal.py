"""metrics.jsonl and TensorBoard: a resumed run's lines are those of an uninterrupted one. And the run's folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.errors import CheckpointError, ConfigError, InputError
from clearhead.training.folder import (
    check_resumable,
    check_space,
    environment,
    next_folder,
    open_folder,
    read_run,
    write_text,
)
from clearhead.training.journal import Journal
from clearhead.training.recipe import Recipe

CPU = torch.device("cpu")


def rows(first: int, last: int) -> list[dict[str, Any]]:
    return [
        {"step": step, "kind": kind, "loss": 1 / step, "samples": [{"output": "März 日本"}]}
        for step in range(first, last + 1)
        for kind in (["train", "valid"] if step % 3 == 0 else ["train"])
    ]


def fill(folder: Path, *, step: int, last: int, tensorboard: bool = False) -> None:
    journal = Journal(folder, step=step, tensorboard=tensorboard)
    for row in rows(step + 1, last):
        journal.write(row)
    journal.close()


def test_a_resumed_journal_is_an_uninterrupted_one(tmp_path: Path):
    whole, killed = tmp_path / "a", tmp_path / "b"
    for folder in (whole, killed):
        folder.mkdir()
    fill(whole, step=0, last=13)
    for step, last in ((0, 7), (6, 11), (3, 5), (3, 13)):  # each goes on from a checkpoint before where the last got
        fill(killed, step=step, last=last)
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert [json.loads(line) for line in (whole / "metrics.jsonl").read_text("utf-8").splitlines()] == rows(1, 13)
    assert "März 日本" in (whole / "metrics.jsonl").read_text("utf-8")
    assert sorted(path.name for path in killed.iterdir()) == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", range(1, 83, 3))
def test_half_a_line_is_dropped(tmp_path: Path, cut: int):
    """Cut anywhere, in the middle of a letter too."""
    fill(tmp_path, step=0, last=5)
    file = tmp_path / "metrics.jsonl"
    whole = file.read_bytes()
    line = whole.splitlines(keepends=True)[-1]
    assert cut < len(line)
    file.write_bytes(whole[:-cut])
    Journal(tmp_path, step=5, tensorboard=False)
    kept = [json.loads(text)["step"] for text in file.read_text("utf-8").splitlines()]
    assert kept == [1, 2, 3, 3, 4, 5][: 6 if cut == 1 else 5]  # only its end missing: the line is whole


def test_lines_that_are_none_are_dropped(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(
        '\n[]\n{"kind": "train"}\nnull\n3\n{"step": 1, "kind": "train"}\n', encoding="utf-8"
    )
    Journal(tmp_path, step=1, tensorboard=False)
    assert (tmp_path / "metrics.jsonl").read_text("utf-8") == '{"step": 1, "kind": "train"}\n'


def test_other_processes_write_nothing(tmp_path: Path):
    journal = Journal(None, step=0, tensorboard=True)
    journal.write({"step": 1, "kind": "train"})
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_the_result_is_written_again(tmp_path: Path):
    lines = ['{"step": 3, "kind": "train"}', '{"step": 3, "kind": "valid"}', '{"step": 3, "kind": "result"}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    Journal(tmp_path, step=3, tensorboard=False)
    assert (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines() == lines[:2]


def test_tensorboard_reads_it(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fill(tmp_path, step=0, last=7, tensorboard=True)
    fill(tmp_path, step=3, last=11, tensorboard=True)  # goes on from 3: what was written after it is purged
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "valid/loss"}
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in found] == list(range(1, 12))
    assert [value for _, value in found] == pytest.approx([1 / step for step in range(1, 12)])
    assert [event.step for event in events.Scalars("valid/loss")] == [3, 6, 9]


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fill(tmp_path, step=0, last=2, tensorboard=True)
    assert not (tmp_path / "tensorboard").exists()


RECIPE = Recipe(task="language", model={"labels": ("a", "b"), "n_layers": 3})


def test_a_folder_is_opened_and_read_again(tmp_path: Path):
    folder = tmp_path / "runs" / "language-1"
    open_folder(folder, RECIPE, resume=False, device=CPU)
    found = read_run(folder)
    check_resumable(found, RECIPE)
    check_resumable(found, found.with_set(["train.steps=3", "train.lr=0.1"]))
    told = json.loads((folder / "environment.json").read_text("utf-8"))
    assert told["device"] == "cpu"
    assert {"torch", "python", "clearhead", "started", "threads"} <= told.keys()
    assert told.keys() == environment(CPU).keys()
    assert (folder / "checkpoints").is_dir()
    open_folder(folder, RECIPE, resume=True, device=CPU)
    # Nothing was learnt there yet: the same command, mended, may begin anew, and forgets what the last try trained.
    (folder / "tokenizer.json").write_text("{}")
    open_folder(folder, RECIPE, resume=False, device=CPU)
    assert not (folder / "tokenizer.json").exists()
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=r"already holds a run; go on with it: clearhead train --resume .*--out"):
        open_folder(folder, RECIPE, resume=False, device=CPU)


def test_folders_that_are_taken(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"file is a file; choose another folder with --out"):
        open_folder(tmp_path / "file", RECIPE, resume=False, device=CPU)
    with pytest.raises(InputError, match=r"is not empty and holds no run"):
        open_folder(tmp_path, RECIPE, resume=False, device=CPU)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(CheckpointError, match=r"can not be written to \(Not a directory\)"):
        open_folder(tmp_path / "file" / "run", RECIPE, resume=False, device=CPU)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"can not be written to \(Permission denied\)"):
        open_folder(tmp_path / "run", RECIPE, resume=False, device=CPU)


def test_no_run_to_resume(tmp_path: Path):
    with pytest.raises(InputError, match=r"holds no run: there is no recipe\.toml.*runs/"):
        read_run(tmp_path)
    (tmp_path / "recipe.toml").write_bytes(b"task = '\xff'")
    with pytest.raises(InputError, match=r"recipe\.toml can not be read.*utf-8"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.n_layers=5", r"goes on with the model it began with"),
        ("data.length=7", r"goes on with the data it began with"),
        ("train.seed=3", r"train\.seed=3, but the run began with 0; start a new one"),
        ("train.optimizer=muon", r"train\.optimizer='muon', but the run began with 'adamw'"),
        ("train.lora_rank=2", r"train\.lora_rank=2, but the run began with 0"),
    ],
)
def test_what_a_run_can_not_change(setting: str, words: str):
    with pytest.raises(ConfigError, match=words):
        check_resumable(RECIPE, RECIPE.with_set([setting]))


def test_the_next_folder(tmp_path: Path):
    assert next_folder("mask", tmp_path / "runs") == tmp_path / "runs" / "mask-1"
    for name in ("mask-2", "mask-10", "mask-old", "mask-²", "language-44"):
        (tmp_path / name).mkdir()
    assert next_folder("mask", tmp_path) == tmp_path / "mask-11"


def test_no_room_is_said_before_the_first_step(tmp_path: Path):
    check_space(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"GB free, but this run's checkpoints need 1000000000\.00 GB; make room"):
        check_space(tmp_path, 10**18)


def test_a_text_is_whole_or_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "a.txt"
    write_text(file, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        write_text(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
