"""A run that was stopped or killed and then resumed equals an uninterrupted one, bit for bit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clearhead.errors import CheckpointError, ConfigError, InputError
from clearhead.training import Recipe, train
from clearhead.training.schedules import stages
from training.tiny_runs import (
    ROOT,
    Watching,
    make_recipe,
    metrics,
    plain_environment,
    read_checkpoint,
    steps_kept,
    stop_and_resume,
    weights,
)


@pytest.mark.slow
def test_runs_killed_at_random_moments(tmp_path: Path) -> None:
    """20 runs, each killed once with SIGKILL: at a random time, or before a random change to the disk."""
    cadence: dict[str, Any] = dict(steps=14, log_every=2, evaluate_every=6, checkpoint_every=4, score_rows=0)
    (tmp_path / "tiny.toml").write_text(make_recipe("translate", tmp_path, **cadence).to_toml(), encoding="utf-8")
    ran = subprocess.run(
        [
            sys.executable,
            ROOT / "benchmarks" / "correctness" / "killed_runs.py",
            tmp_path / "tiny.toml",
            "--kills",
            "20",
            "--threads",
            "1",
        ],
        env=plain_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("20 of 20 killed runs ended as the one left alone\n")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to start others from."""
    folder = tmp_path_factory.mktemp("base")
    return train(make_recipe("language", folder), folder / "base").folder


# Every field that could leave something behind, a few at a time.
CHANGES: dict[str, dict[str, Any]] = {
    "adamw": dict(optimizer="adamw", accumulate=3, label_smoothing=0.1, clip=0.0, schedule="noam", lr=0.0),
    "muon": dict(optimizer="muon", checkpointing=True, schedule="wsd"),
    "normuon": dict(optimizer="muon", muon_beta2=0.9, muon_iteration="polar", cautious_decay=True),
    "mean": dict(
        precision="bfloat16", stream="bfloat16", average=2, checkpoint_every=3
    ),  # of checkpoints, without those of the stops
    "rows": dict(log_every=4, evaluate_every=5, accumulate=2),  # of metrics, each of several steps
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("task", ["language", "mask", "translate", "classify", "pictures"])
def test_stopped_and_resumed_is_left_alone(task: str, change: str, tmp_path: Path) -> None:
    recipe = make_recipe(task, tmp_path, **CHANGES[change])
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    train(recipe, alone)
    stops = (4,) if change == "rows" else (2, 5)  # rows are shown at logged steps, where these tests press Ctrl-C
    assert stop_and_resume(recipe, stopped, *stops).is_complete
    assert weights(alone) == weights(stopped)
    assert metrics(alone) == metrics(stopped)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["language", "mask"])
def test_growing_runs_resume(task: str, tmp_path: Path) -> None:
    """Stopped within a stage, at its end, and again in the last one; rows of metrics span two stages."""
    recipe = make_recipe(
        task, tmp_path, length=28, steps=9, batch_doublings=2, length_doublings=1, growth=0.7, log_every=2
    )
    assert [stage.first for stage in stages(recipe.train)] == [0, 3, 6]
    train(recipe, tmp_path / "alone")
    assert stop_and_resume(recipe, tmp_path / "stopped", 2, 6, 8).is_complete
    assert weights(tmp_path / "alone") == weights(tmp_path / "stopped")
    assert metrics(tmp_path / "alone") == metrics(tmp_path / "stopped")
    rows = [row for row in metrics(tmp_path / "alone") if row["kind"] == "train"]
    assert [row["tokens"] for row in rows] == [56, 140, 252, 476, 588]  # 1, 2 and 4 windows of 28 a step
    assert [row["progress"] for row in rows] == sorted(row["progress"] for row in rows)
    assert rows[-1]["progress"] == 1
    killed, often = tmp_path / "killed", replace(recipe, train=replace(recipe.train, checkpoint_every=3))
    train(often, killed)
    (killed / "checkpoints" / "step-00000009" / "state.json").unlink()
    show = Watching()
    train(often, killed, resume=True, show=show)
    assert show.began == 6
    assert weights(killed) == weights(tmp_path / "alone")


