"""Sizes and steps of a first run, from a speed and a size of data that the tests choose."""

from __future__ import annotations

import gzip
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import clearhead as ch
from clearhead.costs.forecast import cost
from clearhead.errors import ConfigError
from clearhead.training import Recipe, find_recipe, sizing
from clearhead.training.initialization import guess_config
from clearhead.training.schedules import mean_batch
from clearhead.training.sizing import MINUTES, MOST_EPOCHS, count_tokens, explain_fit, fit, fit_to_machine
from training.tiny_runs import write_pictures

LAPTOP, DESKTOP = 15e9, 300e9  # FLOP/s in training
SHAKESPEARE = 320_000.0  # tokens
TASKS = ["language", "mask", "translate", "classify", "pictures"]


def minutes_of(recipe: Recipe, rate: float) -> float:
    """The time of all steps, counted anew: whole batches of whole rows."""
    config, t = guess_config(recipe), recipe.train
    length = config.max_len if config.inputs == "patches" else recipe.data.length
    rows = t.batch_tokens // length // (2 if config.shape == "encoder-decoder" else 1)
    given: dict[str, Any] = {} if config.inputs == "patches" else {"length": length}
    return t.steps * cost(config, batch=rows, mode="train", **given).useful_flops / rate / 60


@pytest.mark.parametrize("minutes", [0.2, 0.4, 0.8])
def test_a_few_steps_are_not_each_followed_by_an_evaluation(minutes: float) -> None:
    t = fit(find_recipe("translate"), (), 4e9, SHAKESPEARE, minutes).train
    assert 1 < t.steps < 100
    assert t.steps / t.evaluate_every <= 10


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("rate", [4e9, LAPTOP, 100e9, DESKTOP])
def test_a_first_run_ends_in_minutes(name: str, rate: float) -> None:
    """Whatever the machine: at most the minutes asked for, and not for nothing."""
    recipe = fit(find_recipe(name), (), rate, SHAKESPEARE, MINUTES)
    assert 0.2 < minutes_of(recipe, rate) <= MINUTES
    assert recipe.train.steps >= 100
    assert recipe.train.evaluate_every * 10 <= recipe.train.steps
    assert recipe.train.warmup <= recipe.train.steps // 10
    assert recipe.model.get("n_decoder_layers", 0) in (0, recipe.model["n_layers"])


@pytest.mark.parametrize("rate", [4e9, LAPTOP, DESKTOP])
def test_a_growing_batch_gets_more_steps_for_its_minutes(rate: float) -> None:
    """Steps that are smaller at first: as many tokens as without. A batch is not made smaller than its first window allows."""
    shipped = find_recipe("language")
    plain, growing = (
        fit(shipped.with_set([f"train.batch_doublings={n}"]), (), rate, SHAKESPEARE, MINUTES) for n in (0, 3)
    )
    assert growing.model == plain.model
    t = growing.train
    assert t.batch_tokens >> 3 >= growing.data.length
    tokens = t.steps * t.batch_tokens * mean_batch(t)
    # Two digits of steps are kept.
    assert tokens == pytest.approx(plain.train.steps * plain.train.batch_tokens, rel=0.1)
    said = explain_fit(shipped, growing, rate, SHAKESPEARE, MINUTES)
    assert f"{t.steps:,} steps of {t.batch_tokens // 8:,} to {t.batch_tokens:,} tokens" in said


def test_the_recipe_as_shipped_took_hours() -> None:
    assert minutes_of(find_recipe("language"), LAPTOP) > 20 * 60


def test_a_faster_machine_and_more_minutes_train_a_larger_model() -> None:
    shipped = find_recipe("language")
    slow, fast, long = (
        fit(shipped, (), rate, 1e9, minutes) for rate, minutes in ((LAPTOP, 8.0), (DESKTOP, 8.0), (DESKTOP, 800.0))
    )
    widths = [recipe.model["d_model"] for recipe in (slow, fast, long)]
    assert widths == sorted(widths)
    assert len(set(widths)) == 3
    assert long == shipped.with_set(["train.length_doublings=2"])  # never more than the recipe


def test_little_data_is_not_seen_for_ever() -> None:
    recipe = fit(find_recipe("language"), (), 1e15, 50_000.0, MINUTES)
    assert recipe.train.steps * recipe.train.batch_tokens <= MOST_EPOCHS * 50_000


@pytest.mark.parametrize(
    "setting",
    [
        "train.steps=1999",
        "train.batch_tokens=8191",
        "train.length_doublings=0",
        "model.d_model=128",
        "train.evaluate_every=7",
        "train.warmup=49",
    ],
)
def test_what_the_user_sets_stays(setting: str) -> None:
    name = setting.partition("=")[0]
    recipe = find_recipe("language").with_set([setting] + (["model.n_heads=4"] if "d_model" in setting else []))
    fitted = fit(recipe, {name}, LAPTOP, SHAKESPEARE, MINUTES)
    assert fitted != recipe  # the rest is chosen
    part, _, field = name.partition(".")
    assert fitted.tables()[part][field] == recipe.tables()[part][field]


