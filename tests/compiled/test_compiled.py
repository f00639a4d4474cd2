"""Runs each `cases_*.py` of this folder in a fresh process, without the shape checks (conftest.py says why)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fresh_process import run_in_fresh_process

CASES = sorted(Path(__file__).parent.glob("cases_*.py"))


def test_there_are_cases() -> None:
    assert CASES


@pytest.mark.slow
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_compiled(path: Path) -> None:
    run_in_fresh_process(path)
