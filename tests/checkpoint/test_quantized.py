"""Quantised weights: chosen when loading, never saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.errors import CheckpointError, InputError
from clearhead.quantization.integer import quantize


def test_load_quantised(tmp_path: Path) -> None:
    model: Any = ch.build(ch.preset("gpt2", n_layers=2, d_model=64, n_heads=4, d_ff=128, vocab_size=300)).eval()
    ch.save(model, tmp_path / "gpt")
    tokens = torch.arange(7)[None]
    for kind, within in (("int8", 0.01), ("int4", 0.2), ("w8a8", 0.02), ("w4a8", 0.2)):
        packed: Any = ch.load(tmp_path / "gpt", quantize=kind)
        assert sum(t.nbytes for t in packed.buffers()) < sum(p.nbytes for p in model.parameters()) / 3
        expected = model(tokens)
        assert (packed(tokens) - expected).norm() < within * expected.norm()
        assert torch.equal(packed(tokens), quantize(ch.load(tmp_path / "gpt"), kind)(tokens))
        with pytest.raises(
            CheckpointError, match="a quantised model is for running and is not saved; save the model it was"
        ):
            ch.save(packed, tmp_path / "again")
    with pytest.raises(InputError, match="quantize='int5' is not known; did you mean"):
        ch.load(tmp_path / "gpt", quantize="int5")
