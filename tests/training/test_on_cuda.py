"""Training on a CUDA GPU, with steps that are replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from apart import run_apart


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_replayed() -> None:
    run_apart(Path(__file__).parents[1] / "compiled" / "cuda_training.py")
