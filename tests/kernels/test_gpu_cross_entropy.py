"""The Triton kernel of the loss, against float64 and torch's own cross-entropy."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.kernels.cross_entropy import IGNORED, SCALE, cross_entropy
from tests.triton_interpreter import DEVICE, need_triton

need_triton()
gpu: Any = importlib.import_module("clearhead.kernels.gpu.cross_entropy")


def draw(n: int, V: int, W: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits with ties among them, whatever past column V, targets that are often the largest."""
    logits = (torch.randn(n, W) * 8).round().div(4).to(dtype)
    targets = torch.where(torch.rand(n) < 0.5, logits[:, :V].float().argmax(1), torch.randint(V, (n,)))
    targets[::7] = IGNORED
    return logits.to(DEVICE), targets.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("n", "V", "W"), [(1, 3, 8), (37, 150, 192), (5, 4099, 4160)])
def test_losses_and_gradients(n: int, V: int, W: int, smoothing: float, dtype: torch.dtype) -> None:
    logits, targets = draw(n, V, W, dtype)
    told, grad = gpu.losses(logits, targets, smoothing, V, IGNORED, wanted=True)
    wide = logits[:, :V].double().requires_grad_()
    options: dict[str, Any] = dict(ignore_index=IGNORED, reduction="none")
    plain = F.cross_entropy(wide, targets, **options)
    goal = F.cross_entropy(wide, targets, label_smoothing=smoothing, **options)
    goal.sum().backward()
    near: dict[str, Any] = dict(rtol=1e-5, atol=1e-5)  # float32 sums
    torch.testing.assert_close(told[0].double(), plain, **near)
    if smoothing:
        torch.testing.assert_close(((1 - smoothing) * told[0] + smoothing * told[1]).double(), goal, **near)
    assert torch.equal(told[2].bool(), (wide.argmax(1) == targets))
    torch.testing.assert_close(told[3].double(), wide.logsumexp(1), **near)
    assert wide.grad is not None
    share = 2**-7 if dtype == torch.bfloat16 else 1e-5  # the interpreter rounds to bfloat16 towards 0
    torch.testing.assert_close(grad[:, :V].double(), wide.grad, rtol=share, atol=1e-6)
    assert not grad[:, V:].any()


def test_without_gradients_there_are_none() -> None:
    logits, targets = draw(3, 20, 24, torch.float32)
    told, grad = gpu.losses(logits, targets, 0.0, 20, IGNORED, wanted=False)
    assert grad.numel() == 0
    assert torch.equal(told, gpu.losses(logits, targets, 0.0, 20, IGNORED, wanted=True)[0])
    assert gpu.losses(logits[:0], targets[:0], 0.0, 20, IGNORED, wanted=True)[0].shape == (4, 0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_in_8_bits_both_ways(smoothing: float) -> None:
    n, V, W = 37, 150, 192
    logits, targets = draw(n, V, W, torch.bfloat16)
    told, grad = gpu.losses(logits.float(), targets, smoothing, V, IGNORED, wanted=True)
    out, turned = gpu.gradient8(logits, targets, told[3], smoothing, V, IGNORED, SCALE)
    assert torch.equal(turned[:, :n].float(), out.T.float())
    assert turned.shape == (W, 48)
    assert not turned[:, n:].float().any()
    # Two bits are kept behind the first; the smallest step is that of numbers without a first.
    allowed = 1.001 * 2**-3 * grad.abs() + 2**-17 / SCALE
    assert ((out.float() / SCALE - grad).abs() <= allowed).all()


@pytest.mark.parametrize("biased", [True, False])
def test_the_loss_in_8_bits_is_near_the_plain_one(biased: bool) -> None:
    n, D, V = 45, 32, 150  # neither n nor V a multiple of 16; three chunks
    x, weight = (
        torch.randn(n, D, device=DEVICE).requires_grad_(),
        (torch.randn(V, D, device=DEVICE) / 4).requires_grad_(),
    )
    bias = torch.randn(V, device=DEVICE).requires_grad_() if biased else None
    targets = torch.randint(V, (n,), device=DEVICE)
    targets[::7] = IGNORED
    asked = [x, weight, *([bias] if bias is not None else [])]
    found: list[list[Tensor]] = []
    for eight in (False, True):
        with torch.autocast(DEVICE, torch.bfloat16):
            plain, goal, _ = cross_entropy(x, weight, targets, bias=bias, smoothing=0.1, chunk=16, eight=eight)
        found.append([plain, goal.detach(), *torch.autograd.grad(goal, asked)])
    for wide, narrow in zip(*found, strict=True):
        assert wide.dtype == narrow.dtype
        assert 0 < (wide - narrow).norm() <= 0.08 * wide.norm()  # 3 to 6% of each operand; sums even that out


def test_what_is_no_number_is_seen() -> None:
    logits, targets = draw(3, 20, 24, torch.float32)
    logits[1, 4] = float("nan")
    told, grad = gpu.losses(logits, targets, 0.0, 20, IGNORED, wanted=True)
    assert told[0].isnan().tolist() == [False, True, False]
    assert grad[1, :20].isnan().all()
