"""Training on a CUDA GPU, with steps that are replayed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_replayed() -> None:
    """In a process of its own, without the shape checks (conftest.py says why)."""
    path = Path(__file__).parents[1] / "compiled" / "cuda_training.py"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:logging", str(path)],
        cwd=path.parents[2],
        env=os.environ | {"CLEARHEAD_SHAPES": "unchecked"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
