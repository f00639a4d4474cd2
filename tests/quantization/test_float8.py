"""Products in 8 bits: the kernels against torch's own rounding, the products against float64 of the rounded operands."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from clearhead.errors import ConfigError
from clearhead.layers.block import FeedForward
from clearhead.layers.linear import ACTIVATIONS, FusedLinear, Linear
from clearhead.layers.state_names import save_apart
from clearhead.quantization import float8 as fp8
from tests import tools
from tests.fresh_process import run_in_fresh_process
from tests.triton_interpreter import DEVICE, need_triton

need_triton()
gpu: Any = importlib.import_module("clearhead.kernels.gpu.float8_cast")
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
# Half of the last bit's step, of what is kept of a number: 3 bits behind the first, or 2.
SHARE = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16().to(DEVICE)


def number(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


def rounded(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    top = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-top, top).to(dtype)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(1, 16), (70, 192), (2, 37, 48)])
def test_both_orders_and_the_largest(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, largest = draw(*shape), number(0.0)
    out, turned = gpu.cast([x], None, "", number(200.0), largest, dtype)  # the largest values saturate
    expected, R = rounded(x, 200.0, dtype).flatten(0, -2), out.shape[0]
    assert torch.equal(out.float(), expected.float())
    assert torch.equal(turned[:, :R].float(), expected.T.float())
    assert turned.shape[1] % 16 == 0
    assert not turned[:, R:].float().any()
    assert largest == x.abs().max()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", list(ACTIVATIONS))
def test_activations_and_slopes(kind: str, dtype: torch.dtype) -> None:
    x, g, scale = 3 * draw(40, 64), draw(40, 64), 2.0
    wide = x.double().requires_grad_()
    active = ACTIVATIONS[kind](wide)
    (slope,) = torch.autograd.grad(active, wide, g.double())
    for found, expected in (
        (gpu.cast([x], None, kind, number(scale), number(0.0), dtype)[0], active),
        (gpu.cast([g], x, kind, number(scale), number(0.0), dtype)[0], slope),
    ):
        # Below the smallest normal number steps do not shrink any more.
        allowed = 1.001 * SHARE[dtype] * expected.abs() + torch.finfo(dtype).smallest_normal / scale
        assert ((found.double() / scale - expected).abs() <= allowed).all()


def test_parts_are_joined_where_they_are_rounded() -> None:
    q, k, v = draw(3, 7, 64), draw(3, 7, 64)[..., :32], draw(3, 7, 32)  # k is a view with gaps
    out, turned = gpu.cast([q, k, v], None, "", number(1.0), number(0.0), torch.float8_e5m2)
    expected = torch.cat([q, k, v], -1).flatten(0, 1).to(torch.float8_e5m2)
    assert torch.equal(out.float(), expected.float())
    assert torch.equal(turned[:, :21].float(), expected.T.float())


def test_what_is_no_number_stays_none() -> None:
    x = draw(16, 16)
    x[3, 5] = float("nan")
    for kind in ("", *ACTIVATIONS):
        out, _ = gpu.cast([x], None, kind, number(1.0), number(0.0), torch.float8_e4m3fn)
        assert out.float().isnan().nonzero().tolist() == [[3, 5]]


class Holder(nn.Module):
    """Products under the names that blocks have."""

    def __init__(self, *, bias: bool = True, kind: str = "gelu_tanh") -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(
            {
                "one": Linear(32, 48, bias=bias),
                "feedforward": FeedForward(d_model=32, d_ff=64, activation=kind, bias=bias),
            }
        )
        self.blocks["qkv"] = FusedLinear(32, {"q": 32, "k": 16, "v": 16}, bias={"q", "v"} if bias else set())
        save_apart(self.blocks, "qkv")


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(fp8, "check_device", lambda _: None)


def total(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum()


def make(holder: nn.Module, *works: Any) -> fp8.Products:
    """Products whose scales come from these works."""
    products = fp8.Products(holder.to(DEVICE))
    products.calibrate(lambda: total(out.float().square().sum() for work in works for out in work()).backward())
    holder.zero_grad()
    return products


def back(x8: Tensor, scale: Tensor) -> Tensor:
    return x8.double() / scale.double()


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_that_of_the_rounded_operands(bias: bool) -> None:
    holder, x = Holder(bias=bias), draw(3, 5, 32).requires_grad_()
    module: Any = holder.blocks["one"].to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        make(holder, lambda: [module(x)])
        y = module(x)
    x.grad = None
    g = draw(3, 5, 48)
    y.backward(g)
    x8, g8 = (
        back(rounded(tensor.detach().flatten(0, 1), scale.item(), dtype), scale)
        for tensor, scale, dtype in zip((x, g), module.product8.scales, FORMATS, strict=False)
    )
    w8 = back(module.product8.weight, module.product8.scales[2])
    assert torch.allclose(w8, module.weight.double(), rtol=2.0**-4, atol=1e-4)
    added = module.bias.double() if bias else 0.0
    # One rounding of the result to bfloat16, and of the bias; float32 sums.
    near: dict[str, Any] = dict(rtol=2.0**-7, atol=2e-2)
    torch.testing.assert_close(y.double().flatten(0, 1), x8 @ w8.T + added, **near)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double().flatten(0, 1), g8 @ w8, **near)
    torch.testing.assert_close(module.weight.grad.double(), g8.T @ x8, **near)
    if bias:
        torch.testing.assert_close(module.bias.grad.double(), g.double().sum((0, 1)), **near)


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("name", ["qkv", "feedforward"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["gelu_tanh", "relu2"])
def test_results_and_gradients_are_near_those_of_16_bits(name: str, bias: bool, kind: str) -> None:
    holder, x = Holder(bias=bias, kind=kind).to(DEVICE), draw(4, 13, 32).requires_grad_()
    module: Any = holder.blocks[name]

    def run() -> tuple[Tensor, ...]:
        out = module(x)
        return (out,) if isinstance(out, Tensor) else out

    def measure() -> list[Tensor]:
        out = run()
        asked = [x, *module.parameters()]
        weights = [torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y) for y in out]
        return [*out, *torch.autograd.grad(total((y * w).sum() for y, w in zip(out, weights, strict=True)), asked)]

    with torch.autocast(DEVICE, torch.bfloat16):
        expected = measure()
        make(holder, run)
        found = measure()
    for y, z in zip(found, expected, strict=True):
        assert y.dtype == z.dtype
        # Each operand is off by 3 to 6%, several in a row; a bias sums rounded gradients, of few rows here.
        assert (y - z).norm() <= (0.1 if y.ndim > 1 else 0.2) * z.norm()
        assert (y - z).norm() >= 0.001 * z.norm() or y.ndim == 1  # and 8 bits they were


@pytest.mark.usefixtures("on_any_device")
def test_scales_follow_the_largest_of_the_last_steps() -> None:
    holder, x = Holder(bias=False), draw(2, 8, 32).float()
    module: Any = holder.blocks["one"]
    products = make(holder, lambda: [module(x)])
    largest = x.abs().max().item()

    def scale() -> float:
        return module.product8.scales[0].item()

    assert scale() == pytest.approx(448 / (2 * largest))  # the first pass is read as it is
    for factor, expected in ((0.1, 1.0), (3.0, 3.0), (1.0, 3.0)):
        module(factor * x)
        products.refresh()
        assert scale() == pytest.approx(448 / (2 * largest * expected), rel=1e-2)
    for _ in range(fp8.STEPS):
        module(x)
        products.refresh()
    assert scale() == pytest.approx(448 / (2 * largest))
    jump = module(1000 * x)  # more than there is room for: the largest number there is, not infinity
    assert jump.isfinite().all()
    held = products.history.clone()
    products.refresh()
    assert scale() == pytest.approx(448 / (2000 * largest), rel=1e-2)
    assert torch.equal(products.history[1:], held[:-1])


@pytest.mark.usefixtures("on_any_device")
def test_without_gradients_a_module_is_itself() -> None:
    holder, x = Holder(), draw(2, 8, 32).float()
    module: Any = holder.blocks["one"].to(DEVICE)
    names = list(holder.state_dict())
    with torch.no_grad():
        before = module(x)
    make(holder, lambda: [module(x)])
    with torch.no_grad():
        assert torch.equal(module(x), before)
    assert list(holder.state_dict()) == names


@pytest.mark.usefixtures("on_any_device")
def test_a_model_learns() -> None:
    model: Any = ch.build(ch.preset("gpt2", n_layers=1, d_model=16, n_heads=1, d_ff=32, vocab_size=17, max_len=8))
    model, tokens = model.to(DEVICE).train(), torch.arange(9, device=DEVICE)[None]

    def loss() -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return F.cross_entropy(model(tokens[:, :-1]).float()[0], tokens[0, 1:])

    products = fp8.Products(model)
    products.calibrate(lambda: loss().backward())
    optimizer, first = torch.optim.AdamW(model.parameters(), lr=0.02), loss().item()
    for _ in range(12):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        products.refresh()
    assert loss() < 0.2 * first


def test_errors() -> None:
    model = ch.build(ch.preset("gpt2", n_layers=1, d_model=24, n_heads=2, d_ff=32, vocab_size=7, max_len=8))
    with pytest.raises(ConfigError, match=r"need a CUDA GPU; got device 'cpu'; set train\.precision=auto"):
        fp8.Products(model)
    weights = {"blocks.0.up": torch.empty(32, 24)}
    with pytest.raises(ConfigError, match=r"widths that 16 divides; blocks\.0\.up is 24 -> 32; change d_model"):
        fp8.check_widths(weights)


def test_an_older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"8\.9 or later .* NVIDIA A100 has 8\.0; set train\.precision=bfloat16"):
        fp8.check_device(torch.device("cuda"))


@pytest.mark.skipif(not tools.can_compile(), reason=tools.NO_COMPILER)
def test_compiled() -> None:
    run_in_fresh_process(Path(__file__).parents[1] / "compiled" / "triton_fp8.py")
