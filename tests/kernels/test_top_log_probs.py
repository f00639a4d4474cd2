"""Each row's likeliest tokens by native.cpp: those of a softmax and a sort."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from clearhead import kernels
from clearhead.kernels import native
from clearhead.sampling.beam_search import top_log_probs

pytestmark = pytest.mark.skipif(not native.is_there(), reason=str(native.why_not()))


def expected(logits: Tensor, n: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """In float64, of equals the lower id first."""
    log_probs = logits.double().log_softmax(-1)
    found = log_probs if bias is None else log_probs + bias
    values, ids = found.sort(dim=-1, descending=True, stable=True)
    return values[:, :n], ids[:, :n]


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 8, 37])
@pytest.mark.parametrize("width", [37, 64, 1001, 58_101])
def test_the_likeliest(width: int, n: int, n_threads: int) -> None:
    logits = torch.randn(5, width, generator=torch.Generator().manual_seed(n)) * 5
    logits[1] = logits[1].sort(descending=True).values  # nothing is replaced
    logits[2] = logits[2].sort().values  # everything is
    logits[3, ::3] = -math.inf
    bias = torch.zeros(width)
    bias[logits[0].argmax()] = -math.inf
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n_threads)
        for more in (None, bias):
            values, ids = native.top_log_probs(logits, n, more)
            right, right_ids = expected(logits, n, more)
            torch.testing.assert_close(values.double(), right, rtol=1e-6, atol=2e-6)
            assert torch.equal(ids, right_ids)
            for row in range(5):
                alone = native.top_log_probs(logits[row : row + 1], n, more)
                assert torch.equal(alone[0][0], values[row]), "the same bits alone and in a batch"
    finally:
        torch.set_num_threads(before)


def test_equals_and_the_impossible() -> None:
    """Of equal numbers the lower ids; where fewer than n tokens are possible, others follow with -inf."""
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0] * 9, [-math.inf] * 40 + [2.0, 3.0, -math.inf, 2.0, 0.0]])
    values, ids = native.top_log_probs(logits, 6, None)
    assert ids.tolist() == [[1, 2, 4, 6, 7, 9], [41, 40, 43, 44, 0, 1]]
    torch.testing.assert_close(values.double(), expected(logits, 6)[0])


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 17, 63, 66])
def test_what_has_no_probabilities(at: int, spoilt: float) -> None:
    """NaN, infinity and rows in which nothing is possible: NaN, as by a softmax; other rows are as they were."""
    logits = torch.randn(3, 67, generator=torch.Generator().manual_seed(0))
    right = native.top_log_probs(logits, 3, None)
    logits[1, at], logits[2] = spoilt, -math.inf
    values, ids = native.top_log_probs(logits, 3, None)
    assert values[1:].isnan().all()
    assert torch.equal(values[0], right[0][0])
    assert torch.equal(ids[0], right[1][0])
    assert ((ids >= 0) & (ids < 67)).all()


def test_the_door() -> None:
    """Strided rows too; other types go another way, with the same result."""
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    by_kernel = kernels.top_log_probs(logits[:, ::2], 5)
    assert by_kernel is not None
    assert kernels.top_log_probs(logits.double(), 5) is None
    values, ids = top_log_probs(logits[:, ::2].double(), 5, torch.zeros(100))
    torch.testing.assert_close(by_kernel[0].double(), values)
    assert torch.equal(by_kernel[1], ids)
