"""Several processes, started by torchrun, compute what one process computes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clearhead.training import Recipe, train
from training.tiny_runs import (
    Watching,
    command,
    make_recipe,
    metrics,
    plain_environment,
    steps_kept,
    torchrun,
)

# float32: gradients are summed over other parts of the batch, in another order (about 1e-7 each). AdamW divides each by its own
# size and Muon by its singular values, so that the smallest are what differs most after some steps.
LOSSES, WEIGHTS = 1e-6, 1e-5


def write_recipe(task: str, folder: Path, **changes: Any) -> Recipe:
    """A tiny recipe without dropout, which each process draws for itself."""
    model: dict[str, Any] = dict(dropout=0.0, bias=False)
    recipe = make_recipe(task, folder, model=model, schedule="constant", keep="last", **changes)
    (folder / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    return recipe


def assert_same_run(many: Path, one: Path) -> None:
    """The same lines of metrics, the same weights, within rounding."""
    for got, want in zip(metrics(many), metrics(one), strict=True):
        assert got.keys() == want.keys()
        assert {name: got[name] for name in ("step", "kind")} == {name: want[name] for name in ("step", "kind")}
        for name in {"loss", "grad_norm", "tokens", "epoch"} & want.keys():
            assert got[name] == pytest.approx(want[name], rel=LOSSES)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (many, one))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=WEIGHTS)


def assert_one_speaks(text: str) -> None:
    """Every line of the run is printed once."""
    for words in ("result, on held-out data", "parameters", "step 6: loss", "report  "):
        assert text.count(words) == 1, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "parallel", "changes"),
    [
        ("translate", "ddp", dict(optimizer="adamw", accumulate=3, best="exact")),
        ("language", "ddp", dict(optimizer="muon", muon_iteration="polar", cautious_decay=True)),
        (  # two processes and two parts, but one window a step at first
            "language",
            "ddp",
            dict(optimizer="adamw", accumulate=2, length=28, batch_doublings=2, length_doublings=1),
        ),
        (
            "translate",
            "fsdp",
            dict(optimizer="muon", accumulate=2, checkpointing=True, average=2, checkpoint_every=2)
            | dict(muon_beta2=0.9, cautious_decay=True),
        ),
    ],
)
def test_two_processes_are_one(task: str, parallel: str, changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = write_recipe(task, tmp_path, parallel=parallel, **changes)
    train(recipe, tmp_path / "one")
    ran = command("train", "recipe.toml", processes=2, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert_one_speaks(ran.stdout)
    assert f"2 processes ({parallel})" in ran.stdout
    assert_same_run(tmp_path / "runs" / f"{task}-1", tmp_path / "one")  # all chose the same folder


@pytest.mark.slow
def test_four_processes_stopped_and_resumed_in_one(tmp_path: Path) -> None:
    recipe = write_recipe("language", tmp_path, parallel="fsdp", optimizer="adamw", steps=60, evaluate_every=60)
    train(recipe, tmp_path / "one")
    running = subprocess.Popen(
        [*torchrun(4), "train", "recipe.toml", "--out", "four"],
        cwd=tmp_path,
        env=plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert running.stdout is not None
    with running.stdout as lines:
        for line in lines:
            if line.startswith("step 4:"):
                os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to torchrun and to all of them
                break
        rest = lines.read()
    running.wait(timeout=60)
    (stopped,) = re.findall(r"stopped after step (\d+); everything is saved", rest)
    assert rest.count("clearhead train --resume four") == 1
    assert steps_kept(tmp_path / "four")[-1] == int(stopped) < 60
    assert len(list((tmp_path / "four" / "checkpoints" / f"step-{int(stopped):08}").glob("*.safetensors"))) == 4
    train(recipe, tmp_path / "four", resume=True, show=(show := Watching()))
    assert show.began == int(stopped)
    assert_same_run(tmp_path / "four", tmp_path / "one")


@pytest.mark.slow
def test_one_process_stopped_and_resumed_in_four(tmp_path: Path) -> None:
    recipe = write_recipe("translate", tmp_path, optimizer="muon")
    train(recipe, tmp_path / "one")
    train(recipe, tmp_path / "x", show=Watching(stop=2))
    ran = command("train", "--resume", tmp_path / "x", processes=4, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "going on from step 2" in ran.stdout
    assert_one_speaks(ran.stdout)
    assert_same_run(tmp_path / "x", tmp_path / "one")


@pytest.mark.slow
def test_what_one_process_can_not_do_ends_all(tmp_path: Path) -> None:
    """The first process prints the error; the others print that another one failed. (torchrun adds its own report.)"""
    write_recipe("language", tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.txt").write_text("mine\n")
    ran = command("train", "recipe.toml", "--out", "x", processes=2, cwd=tmp_path)
    assert ran.returncode == 1
    lines = [line for line in ran.stderr.splitlines() if line.startswith(("clearhead: ", "[rank"))]
    assert "clearhead: x is not empty and holds no run; choose another folder with --out FOLDER" in lines
    assert all("process 1 of 2 ends because another failed" in line for line in lines if "x is not" not in line)
