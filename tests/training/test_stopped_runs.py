"""A run that goes on or was stopped is a model: its newest whole checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.errors import CheckpointError
from clearhead.training import train
from training.tiny_runs import Watching, command, make_recipe, read_checkpoint, write_table, write_text

NOT_FINISHED = r"is not finished: this is its model after step 4"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    return train(make_recipe("language", folder), folder / "run", show=Watching(4)).folder


@pytest.mark.slow
@pytest.mark.parametrize("task", ["language", "mask", "translate", "classify", "pictures"])
def test_a_stopped_run_loads(task: str, tmp_path: Path) -> None:
    """Its weights are the checkpoint's; a run that is complete at this step has the same."""
    recipe = make_recipe(task, tmp_path)
    out = train(recipe, tmp_path / "run", show=Watching(4)).folder
    with pytest.warns(UserWarning, match=NOT_FINISHED):
        model = ch.load(out)
    stored = read_checkpoint(out / "checkpoints" / "step-00000004")
    learnt = {
        f"model.{name}": parameter for name, parameter in model.named_parameters() if not name.startswith("pool.")
    }
    assert all(torch.equal(parameter, stored[name]) for name, parameter in learnt.items())
    assert not model.training
    named = ch.load(out / "checkpoints" / "step-00000004")  # a step that the user names needs no warning
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), named.parameters(), strict=True))
    whole = train(recipe, out, resume=True).folder
    again = ch.load(whole)
    assert (again.config, again.generation) == (model.config, model.generation)
    if task == "pictures":
        assert (out / "preprocessor_config.json").is_file()


def test_a_damaged_checkpoint_is_passed_over(stopped: Path, tmp_path: Path) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    (file,) = (run / "checkpoints" / "step-00000004").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.warns(UserWarning, match="after step 3"):
        ch.load(run)
    with pytest.raises(CheckpointError, match=r"step-00000004 can not be read as a model .*checksum.*--resume"):
        ch.load(run / "checkpoints" / "step-00000004")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match=r"no result and no whole checkpoint yet; .*clearhead train --resume"):
        ch.load(run)


@pytest.mark.parametrize("task", ["language", "classify"])
def test_a_stopped_lora_run_is_its_start_and_the_additions(task: str, tmp_path: Path) -> None:
    """As a run that ends at this step writes it, bit for bit."""
    base = train(make_recipe("mask" if task == "classify" else task, tmp_path), tmp_path / "base").folder
    settings: dict[str, Any] = dict(start=base, lora_rank=2, lora_alpha=3.0, schedule="constant", keep="last", lr=0.1)
    out = train(make_recipe(task, tmp_path, **settings), tmp_path / "run", show=Watching(4)).folder
    with pytest.warns(UserWarning, match=NOT_FINISHED):
        model = ch.load(out)
    whole = ch.load(train(make_recipe(task, tmp_path, **settings, steps=4), tmp_path / "whole").folder)
    assert model.config == whole.config
    ours, theirs = model.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    start = ch.load(base).state_dict()
    assert any(not torch.equal(ours[name], start[name]) for name in ours if "attention" in name)


def test_a_stopped_lora_run_whose_start_is_gone(tmp_path: Path) -> None:
    base = train(make_recipe("language", tmp_path), tmp_path / "base").folder
    out = train(make_recipe("language", tmp_path, start=base, lora_rank=2), tmp_path / "run", show=Watching(4)).folder
    shutil.rmtree(base)
    with pytest.raises(
        CheckpointError, match=r"LoRA's additions, and the model they belong to can not be made .*base.*--resume"
    ):
        ch.load(out)


@pytest.mark.slow
def test_commands_take_a_stopped_run_and_say_its_step(stopped: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path)
    for arguments in (
        ["generate", stopped, "line", "--max-new-tokens", "3", "--device", "cpu"],
        ["evaluate", stopped, text, "--json", "--device", "cpu"],
        ["explore", stopped, "line", "--export", tmp_path / "page.html", "--device", "cpu"],
    ):
        ran = command(*arguments)
        assert ran.returncode == 0, ran.stderr
        assert ran.stderr.count("is not finished: this is its model after step 4") == 1, ran.stderr
    out = train(make_recipe("classify", tmp_path), tmp_path / "classes", show=Watching(4)).folder
    ran = command("evaluate", out, write_table(tmp_path), "--json", "--device", "cpu")
    assert "accuracy" in json.loads(ran.stdout), ran.stderr


def test_a_server_takes_a_stopped_run(stopped: Path) -> None:
    from clearhead.serving.model_worker import load_worker

    with pytest.warns(UserWarning, match=NOT_FINISHED):
        worker = load_worker(stopped, "run", device="cpu")
    assert worker.tokenizer is not None
