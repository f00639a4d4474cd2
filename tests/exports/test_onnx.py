"""Runs cases_onnx.py in a fresh process: torch can't trace a model through the shape checks of this test run (conftest.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fresh_process import run_in_fresh_process


@pytest.mark.slow
def test_onnx() -> None:
    for module in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(module, reason=f"no {module} to write and run ONNX files")
    run_in_fresh_process(Path(__file__).parent / "cases_onnx.py")
