"""Some of the disk's faults; `make test-faults` tries all of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.training.tiny_runs import ROOT, plain_environment

needs_c = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which(os.environ.get("CC") or "cc") is None,
    reason="no C++ compiler found, or no Linux: failing_calls.c is preloaded",
)


def faults(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.faults.disk_faults", *arguments],
        cwd=ROOT,
        env=plain_environment() | more,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@needs_c
@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1"])
def test_old_state_or_new(seed: str) -> None:
    ran = faults("--trials", "2", "--kills", "5", "--seed", seed)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.count("old state or new") == 9
    assert "seed 1" in ran.stdout


@needs_c
@pytest.mark.slow
def test_a_careless_save_is_found_and_the_call_is_named() -> None:
    """Files that replace the old ones one by one: a failure between two leaves neither model. The same call fails again."""
    ran = faults("--only", "save, clearhead", "--careless")
    assert ran.returncode == 1
    assert "failed: save, clearhead, call " in ran.stdout, ran.stdout + ran.stderr[-2000:]
    call = ran.stdout.split("--call ")[1].split(" ")[0]
    again = faults("--only", "save, clearhead", "--careless", "--call", call)
    assert again.returncode == 1
