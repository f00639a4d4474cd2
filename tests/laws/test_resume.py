"""`check_resume`: a real process is killed; what differs afterwards, or can not be killed, is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.errors import InputError
from clearhead.laws import check_resume
from clearhead.laws.resume_law import compare_runs, kill_after, wait
from tests.training.tiny_runs import make_recipe


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    recipe = make_recipe("language", tmp_path, evaluate_every=1000)
    found = check_resume(recipe, 60, tmp_path)
    assert found.outcome == "pass"
    assert "120 steps, killed by SIGKILL with step-" in found.reason
    assert [each.name for each in tmp_path.glob("clearhead-check-*")] == [], "its folder is removed"


def write_run(folder: Path, weights: bytes, loss: float, seconds: float) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "train", "loss": loss, "seconds": seconds}) + "\n")
    return folder


def test_what_differs_is_noticed(tmp_path: Path) -> None:
    alone = write_run(tmp_path / "alone", b"abc", 1.5, 10)
    assert compare_runs(alone, write_run(tmp_path / "same", b"abc", 1.5, 11), "").outcome == "pass"
    weights = compare_runs(alone, write_run(tmp_path / "weights", b"abd", 1.5, 10), "6 steps")
    assert weights.outcome == "fail"
    assert "sha256 differ: weights:" in weights.reason
    assert "metrics:" not in weights.reason
    metrics = compare_runs(alone, write_run(tmp_path / "metrics", b"abc", 1.25, 10), "6 steps")
    assert "sha256 differ: metrics:" in metrics.reason


def process(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def test_a_run_that_ends_before_the_kill(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ended before it could be killed after step 3; got --steps 3; give more"):
        kill_after(process("pass"), tmp_path / "step-00000003", 3)


def test_a_run_that_fails(tmp_path: Path) -> None:
    code = "import sys; sys.exit('clearhead: there is no file a.txt')"
    with pytest.raises(
        InputError, match=r"killed ended with 1: there is no file a\.txt; try it alone: clearhead train"
    ):
        kill_after(process(code), tmp_path / "step-00000003", 3)
    with pytest.raises(InputError, match="the run ended with 1"):
        wait(process(code), "the run")
    with pytest.raises(InputError, match=r"steps=0 is no number of steps before the kill"):
        check_resume(make_recipe("language", tmp_path), 0)
