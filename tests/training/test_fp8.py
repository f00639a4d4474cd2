"""`train.precision = "fp8"`: whole runs, on a CPU by Triton's interpreter; and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.errors import ConfigError
from clearhead.quantization import float8 as fp8
from clearhead.training import Recipe, train
from clearhead.training.distributed import Processes
from clearhead.training.loop import check_fp8
from tests.triton_interpreter import DEVICE, need_triton
from training.tiny_runs import Watching, make_recipe, metrics, stop_and_resume, weights

SIZES = dict(d_model=16, n_heads=2, d_ff=32, dropout=0.0)


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    need_triton()
    if DEVICE == "cpu":
        monkeypatch.setattr(fp8, "check_device", lambda _: None)


def recipe(folder: Path, **changes: object) -> Recipe:
    options = dict(precision="fp8", stream="bfloat16", batch_tokens=58, device=DEVICE, model=SIZES) | changes
    return make_recipe("language", folder, **options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("on_any_device")
def test_a_run_is_near_one_in_16_bits_and_no_copy_of_it(tmp_path: Path) -> None:
    train(recipe(tmp_path, precision="bfloat16"), tmp_path / "wide", show=(wide := Watching()))
    train(recipe(tmp_path), tmp_path / "narrow", show=(narrow := Watching()))
    for a, b in zip(wide.rows, narrow.rows, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.01)
        assert a["loss"] != b["loss"]
    model = ch.load(tmp_path / "narrow")
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.usefixtures("on_any_device")
def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    asked = recipe(tmp_path, accumulate=2, deterministic=True)
    train(asked, tmp_path / "whole")
    stop_and_resume(asked, tmp_path / "parts", 1, 4)
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("task", ["translate", "mask"])
def test_other_shapes_run(task: str, tmp_path: Path) -> None:
    asked = make_recipe(task, tmp_path, precision="fp8", steps=2, device=DEVICE, model=SIZES)
    assert train(asked, tmp_path / "x").is_complete


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fp8 products need a CUDA GPU; got device 'cpu'; set train\.precision=auto"):
        train(recipe(tmp_path, device="cpu"), tmp_path / "x")
    assert not (tmp_path / "x").exists()  # refused before anything was made


@pytest.mark.parametrize(("world", "rank", "got"), [(2, 0, "2 processes"), (1, 4, r"train\.lora_rank=4")])
def test_what_has_no_fp8(world: int, rank: int, got: str, tmp_path: Path) -> None:
    asked = replace(recipe(tmp_path).train, lora_rank=rank)
    with pytest.raises(ConfigError, match=rf"one process in which all weights learn; got {got}; set train\.precision"):
        check_fp8(asked, Processes(torch.device("cpu"), world_size=world))


def test_a_name_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"train\.precision='fp16' is not known; choose one of: auto, bfloat16, float32, fp8"
    ):
        recipe(tmp_path, precision="fp16")
