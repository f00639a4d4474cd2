"""The folder of a run: opened, refused, read again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from clearhead.errors import CheckpointError, ConfigError, InputError
from clearhead.training.recipe import Recipe
from clearhead.training.run_folder import (
    check_resumable,
    check_space,
    environment,
    next_folder,
    open_folder,
    read_run,
    write_text,
)

CPU = torch.device("cpu")
RECIPE = Recipe(task="language", model={"labels": ("a", "b"), "n_layers": 3})


def test_a_folder_is_opened_and_read_again(tmp_path: Path):
    folder = tmp_path / "runs" / "language-1"
    open_folder(folder, RECIPE, resume=False, device=CPU)
    found = read_run(folder)
    check_resumable(found, RECIPE)
    check_resumable(found, found.with_set(["train.steps=3", "train.lr=0.1"]))
    facts = json.loads((folder / "environment.json").read_text("utf-8"))
    assert facts["device"] == "cpu"
    assert {"torch", "python", "clearhead", "started", "threads"} <= facts.keys()
    assert facts.keys() == environment(CPU).keys()
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
