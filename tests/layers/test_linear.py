"""FusedLinear: one product in memory, plain names on disk."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize

from clearhead.layers.linear import FusedLinear
from clearhead.layers.state_names import save_apart

D = 7
PARTS = {"q_proj": 11, "k_proj": 5, "v_proj": 3}
BIASED = [set(), {"q_proj", "v_proj"}, {"k_proj"}, set(PARTS)]


class Holder(nn.Module):
    """Three projections of one input, fused."""

    def __init__(self, bias: set[str]) -> None:
        super().__init__()
        self.qkv = FusedLinear(D, dict(PARTS), bias=bias)
        self.out = nn.Linear(3, 2)
        save_apart(self, "qkv")


class Apart(nn.Module):
    """The same three, as anyone would write them."""

    def __init__(self, bias: set[str]) -> None:
        super().__init__()
        for name, size in PARTS.items():
            setattr(self, name, nn.Linear(D, size, bias=name in bias))
        self.out = nn.Linear(3, 2)


def two_deep(kind: type[nn.Module], bias: set[str]) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([kind(bias), kind(bias)]), "last": nn.Linear(2, 2)})


@pytest.mark.parametrize("bias", BIASED, ids=lambda bias: " ".join(sorted(bias)) or "none")
def test_fused_is_three_linears(bias: set[str]) -> None:
    """Weights, biases where there are any, and the gradients of all of them."""
    apart, holder = Apart(bias).double(), Holder(bias).double()
    holder.load_state_dict(apart.state_dict())
    x = torch.randn(2, 13, D, dtype=torch.float64, requires_grad=True)
    theirs = [getattr(apart, name)(x) for name in PARTS]
    for ours, expected in zip(holder.qkv(x), theirs, strict=True):
        # float64, the same products in another order
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)
    slopes = []
    for outs, module in ((holder.qkv(x), holder), (theirs, apart)):
        sum((i + 1) * (out**2).sum() for i, out in enumerate(outs)).backward()
        pieces = {}
        for name, parameter in module.named_parameters():
            if name == "qkv.weight":
                pieces |= dict(
                    zip((f"{p}.weight" for p in PARTS), parameter.grad.split(list(PARTS.values())), strict=True)
                )
            elif name == "qkv.bias":
                sizes = {p: PARTS[p] for p in PARTS if p in bias}
                pieces |= dict(
                    zip((f"{p}.bias" for p in sizes), parameter.grad.split(list(sizes.values())), strict=True)
                )
            elif not name.startswith("out"):
                pieces[name] = parameter.grad
        slopes.append(pieces)
    assert slopes[0].keys() == slopes[1].keys()
    for name, grad in slopes[0].items():
        # sums of 26 products up to about 30
        torch.testing.assert_close(grad, slopes[1][name], rtol=0, atol=1e-11)


@pytest.mark.parametrize("bias", BIASED, ids=lambda bias: " ".join(sorted(bias)) or "none")
def test_on_disk_nobody_can_tell(bias: set[str]) -> None:
    """The same names and shapes as unfused, nested too; and each loads what the other saved."""
    for ours, theirs in ((Holder(bias), Apart(bias)), (two_deep(Holder, bias), two_deep(Apart, bias))):
        mine, plain = ours.state_dict(), theirs.state_dict()
        assert {k: v.shape for k, v in mine.items()} == {k: v.shape for k, v in plain.items()}
        assert not ours.load_state_dict(plain).missing_keys
        assert all(torch.equal(tensor, plain[name]) for name, tensor in ours.state_dict().items())
        theirs.load_state_dict(mine)


def test_loading_leaves_the_callers_dict_alone() -> None:
    state = Apart(set(PARTS)).state_dict()
    before = dict(state)
    Holder(set(PARTS)).load_state_dict(state)
    assert state.keys() == before.keys()
    assert all(state[name] is before[name] for name in state)


def test_copies_are_independent() -> None:
    first = two_deep(Holder, {"q_proj"})
    second = copy.deepcopy(first)
    saved = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    second.load_state_dict({name: tensor + 1 for name, tensor in saved.items()})
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, saved[name])
        assert torch.equal(second.state_dict()[name], saved[name] + 1)


def test_bfloat16_is_saved_as_bfloat16(tmp_path: Path) -> None:
    """Bit for bit through a file; safetensors refuses tensors that share memory, and the parts share their whole's."""
    first, second = (two_deep(Holder, {"q_proj", "v_proj"}).bfloat16() for _ in range(2))
    save_file(first.state_dict(), tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in loaded.values())
    second.load_state_dict(loaded)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


def test_built_on_meta_and_assigned() -> None:
    """How a large model is loaded: no memory until the weights are there."""
    with torch.device("meta"):
        holder = Holder({"q_proj"})
    state = Apart({"q_proj"}).state_dict()
    holder.load_state_dict(state, assign=True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in holder.state_dict().items())


def test_no_parametrization() -> None:
    holder = Holder(set(PARTS))
    assert not any(parametrize.is_parametrized(module) for module in holder.modules())
    assert [name for name, _ in holder.named_parameters()] == ["qkv.weight", "qkv.bias", "out.weight", "out.bias"]


def test_a_missing_part_is_named() -> None:
    """By the name that stands in a file, and the parts that are there are no surprise."""
    for prefix, module in (("", Holder(set(PARTS))), ("layers.1.", two_deep(Holder, set(PARTS)))):
        state = module.state_dict()
        del state[f"{prefix}k_proj.weight"], state[f"{prefix}v_proj.bias"]
        result = module.load_state_dict(state, strict=False)
        assert set(result.missing_keys) == {f"{prefix}k_proj.weight", f"{prefix}v_proj.bias"}
        assert not result.unexpected_keys
        with pytest.raises(RuntimeError, match="Missing key") as error:
            module.load_state_dict(state)
        assert f"{prefix}k_proj.weight" in str(error.value)


def test_a_missing_part_is_named_on_meta_too() -> None:
    with torch.device("meta"):
        holder = Holder({"q_proj"})
    state = Apart({"q_proj"}).state_dict()
    del state["v_proj.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*v_proj\.weight"):
        holder.load_state_dict(state, assign=True)


def test_an_unknown_part_is_named() -> None:
    holder = Holder({"q_proj"})
    state = holder.state_dict() | {"k_proj.bias": torch.zeros(5), "x_proj.weight": torch.zeros(5, D)}
    result = holder.load_state_dict(state, strict=False)
    assert set(result.unexpected_keys) == {"k_proj.bias", "x_proj.weight"}
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*k_proj\.bias"):
        holder.load_state_dict(state)


def test_parts_of_the_wrong_size_are_refused() -> None:
    """Even where the sum is right: the rows of one part would end up in another."""
    holder = Holder(set())
    state = holder.state_dict()
    state["q_proj.weight"], state["k_proj.weight"] = torch.zeros(5, D), torch.zeros(11, D)
    with pytest.raises(RuntimeError, match=r"size mismatch for q_proj\.weight"):
        holder.load_state_dict(state)
    state = holder.state_dict()
    state["v_proj.weight"] = torch.zeros(3, D + 1)
    with pytest.raises(RuntimeError, match=r"size mismatch for v_proj\.weight"):
        holder.load_state_dict(state)