def test_a_preset_is_a_size_of_the_users() -> None:
    recipe = find_recipe("language").with_set(["model.preset=gpt2"])
    fitted = fit(recipe, {"model.preset"}, LAPTOP, SHAKESPEARE, MINUTES)
    assert fitted.model == recipe.model
    assert fitted.train.steps < recipe.train.steps


def test_why_is_said_and_how_to_ask_for_more() -> None:
    recipe = find_recipe("language")
    fitted = fit(recipe, (), LAPTOP, SHAKESPEARE, MINUTES)
    text = explain_fit(recipe, fitted, LAPTOP, SHAKESPEARE, MINUTES)
    for words in (
        "15.0 GFLOP/s",
        "320,000 tokens",
        f"width {fitted.model['d_model']}",
        f"{fitted.train.steps:,} steps",
        "--minutes 80",
    ):
        assert words in text
    assert explain_fit(recipe, recipe, LAPTOP, SHAKESPEARE, MINUTES) == ""


@pytest.mark.parametrize(
    ("task", "changes", "wanted"),
    [
        ("language", [], 2),
        ("code", [], 2),
        ("language", ["data.length=64"], 2),
        ("language", ["data.length=60"], 0),  # 15 tokens would be too short
        ("language", ["data.length=250"], 0),  # no quarter of it
        ("language", ["model.positions=learned"], 0),
        ("language", ["model.preset=gpt2"], 0),
        ("mask", [], 0),
        ("translate", [], 0),
    ],
)
def test_a_new_language_model_starts_with_short_windows(task: str, changes: list[str], wanted: int) -> None:
    recipe = find_recipe(task).with_set(changes)
    fitted = fit(recipe, {"data.length"}, LAPTOP, SHAKESPEARE, MINUTES)
    assert fitted.train.length_doublings == wanted
    said, length = explain_fit(recipe, fitted, LAPTOP, SHAKESPEARE, MINUTES), recipe.data.length
    assert (f" tokens in windows of {length // 4} to {length}, about " in said) == (wanted > 0)


def test_a_language_model_that_was_trained_goes_on_with_long_windows(tmp_path: Path) -> None:
    ch.save(ch.build(ch.preset("gpt2", n_layers=1, d_model=8, n_heads=2, vocab_size=31, max_len=64)), tmp_path / "x")
    recipe = replace(find_recipe("language").with_set(["data.length=64"]), model={"from": str(tmp_path / "x")})
    assert fit(recipe, (), LAPTOP, SHAKESPEARE, MINUTES).train.length_doublings == 0


def test_data_is_counted_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 3500)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"x" * 99))
    recipe = find_recipe("language").with_files(files=[str(tmp_path / "a.txt")])
    assert count_tokens(recipe) == 1000
    assert count_tokens(recipe.with_set(["data.tokenizer=chars"])) == 3500
    both = recipe.with_files(files=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt.gz")])
    assert count_tokens(both) > 1000
    assert count_tokens(replace(recipe, data=replace(recipe.data, files=("hf:a/b",)))) == math.inf
    assert count_tokens(find_recipe("code")) == math.inf
    pictures = find_recipe("pictures").with_files(files=[write_pictures(tmp_path)])
    assert count_tokens(pictures) == 14 * guess_config(pictures).max_len


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed is measured once, and only if something is left to choose."""
    (tmp_path / "a.txt").write_bytes(b"x" * 1_000_000)
    recipe = find_recipe("language").with_files(files=[str(tmp_path / "a.txt")])
    monkeypatch.setattr(sizing, "measure_rate", lambda: LAPTOP)
    fitted, why = fit_to_machine(recipe, (), None)
    assert fitted == fit(recipe, (), LAPTOP, 1_000_000 / 3.5, MINUTES)
    assert why
    monkeypatch.setattr(sizing, "measure_rate", lambda: pytest.fail("measured"))
    everything = {"train.steps", "train.batch_tokens", "model.d_model"}
    assert fit_to_machine(recipe, everything, None) == (recipe, "")
    with pytest.raises(ConfigError, match=r"--minutes 5 has nothing to choose: .*are set; leave one out"):
        fit_to_machine(recipe, everything, 5.0)


def test_on_a_gpu_the_recipe_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(sizing, "choose_device", lambda name: torch.device("cuda"))
    recipe = find_recipe("language")
    assert fit_to_machine(recipe, (), None) == (recipe, "")
    with pytest.raises(ConfigError, match=r"--minutes 5 is for a CPU; got the device 'cuda'"):
        fit_to_machine(recipe, (), 5.0)


@pytest.mark.slow
def test_a_rate_is_measured() -> None:
    assert 1e7 < sizing.measure_rate() < 1e14
