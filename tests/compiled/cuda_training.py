"""On a CUDA GPU a run with CUDA graphs computes the same losses as one without. Run by tests/training/test_on_cuda.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training.tiny_runs import Watching, make_recipe, stop_and_resume

from clearhead.training import Recipe, train

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
MODEL = dict(d_model=32, n_heads=2, d_ff=64, dropout=0.0)


def recipe(task: str, folder: Path, **changes: Any) -> Recipe:
    return make_recipe(task, folder, device="cuda", model=MODEL, **changes)


def losses(asked: Recipe, out: Path) -> list[float]:
    train(asked, out, show=(seen := Watching()))
    return [row["loss"] for row in (*seen.rows, *seen.valid)]


EVEN = ["language", "mask", "pictures"]  # what has many shapes is recorded only where it is not compiled


@pytest.mark.parametrize(
    ("task", "compiled"),
    [*((task, True) for task in EVEN), *((task, False) for task in (*EVEN, "classify", "translate"))],
)
def test_replayed_is_called(task: str, compiled: bool, tmp_path: Path) -> None:
    for accumulate in (1, 2):
        options: dict[str, Any] = dict(compile=compiled, precision="float32", accumulate=accumulate)
        called = losses(recipe(task, tmp_path, record=False, **options), tmp_path / f"called-{accumulate}")
        replayed = losses(recipe(task, tmp_path, **options), tmp_path / f"replayed-{accumulate}")
        assert called == pytest.approx(replayed, rel=1e-4)
        assert len(set(called)) > 6  # it learns: a step that does nothing would pass


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_resumed_is_uninterrupted(precision: str, tmp_path: Path) -> None:
    asked = recipe("language", tmp_path, compile=True, precision=precision, stream="bfloat16", batch_tokens=58)
    whole = losses(asked, tmp_path / "whole")
    result = stop_and_resume(asked, tmp_path / "parts", 1, 4)
    assert result.metrics["loss"] == pytest.approx(whole[-1], rel=1e-3)
