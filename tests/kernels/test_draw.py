"""Draws by native.cpp: the tokens of torch's own operators, which add noise to every token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from clearhead import kernels
from clearhead.kernels import native
from clearhead.sampling.strategy import sample

pytestmark = pytest.mark.skipif(not native.is_there(), reason=str(native.why_not()))


def plainly(logits: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    with kernels.torch_only():
        return sample(logits, seeds, steps)


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("spread", [0.0, 1.0, 9.0])
@pytest.mark.parametrize("width", [1, 5, 16, 37, 49_153])
def test_the_same_tokens(width: int, spread: float, n_threads: int) -> None:
    rows = 2000 if width < 100 else 7
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(rows, width, generator=generator) * spread
    logits[::3] = logits[::3].masked_fill(torch.rand(len(logits[::3]), width, generator=generator) < 0.9, -math.inf)
    seeds, steps = torch.arange(rows) * 2**40 - 3, torch.arange(rows) % 11
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n_threads)
        drawn = native.draw(logits, seeds, steps)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(drawn, plainly(logits, seeds, steps))
    assert torch.equal(drawn[-1:], native.draw(logits[-1:], seeds[-1:], steps[-1:])), "alone as in the batch"


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 17, 66])
def test_what_is_no_number(spoilt: float, at: int) -> None:
    logits, seeds = torch.randn(3, 67), torch.arange(3)
    logits[0, at], logits[1] = spoilt, spoilt
    assert torch.equal(native.draw(logits, seeds, seeds), plainly(logits, seeds, seeds))


def test_the_door() -> None:
    logits, seeds = torch.randn(3, 67), torch.arange(3)
    assert kernels.draw(logits.double(), seeds, seeds) is None
    assert kernels.draw(logits[:0], seeds[:0], seeds[:0]) is None
    strided = torch.randn(67, 3).T
    found = kernels.draw(strided, seeds.int(), seeds)
    assert found is not None
    assert torch.equal(found, plainly(strided, seeds, seeds))
