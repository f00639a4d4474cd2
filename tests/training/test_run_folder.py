"""The folder of a run: opened, refused, read again."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.checkpoint import load
from clearhead.checkpoint.durable_files import stage, write_text
from clearhead.errors import CheckpointError, ConfigError, InputError
from clearhead.training import train
from clearhead.training.distributed import Processes
from clearhead.training.metrics_log import MetricsLog
from clearhead.training.recipe import Recipe
from clearhead.training.run_folder import (
    check_resumable,
    check_space,
    environment,
    next_folder,
    open_folder,
    read_run,
    run_lock,
)
from training.tiny_runs import Watching, make_recipe, plain_environment

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
    with pytest.raises(InputError, match=r"already holds a run; go on with it: clearhead train --resume .*out=FOLDER"):
        open_folder(folder, RECIPE, resume=False, device=CPU)


def test_folders_that_are_taken(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"file is a file; choose another folder with out=FOLDER"):
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
        ("train.lora_rank=2", r"train\.lora_rank=2 without model\.from"),
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


def plant(folder: Path, names: list[str], victim: Path) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)


def test_a_planted_link_is_not_followed(tmp_path: Path):
    """A run folder from a stranger: links where files are written would overwrite another file with a recipe's text."""
    folder, victim = tmp_path / "run", tmp_path / "bashrc"
    victim.write_text("mine")
    open_folder(folder, RECIPE, resume=False, device=CPU)
    old_names = [".recipe.toml.tmp", ".environment.json.tmp", "metrics.tmp", ".lock"]
    plant(folder, [*old_names, "environment.json", "metrics.jsonl"], victim)
    with run_lock(folder, Processes(device=CPU)):
        open_folder(folder, RECIPE, resume=True, device=CPU)
    MetricsLog(folder, step=3, tensorboard=False).write({"step": 4, "kind": "train"})
    assert victim.read_text() == "mine"
    assert not (folder / "environment.json").is_symlink()
    assert json.loads((folder / "metrics.jsonl").read_text()) == {"step": 4, "kind": "train"}
    plant(folder, ["metrics.jsonl"], tmp_path / "not there yet")
    log = MetricsLog(folder, step=3, tensorboard=False)
    plant(folder, ["metrics.jsonl"], victim)  # while the run goes on
    with pytest.raises(OSError, match="symbolic link"):
        log.write({"step": 4, "kind": "train"})
    assert victim.read_text() == "mine"
    assert not (tmp_path / "not there yet").exists()


def test_temporary_names_can_not_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    used: list[str] = []

    def note(a: Path, b: Path) -> None:
        used.append(a.name)
        a.rename(b)

    monkeypatch.setattr("os.replace", note)
    for _ in range(2):
        write_text(tmp_path / "a", "text")
    assert len(set(used)) == 2
    assert all(len(name) > 16 for name in used)


HOLDER = """
import sys, time
from pathlib import Path
import torch
from clearhead.training.distributed import Processes
from clearhead.training.run_folder import run_lock
with run_lock(Path(sys.argv[1]), Processes(device=torch.device("cpu"))):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.mark.slow
def test_a_folder_in_which_another_process_trains_is_refused(tmp_path: Path):
    recipe = make_recipe("language", tmp_path)
    out = train(recipe, tmp_path / "run", show=Watching(3)).folder
    before = {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out)], stdout=subprocess.PIPE, text=True, env=plain_environment()
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=r"run is in use: another process trains in it now; wait .*out=FOLDER"):
            train(recipe, out, resume=True)
        assert {f.name: f.read_bytes() for f in out.iterdir() if f.is_file() and f.name != ".lock"} == before
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert train(recipe, out, resume=True).is_complete  # the lock went with its process
    assert not (out / ".lock").exists()


def test_what_kills_left_in_a_run_is_swept_at_the_next_start(tmp_path: Path):
    open_folder(tmp_path / "run", RECIPE, resume=False, device=CPU)
    (tmp_path / "run" / ".save-dead").mkdir()
    (tmp_path / "run" / ".recipe.toml.0123456789abcdef.tmp").write_text("half")
    with stage(tmp_path / "run", ".save-") as running:
        open_folder(tmp_path / "run", RECIPE, resume=True, device=CPU)
        assert [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == [running]


def test_a_run_goes_into_a_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing is renamed across the border of the run's folder."""
    out = tmp_path / "mount"
    out.mkdir()
    for name in ("replace", "rename", "link"):
        plain = getattr(os, name)

        def inside(a: Any, b: Any, *, plain: Any = plain, **more: Any) -> None:
            if Path(a).is_relative_to(out) != Path(b).is_relative_to(out):
                raise OSError(errno.EXDEV, "Invalid cross-device link")
            plain(a, b, **more)

        monkeypatch.setattr(os, name, inside)
    assert train(make_recipe("language", tmp_path), out).is_complete
    load(out)
