"""Runs cases_executorch.py in a fresh process: torch can't trace through the shape checks of this test run (conftest.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fresh_process import run_in_fresh_process


@pytest.mark.slow
def test_executorch() -> None:
    pytest.importorskip("executorch", reason="no executorch to write and run its files")
    run_in_fresh_process(Path(__file__).parent / "cases_executorch.py")
