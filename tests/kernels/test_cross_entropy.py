"""Chunked cross-entropy against torch's own, in float64; and that the logits are never all there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from models.tiny import assert_same
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.kernels.cross_entropy import IGNORED, cross_entropy

N, D, V = 29, 5, 53


def draw(n: int = N, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, bias = (torch.randn(*shape, dtype=dtype).requires_grad_() for shape in ((n, D), (V, D), (V,)))
    targets = torch.randint(0, V, (n,))
    targets[::7] = IGNORED
    return x, weight, bias, targets


def check_against_torch(chunk: int, smoothing: float, use_bias: bool, n: int = N) -> None:
    x, weight, bias, targets = draw(n)
    leaves = [x, weight, *([bias] if use_bias else [])]
    given_bias = bias if use_bias else None
    logits = F.linear(x, weight, given_bias)
    options: dict[str, Any] = dict(ignore_index=IGNORED, reduction="sum")
    theirs = F.cross_entropy(logits, targets, label_smoothing=smoothing, **options)
    wanted = torch.autograd.grad(theirs * 1.7, leaves)
    plain, goal, correct = cross_entropy(x, weight, targets, bias=given_bias, smoothing=smoothing, chunk=chunk)
    assert_same(plain, F.cross_entropy(logits, targets, **options))
    assert_same(goal, theirs)
    assert int(correct) == int((logits.argmax(-1) == targets).sum())
    for ours, grad in zip(torch.autograd.grad(goal * 1.7, leaves), wanted, strict=True):
        assert_same(ours, grad)


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("chunk", [0, 1, 7, N - 1, N, 3 * N])  # 7 leaves a rest of 1
def test_it_is_cross_entropy(chunk: int, smoothing: float, use_bias: bool):
    check_against_torch(chunk, smoothing, use_bias)


@given(st.integers(1, 17), st.integers(1, 19), st.floats(0, 0.99), st.booleans())
def test_it_is_cross_entropy_for_any_size(n: int, chunk: int, smoothing: float, use_bias: bool):
    check_against_torch(chunk, smoothing, use_bias, n)


def test_rows_may_have_any_shape():
    x, weight, bias, targets = draw(3 * 7)
    flat = cross_entropy(x, weight, targets, bias=bias, chunk=5)
    folded = cross_entropy(x.unflatten(0, (3, 7)), weight, targets.unflatten(0, (3, 7)), bias=bias, chunk=5)
    assert all(torch.equal(a, b) for a, b in zip(flat, folded, strict=True))


def test_without_gradients_it_is_the_same_and_computes_none():
    x, weight, bias, targets = draw()
    with_them = cross_entropy(x, weight, targets, bias=bias, smoothing=0.1, chunk=7)
    with torch.no_grad(), Watch() as watch:
        without = cross_entropy(x, weight, targets, bias=bias, smoothing=0.1, chunk=7)
    assert all(torch.equal(a, b) for a, b in zip(with_them, without, strict=True))
    assert not without[1].requires_grad
    assert "scatter_add" not in watch.names  # what only the gradient needs


@pytest.mark.parametrize("leaf", [0, 1, 2])
def test_only_the_gradients_asked_for(leaf: int):
    x, weight, bias, targets = draw()
    leaves = [x, weight, bias]
    _, goal, _ = cross_entropy(x, weight, targets, bias=bias)
    wanted = torch.autograd.grad(goal, leaves)[leaf]
    frozen = [tensor if i == leaf else tensor.detach() for i, tensor in enumerate(leaves)]
    _, goal, _ = cross_entropy(frozen[0], frozen[1], targets, bias=frozen[2])
    goal.backward()
    assert torch.equal(frozen[leaf].grad, wanted)  # type: ignore[arg-type]


def test_gradients_flow_from_the_second_only():
    x, weight, _, targets = draw()
    plain, goal, correct = cross_entropy(x, weight, targets, smoothing=0.1)
    assert not correct.requires_grad
    for both in (goal, goal + plain.detach(), goal + plain):
        grad = torch.autograd.grad(both, x, retain_graph=True)[0]
        assert torch.equal(grad, torch.autograd.grad(goal, x, retain_graph=True)[0])


@pytest.mark.parametrize("n", [0, 11])
def test_nothing_to_predict_is_zero(n: int):
    x, weight, bias, _ = draw(n)
    answers = cross_entropy(x, weight, torch.full((n,), IGNORED), bias=bias, smoothing=0.1)
    assert [float(answer.detach()) for answer in answers] == [0, 0, 0]
    answers[1].backward()
    for leaf in (x, weight, bias):
        assert leaf.grad is not None
        assert not leaf.grad.any()


class Watch(TorchDispatchMode):
    """Notes every operation and the size of the largest tensor that any of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.largest = set[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__.rstrip("_"))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_the_logits_are_never_all_there():
    n, d, v, chunk = 101, 3, 211, 7
    x, weight = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
    targets = torch.randint(0, v, (n,))
    with Watch() as watch:
        cross_entropy(x, weight, targets, smoothing=0.1, chunk=chunk)[1].backward()
    assert max(chunk * v, v * d, n * d) >= watch.largest >= chunk * v
    with Watch() as watch:
        F.cross_entropy(x @ weight.T, targets, label_smoothing=0.1).backward()
    assert watch.largest == n * v


def test_autocast_is_close_to_float32():
    x, weight, bias, targets = draw(dtype=torch.float32)
    exact = cross_entropy(x, weight, targets, bias=bias, smoothing=0.1, chunk=7)
    wanted = torch.autograd.grad(exact[1], (x, weight, bias))
    with torch.autocast("cpu", torch.bfloat16):
        rough = cross_entropy(x, weight, targets, bias=bias, smoothing=0.1, chunk=7)
    grads = torch.autograd.grad(rough[1], (x, weight, bias))
    assert rough[0].dtype == rough[1].dtype == torch.float32
    # bfloat16 keeps 8 bits: each logit is off by up to 2^-9 of itself, their sum by much less
    torch.testing.assert_close(rough[:2], exact[:2], rtol=2e-2, atol=0)
    for ours, theirs in zip(grads, wanted, strict=True):
        assert ours.dtype == torch.float32  # the parameters'
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-2 * float(theirs.abs().max()))


def test_sums_over_chunks_keep_their_precision():
    """In bfloat16 a running sum of 1,000 gradients would stop growing at 256 of them."""
    n = 1009
    x, weight = torch.ones(n, 1), torch.zeros(2, 1, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        plain, goal, _ = cross_entropy(x, weight, torch.zeros(n, dtype=torch.int64), chunk=1)
    goal.backward()
    # every row: loss log 2, gradient -1/2 and 1/2; the sum goes back to bfloat16 once, as weight.to's gradient
    torch.testing.assert_close(float(plain.detach()), n * 0.6931471805599453, rtol=1e-5, atol=0)
    torch.testing.assert_close(weight.grad, torch.tensor([[-n / 2], [n / 2]]), rtol=2**-8, atol=0)