def test_checkpoints_between_two_logged_steps_lose_no_loss(tmp_path: Path) -> None:
    """The row at step 5 is about steps 1 to 5, also if the run was resumed from step 3."""
    recipe = make_recipe("language", tmp_path, steps=5, log_every=5, evaluate_every=5, checkpoint_every=3)
    train(recipe, tmp_path / "alone")
    train(recipe, tmp_path / "killed")
    (tmp_path / "killed" / "checkpoints" / "step-00000005" / "state.json").unlink()
    show = Watching()
    train(recipe, tmp_path / "killed", resume=True, show=show)
    assert show.began == 3
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_lora_resumes(optimizer: str, base: Path, tmp_path: Path) -> None:
    recipe = make_recipe("language", tmp_path, start=base, lora_rank=2, optimizer=optimizer, tokenizer="chars")
    train(recipe, tmp_path / "alone")
    stop_and_resume(recipe, tmp_path / "stopped", 4)
    assert weights(tmp_path / "alone") == weights(tmp_path / "stopped")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "alone"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("blocks." in name and name.endswith("weight") and "norm" not in name for name in changed)
    # A checkpoint holds what learns, and nothing of the rest.
    assert all("lora_" in name for name in read_checkpoint(tmp_path / "alone" / "checkpoints" / "step-00000006"))


