"""What `auto` means: by rules about a device that is only described, and in runs on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clearhead.training import Recipe, auto_settings, train
from clearhead.training.auto_settings import (
    FIRST_GUESS,
    SAVED,
    CompileTimes,
    Machine,
    choose_compile,
    choose_stream,
    explain,
    keep_decided,
)
from clearhead.training.recipe import Train
from training.tiny_runs import Watching, make_recipe, metrics, stop_and_resume, weights

GPU = Machine("cuda", "a GPU", has_fp8=True)
STEP = 0.08  # seconds


def test_it_compiles_where_that_pays_back() -> None:
    """40 s are saved by 40 / (0.15 x 0.08) = 3,333 steps."""
    even = round(40 / (SAVED * STEP))
    for steps, compiled in ((even - 10, False), (even + 10, True)):
        chosen, why = choose_compile(Train(steps=steps), GPU, STEP, 40.0)
        assert chosen is compiled
        assert "takes about 40 s and saves about 40 s" in why
    assert choose_compile(Train(steps=even // 2), GPU, STEP, 10.0)[0]  # its code is kept from an earlier run


@pytest.mark.parametrize(
    ("fields", "machine", "reason"),
    [
        ({}, Machine("cpu"), "no faster on a CPU"),
        ({}, Machine("mps"), "CUDA"),
        ({}, replace(GPU, has_triton=False), "triton"),
        ({}, replace(GPU, world_size=2), "several processes"),
        (dict(deterministic=True), GPU, "deterministic"),
        (dict(checkpointing=True), GPU, "checkpointing"),
        (dict(lora_rank=4), GPU, "LoRA"),
    ],
)
def test_where_it_never_does(fields: dict[str, Any], machine: Machine, reason: str) -> None:
    chosen, why = choose_compile(Train(steps=10**6, **fields), machine, STEP, 40.0)
    assert not chosen
    assert reason in why
    assert reason in explain(Train(), Train(compile=False), machine, why)


@pytest.mark.parametrize("machine", [GPU, Machine("cpu")])
@pytest.mark.parametrize("value", [True, False])
def test_what_is_set_stays(machine: Machine, value: bool) -> None:
    assert choose_compile(Train(steps=1, compile=value), machine, STEP, 1e9) == (value, "")
    assert "auto" not in explain(
        Train(compile=value, stream="float32"), Train(compile=value, stream="float32"), machine, ""
    )
    for stream in ("float32", "bfloat16"):
        assert choose_stream(Train(stream=stream), machine, compiled=value, bfloat16=True) == stream  # type: ignore[arg-type]


def test_the_stream() -> None:
    for machine, compiled, bfloat16, expected in (
        (GPU, True, True, "bfloat16"),
        (GPU, False, True, "float32"),
        (GPU, True, False, "float32"),
        (Machine("cpu"), True, True, "float32"),
    ):
        assert choose_stream(Train(), machine, compiled=compiled, bfloat16=bfloat16) == expected


def test_what_is_said() -> None:
    said = explain(Train(), Train(compile=True, stream="bfloat16"), GPU, "it pays")
    assert (
        said
        == "compiled (auto: it pays); residual stream in bfloat16 (auto); products in 8 bits are faster: train.precision=fp8"
    )
    assert "fp8" not in explain(Train(), Train(compile=True, precision="fp8"), GPU, "")
    assert "fp8" not in explain(Train(), Train(compile=True), replace(GPU, has_fp8=False), "")
    assert "fp8" not in explain(Train(), Train(compile=True), replace(GPU, world_size=2), "")  # it would be refused
    assert "fp8" not in explain(Train(), Train(compile=True, lora_rank=2), GPU, "")


def test_times_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    one, other = (CompileTimes(GPU, {"width": width}) for width in (7, 11))
    assert one.forecast() == FIRST_GUESS
    one.keep(23.04)
    assert (one.forecast(), other.forecast()) == (23.0, 23.0)  # nothing better is known of the other
    other.keep(51.0)
    one.keep(9.0)  # the second start found its code
    assert (one.forecast(), CompileTimes(GPU, {"width": 13}).forecast()) == (9.0, 51.0)
    assert CompileTimes(replace(GPU, name="another"), {"width": 7}).forecast() == FIRST_GUESS
    for broken in ("", "[1]", '{"a": 3}', "\xff"):
        one.file.write_text(broken, encoding="latin-1")
        assert one.forecast() == FIRST_GUESS
    one.keep(5.0)
    assert one.forecast() == 5.0


def test_a_cache_folder_that_can_not_be_written_to_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "file" / "cache"))
    times = CompileTimes(GPU, {})
    times.keep(5.0)
    assert times.forecast() == FIRST_GUESS


def test_a_run_says_and_keeps_what_was_decided(tmp_path: Path) -> None:
    recipe = make_recipe("language", tmp_path)
    assert (recipe.train.compile, recipe.train.stream) == ("auto", "auto")
    result = train(recipe, tmp_path / "x", show=(show := Watching()))
    assert show.summary["speed"] == "not compiled (auto: compiling was no faster on a CPU)"
    kept = Recipe.read((tmp_path / "x" / "recipe.toml").read_text("utf-8")).train
    assert (kept.compile, kept.stream) == (False, "float32")
    rows = [json.loads(line) for line in (tmp_path / "x" / "metrics.jsonl").read_text("utf-8").splitlines()]
    (speed,) = (row for row in rows if row["kind"] == "speed")
    assert speed == result.speed
    assert speed["step"] == 6
    assert "Not readable" not in (tmp_path / "x" / "report.html").read_text("utf-8")
    assert speed["tokens_per_second"] > 0
    assert speed["first_step_seconds"] > 0
    assert speed["training_seconds"] * speed["tokens_per_second"] == pytest.approx(
        max(row.get("tokens", 0) for row in rows)
    )


def test_a_resumed_run_does_not_decide_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the rules would now say something else, and where the recipe that is given still says auto."""
    recipe = make_recipe("language", tmp_path)
    train(recipe, tmp_path / "whole")
    monkeypatch.setattr("clearhead.training.trainer.choose_compile", lambda t, *_: (t.compile, ""))
    decided = replace(recipe, train=replace(recipe.train, compile=False))
    stop_and_resume(decided, tmp_path / "parts", 2)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    before = Train(compile=True, stream="float32")
    assert keep_decided(Train(), before) == before
    assert keep_decided(Train(compile=False, stream="bfloat16"), before) == Train(compile=False, stream="bfloat16")
    assert auto_settings.keep_decided(Train(steps=7), before).steps == 7
