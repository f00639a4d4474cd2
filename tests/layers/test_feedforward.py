"""Feed-forward and norms against their formulas, written with python's math."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clearhead.errors import ConfigError
from clearhead.layers.block import FeedForward
from clearhead.layers.linear import ACTIVATIONS, make_norm
from clearhead.lessons import references

# float64 against float64, a dozen terms a sum
TIGHT = dict(rtol=0, atol=1e-12)

FORMULAS = references.ACTIVATIONS


def test_every_activation_is_tested() -> None:
    assert ACTIVATIONS.keys() == FORMULAS.keys()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", FORMULAS)
def test_plain(activation: str, bias: bool) -> None:
    layer = FeedForward(d_model=7, d_ff=13, activation=activation, bias=bias).double()
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    state = {"up.bias": torch.zeros(13), "down.bias": torch.zeros(7)} | layer.state_dict()
    inner = references.activate(FORMULAS[activation], x @ state["up.weight"].T + state["up.bias"])
    torch.testing.assert_close(layer(x), inner @ state["down.weight"].T + state["down.bias"], **TIGHT)
    assert len(layer.state_dict()) == (4 if bias else 2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", FORMULAS)
def test_gated(activation: str, bias: bool) -> None:
    """Shazeer 2020, equation 5 and its kin: (f(x W) * x V) W_2; f falls on the gate alone."""
    layer = FeedForward(d_model=7, d_ff=13, activation=activation, gated=True, bias=bias).double()
    nn.init.normal_(layer.gate_up.weight)
    if layer.gate_up.bias is not None:
        nn.init.normal_(layer.gate_up.bias)
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    zeros = {"gate.bias": torch.zeros(13), "up.bias": torch.zeros(13), "down.bias": torch.zeros(7)}
    state = zeros | layer.state_dict()
    gate = references.activate(FORMULAS[activation], x @ state["gate.weight"].T + state["gate.bias"])
    up = x @ state["up.weight"].T + state["up.bias"]
    torch.testing.assert_close(layer(x), (gate * up) @ state["down.weight"].T + state["down.bias"], **TIGHT)
    assert set(layer.state_dict()) == {
        f"{part}.{kind}" for part in ("gate", "up", "down") for kind in (("weight", "bias") if bias else ("weight",))
    }


def test_unknown_activation() -> None:
    with pytest.raises(ConfigError, match=r"feedforward='relu3' is not known; did you mean 'relu"):
        FeedForward(d_model=7, d_ff=13, activation="relu3")
    with pytest.raises(ConfigError, match=r"feedforward='maxout'.*choose one of: gelu, gelu_tanh, relu, relu2, silu"):
        FeedForward(d_model=7, d_ff=13, activation="maxout")


@pytest.mark.parametrize("eps", [1e-5, 0.3])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(eps: float, bias: bool) -> None:
    norm = make_norm("layer", 7, eps=eps, bias=bias).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    expected = references.layer_norm(x, norm.weight, norm.bias if bias else None, eps)
    torch.testing.assert_close(norm(x), expected, **TIGHT)
    assert len(list(norm.parameters())) == (2 if bias else 1)


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_rms_norm(eps: float) -> None:
    norm = make_norm("rms", 7, eps=eps).double()
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(norm(x), references.rms_norm(x, norm.weight, eps), **TIGHT)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


def test_no_norm() -> None:
    x = torch.randn(2, 3, 7)
    assert torch.equal(make_norm("none", 7)(x), x)


def test_unknown_norm() -> None:
    with pytest.raises(ConfigError, match=r"norm='rmsnorm' is not known; did you mean 'rms'\?"):
        make_norm("rmsnorm", 7)
    with pytest.raises(ConfigError, match=r"norm='batch' is not known; choose one of: layer, none, rms"):
        make_norm("batch", 7)