def damage_byte(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def damage_length(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def remove_tensors(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    file.unlink()


def damage_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text('{"state": {"step', encoding="utf-8")


def change_state(checkpoint: Path) -> None:
    """One digit: JSON still, and every tensor whole."""
    file = checkpoint / "state.json"
    text = re.sub(r'("tokens": )(\d)', lambda found: f"{found[1]}{int(found[2]) ^ 1}", file.read_text(encoding="utf-8"))
    assert text != file.read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")


def remove_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", [damage_byte, damage_length, remove_tensors, damage_state, change_state, remove_state]
)
def test_a_damaged_checkpoint_is_passed_over(damage: Callable[[Path], None], tmp_path: Path) -> None:
    recipe = make_recipe("translate", tmp_path, keep="last")
    train(recipe, tmp_path / "alone")
    train(recipe, tmp_path / "hurt", show=Watching(stop=5))
    damage(tmp_path / "hurt" / "checkpoints" / "step-00000005")
    show = Watching()
    train(recipe, tmp_path / "hurt", resume=True, show=show)
    assert show.began == 3
    said = [note for note in show.notes if "step-00000005 is damaged" in note and "passed over" in note]
    assert len(said) == int(damage is not remove_state)  # without its state it is no checkpoint: a kill leaves such
    assert weights(tmp_path / "hurt") == weights(tmp_path / "alone")


def test_where_every_checkpoint_is_damaged_the_run_begins_anew(tmp_path: Path) -> None:
    recipe = make_recipe("language", tmp_path)
    train(recipe, tmp_path / "alone")
    train(recipe, tmp_path / "hurt", show=Watching(stop=5))
    for checkpoint in (tmp_path / "hurt" / "checkpoints").glob("step-*"):
        damage_byte(checkpoint)
    show = Watching()
    train(recipe, tmp_path / "hurt", resume=True, show=show)
    assert (show.began, len(show.notes)) == (0, 2)
    assert weights(tmp_path / "hurt") == weights(tmp_path / "alone")


def test_a_damaged_best_is_not_the_result(tmp_path: Path) -> None:
    recipe = make_recipe(
        "language", tmp_path, best="accuracy", lr=1e-9, warmup=0
    )  # accuracy stays: the first is the best
    train(recipe, tmp_path / "x")
    damage_byte(tmp_path / "x" / "checkpoints" / "step-00000003")
    show = Watching()
    train(recipe, tmp_path / "x", resume=True, show=show)
    assert any("step-00000003 is damaged" in note for note in show.notes)


def test_the_last_two_and_the_best_are_kept(tmp_path: Path) -> None:
    recipe = make_recipe("language", tmp_path, steps=13, checkpoint_every=3, evaluate_every=2, best="accuracy", lr=1e-9)
    train(recipe, tmp_path / "x")
    assert steps_kept(tmp_path / "x") == [2, 12, 13]
    state = json.loads((tmp_path / "x" / "checkpoints" / "step-00000013" / "state.json").read_text())["state"]
    assert (state["step"], state["best_step"], state["misses"]) == (13, 2, 6)
    assert not list((tmp_path / "x" / "checkpoints").glob(".*"))


def test_the_mean_of_the_last_checkpoints(tmp_path: Path) -> None:
    recipe = make_recipe("language", tmp_path, steps=11, checkpoint_every=2, evaluate_every=20, average=3, lr=0.1)
    result = train(recipe, tmp_path / "x", show=(show := Watching()))
    assert steps_kept(tmp_path / "x") == [8, 10, 11]
    assert "the result is the mean of the last 3 checkpoints" in show.notes
    kept = [read_checkpoint(folder) for folder in (tmp_path / "x" / "checkpoints").glob("step-*")]
    saved = load_file(result.folder / "model.safetensors")
    name = "tokens.weight"
    mean = torch.stack([tensors[f"model.{name}"] for tensors in kept]).double().mean(0)
    assert torch.equal(saved[name], mean.float())


def test_a_finished_run_may_be_resumed(tmp_path: Path) -> None:
    recipe = make_recipe("translate", tmp_path)
    train(recipe, tmp_path / "x")
    files = {path: path.read_bytes() for path in (tmp_path / "x").iterdir() if path.suffix in (".safetensors", ".json")}
    rows = metrics(tmp_path / "x")
    assert train(recipe, tmp_path / "x", resume=True).is_complete
    assert metrics(tmp_path / "x") == rows
    assert all(path.read_bytes() == content for path, content in files.items() if path.name != "environment.json")


def test_more_steps(tmp_path: Path) -> None:
    """With a learning rate that does not depend on the number of steps, 3 steps resumed to 6 equal 6 steps."""
    short = make_recipe("mask", tmp_path, schedule="constant", steps=3)
    long = replace(short, train=replace(short.train, steps=6))
    train(short, tmp_path / "x")
    train(long, tmp_path / "x", resume=True)
    train(long, tmp_path / "y")
    assert weights(tmp_path / "x") == weights(tmp_path / "y")
    # The progress of a row is the share of the steps that its process was to make.
    resumed, whole = ([{**row, "progress": 0} for row in metrics(tmp_path / name)] for name in "xy")
    assert resumed == whole


def with_model(recipe: Recipe, **fields: Any) -> Recipe:
    return replace(recipe, model={**recipe.model, **fields})


def with_train(recipe: Recipe, **fields: Any) -> Recipe:
    return replace(recipe, train=replace(recipe.train, **fields))


def test_another_run_under_the_same_name_is_refused(tmp_path: Path) -> None:
    recipe = make_recipe("language", tmp_path, steps=2)
    train(recipe, tmp_path / "x")
    before = weights(tmp_path / "x")
    changed: dict[str, Recipe] = {
        "the model it began with": with_model(recipe, d_ff=17),
        "the data it began with": replace(recipe, data=replace(recipe.data, length=23)),
        "the task it began with": replace(recipe, task="mask"),
        "train.optimizer='muon', but the run began with 'adamw'": with_train(recipe, optimizer="muon"),
        "train.seed=7": with_train(recipe, seed=7),
    }
    for words, other in changed.items():
        with pytest.raises(ConfigError, match="start a new one") as error:
            train(other, tmp_path / "x", resume=True)
        assert words in str(error.value)
    with pytest.raises(InputError, match=r"already holds a run; go on with it: clearhead train --resume"):
        train(recipe, tmp_path / "x")
    with pytest.raises(InputError, match=r"holds no run: there is no recipe\.toml"):
        train(recipe, tmp_path / "nothing", resume=True)
    assert weights(tmp_path / "x") == before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    recipe = make_recipe("language", tmp_path)
    with pytest.raises(InputError, match=r"not empty and holds no run; choose another folder with out=FOLDER"):
        train(recipe, tmp_path)
    with pytest.raises(InputError, match="is a file"):
        train(recipe, tmp_path / "a.txt")


def test_a_checkpoint_of_another_shape_does_not_fit(tmp_path: Path) -> None:
    recipe = make_recipe("language", tmp_path, steps=2)
    train(recipe, tmp_path / "x")
    file = tmp_path / "x" / "recipe.toml"
    file.write_text(file.read_text(encoding="utf-8").replace("d_ff = 13", "d_ff = 17"), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"does not fit this run .* resume with the recipe it was written by"):
        train(with_model(recipe, d_ff=17), tmp_path / "x", resume=True)
