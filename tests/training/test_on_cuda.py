"""Training on a CUDA GPU, with steps replayed as CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fresh_process import run_in_fresh_process


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_replayed() -> None:
    run_in_fresh_process(Path(__file__).parents[1] / "compiled" / "cuda_training.py")
