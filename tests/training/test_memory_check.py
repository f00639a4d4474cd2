"""A run that does not fit into memory is refused before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clearhead.errors import InputError
from clearhead.kernels import memory
from clearhead.training import initialization, loop, memory_check, train
from training.tiny_runs import make_recipe


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SMALL", 0)
    monkeypatch.setattr(initialization, "build", lambda *_, **__: pytest.fail("built"))


def with_free(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda device: n)


def test_a_model_too_large_is_refused_before_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 6_000_000_000)
    monkeypatch.setattr(loop, "make_task", lambda *_: pytest.fail("data was read"))
    recipe = make_recipe("language", tmp_path, model=dict(n_layers=24, d_model=2048, n_heads=16, d_ff=8192))
    words = r"width 2048 and 24 layers needs 1\d\.\d GB of memory, and 6\.0 GB are free; lower model.d_model .*model\.preset=\w+"
    with pytest.raises(InputError, match=words):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_too_large_is_refused_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, 200_000)
    recipe = make_recipe("language", tmp_path, batch_tokens=29 * 40)
    with pytest.raises(InputError, match=r"needs [\d.]+ MB of memory, and 0\.2 MB are free; raise train\.accumulate"):
        train(recipe, tmp_path / "run")


def test_the_check_is_of_what_a_step_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Just enough is enough, and LoRA needs no optimizer state for frozen weights."""
    asked: list[int] = []
    monkeypatch.setattr(memory_check, "require_memory", lambda needed, *_: asked.append(needed))

    def ask(**changes: Any) -> int:
        asked.clear()
        with pytest.raises(BaseException, match="built"):
            train(make_recipe("language", tmp_path, **changes), tmp_path / "run")
        return asked[-1]

    one, four = ask(batch_tokens=29 * 8), ask(batch_tokens=29 * 32)
    assert 2 * one < four < 4.5 * one
    assert ask(batch_tokens=29 * 32, accumulate=4) < 1.5 * one
