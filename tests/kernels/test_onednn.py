"""Products by oneDNN: the same numbers and gradients as the equation in float64, and out of the way where somebody looks on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.kernels import onednn
from clearhead.layers.block import FeedForward
from clearhead.layers.linear import ACTIVATIONS, Linear, activated, linear

pytestmark = pytest.mark.skipif(not onednn.HAS_BOTH, reason="this torch has no MKL beside oneDNN")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, W, B = drawn(3, 13, 29), drawn(17, 29, seed=1), drawn(17, seed=2)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activation of each product that went to oneDNN."""
    found: list[str] = []
    product = onednn._product

    def watch(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none", form: str = "") -> Tensor:
        found.append(activation)
        return product(x, weight, bias, activation, form)

    monkeypatch.setattr(onednn, "_product", watch)
    return found


@pytest.mark.parametrize("activation", [None, *onednn.ACTIVATIONS])
@pytest.mark.parametrize("bias", [None, B])
@pytest.mark.parametrize("x", [X, X.transpose(0, 1), X[:, ::2].repeat(2, 1, 1), X[0].expand(4, 13, 29)])
def test_a_product_is_the_equations(x: Tensor, bias: Tensor | None, activation: str | None) -> None:
    act: Callable[[Tensor], Tensor] = ACTIVATIONS[activation] if activation else lambda y: y
    exact = act(F.linear(x.double(), W.double(), None if bias is None else bias.double()))
    with torch.no_grad():
        found = onednn.linear(x, W, bias, activation)
    # sums of 29 float32 numbers near 5
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bias", [None, B])
@pytest.mark.parametrize("frozen", ["", "x", "weight"])
def test_gradients_are_the_equations(seen: list[str], bias: Tensor | None, frozen: str) -> None:
    def gradients(dtype: torch.dtype, product: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> list[Tensor]:
        given = [None if t is None else t.to(dtype, copy=True).requires_grad_() for t in (X, W, bias)]
        if frozen:
            given[["x", "weight"].index(frozen)].requires_grad_(False)  # type: ignore[union-attr]
        (product(*given).sin()).sum().backward()  # type: ignore[arg-type]
        return [t.grad.double() for t in given if t is not None and t.grad is not None]

    ours, exact = gradients(torch.float32, linear), gradients(torch.float64, F.linear)
    assert seen[0] == "none", "the door led elsewhere"
    assert len(ours) == len(exact)
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)  # sums over 39 rows, of cosines times numbers near 5


def test_gradients_have_gradients() -> None:
    def curvature(dtype: torch.dtype) -> Tensor:
        x, w = X.to(dtype, copy=True).requires_grad_(), W.to(dtype, copy=True).requires_grad_()  # X, W are shared
        (slope,) = torch.autograd.grad(linear(x, w).pow(3).mean(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), w)[0].double()

    exact = curvature(torch.float64)
    torch.testing.assert_close(curvature(torch.float32), exact, rtol=0, atol=1e-5 * exact.abs().max().item())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, where it differentiates forward
@pytest.mark.parametrize("why", ["rows", "type", "off", "forward mode", "large"])
def test_what_does_not_fit_goes_another_way(seen: list[str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = X, W
    if why == "rows":
        x = X[:1]
    elif why == "type":
        x, w = X.double(), W.double()
    elif why == "large":
        monkeypatch.setattr(onednn, "ONEDNN_WEIGHT", W.numel() - 1)
    elif why == "off":
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    if why == "forward mode":
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            slope = torch.autograd.forward_ad.unpack_dual(linear(dual, w)).tangent
        assert slope is not None
        torch.testing.assert_close(slope, F.linear(torch.ones_like(x), w))
    else:
        torch.testing.assert_close(linear(x, w), F.linear(x, w))
    assert seen == []


def test_a_feedforward_step_is_one_kernel_less(seen: list[str]) -> None:
    torch.manual_seed(0)
    step = FeedForward(d_model=29, d_ff=31, activation="gelu").eval()
    exact = F.linear(F.gelu(F.linear(X, step.up.weight, step.up.bias)), step.down.weight, step.down.bias)
    with torch.no_grad():
        torch.testing.assert_close(step(X), exact.detach())
    assert seen == ["gelu", "none"]


def test_who_looks_sees_what_lies_between(seen: list[str]) -> None:
    step, between = FeedForward(d_model=29, d_ff=31, activation="gelu").eval(), list[Tensor]()

    def look(_: nn.Module, __: object, out: Tensor) -> None:
        between.append(out)

    with torch.no_grad():
        alone = step(X)
        hook = step.up.register_forward_hook(look)
        torch.testing.assert_close(step(X), alone)
        hook.remove()
        everywhere = nn.modules.module.register_module_forward_hook(look)
        torch.testing.assert_close(step(X), alone)
        everywhere.remove()
        torch.testing.assert_close(between[0], F.linear(X, step.up.weight, step.up.bias))
    assert seen == ["gelu", "none", *["none"] * 4]


def test_only_a_layer_of_ours_is_activated_in_one_step(seen: list[str]) -> None:
    """Other layers, unknown activations and gradients: the activation is torch's, after the product."""

    class Other(Linear):
        pass

    def products(layer: Linear, activation: str) -> tuple[bool, bool]:
        """Whether the product applied the activation itself, and whether the result is right."""
        seen.clear()
        result = activated(layer, X, activation)
        expected = ACTIVATIONS[activation](F.linear(X, layer.weight, layer.bias))
        return "gelu" in seen, torch.allclose(result, expected, atol=1e-5)

    with torch.no_grad():
        assert products(Linear(29, 17), "gelu") == (True, True)
        assert products(Linear(29, 17), "relu2") == (False, True)
        assert products(Other(29, 17), "gelu") == (False, True)
    assert products(Linear(29, 17), "gelu") == (False, True)


def test_weights_are_laid_out_once_and_anew_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, made = W.clone(), list[Tensor]()
    reorder = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda w: made.append(w) or reorder(w))
    with torch.no_grad(), onednn.laid_out():
        for _ in range(2):
            torch.testing.assert_close(linear(X, weight, B), F.linear(X, weight, B))
        assert len(made) == 1
        weight.mul_(2)
        torch.testing.assert_close(linear(X, weight, B), F.linear(X, weight, B))
        other = drawn(17, 29, seed=3)
        torch.testing.assert_close(linear(X, other, B), F.linear(X, other, B))
        assert len(made) == 3
        with torch.enable_grad():
            linear(X, W.clone().requires_grad_()).sum().backward()
        assert len(made) == 3, "training changes weights at every step"
        with onednn.laid_out():
            linear(X, weight)
        linear(X, weight)
        assert len(made) == 4
        copies: onednn.Copies = {}
        for _ in range(2):
            with onednn.laid_out(copies):
                linear(X, weight)
        assert len(made) == 5, "who keeps the copies has them again"
    assert onednn._laid.copies is None, "nothing is kept"
