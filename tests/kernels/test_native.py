"""The kernels of native.cpp against float64, alone and in a batch, and what happens where they can't be had."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from clearhead.kernels import native, native_library
from clearhead.layers.linear import FusedLinear, Linear, linear
from clearhead.quantization.integer import Int4, Int8

needs_native = pytest.mark.skipif(not native.is_there(), reason=str(native.why_not()))
SIZES = [(1, 7, 5), (3, 13, 768), (7, 1, 67), (13, 37, 131), (32, 29, 17)]  # rows, outputs, inputs


def test_it_is_there() -> None:
    """Else all that follows would be skipped in silence."""
    assert native.why_not() is None or shutil.which("g++") is None or os.environ.get("CLEARHEAD_NATIVE") == "0"


@needs_native
@pytest.mark.parametrize(("rows", "n", "d"), SIZES)
@pytest.mark.parametrize("biased", [True, False])
def test_linear(rows: int, n: int, d: int, biased: bool) -> None:
    x, weight, bias = torch.randn(rows, d), torch.randn(n, d), torch.randn(n) if biased else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    ours = native.linear(x, weight, bias)
    # float32: some 50 partial sums of numbers near 1, added to others as large as the result
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=2e-5)
    for row in range(rows):
        assert torch.equal(native.linear(x[row : row + 1], weight, bias)[0], ours[row]), "alone as in the batch"


@needs_native
@pytest.mark.parametrize(("inputs", "limit"), [(16, 32512), (8, 127)])
@pytest.mark.parametrize(("rows", "n", "d"), [*SIZES, (5, 11, 576), (43, 5, 96), (2, 3, 32), (9, 53, 160)])
def test_packed(rows: int, n: int, d: int, inputs: int, limit: int) -> None:
    x, weight, bias = torch.randn(rows, d), torch.randn(n, d), torch.randn(n)
    for kind in (Int8, Int4) if d % 32 == 0 else (Int8,):
        packed = kind(weight, inputs=inputs)
        expected = F.linear(x.double(), packed.unpack().double(), bias.double())
        ours = packed.product(x, bias)
        # x is rounded by half a step of the largest's 32,512th (or 127th), for at most 64 neighbours, each time its weight
        groups = F.pad(x, (0, -d % 64)).unflatten(1, (-1, 64))
        step = (groups.abs().amax(-1, keepdim=True) / limit).expand_as(groups).flatten(1)[:, :d]
        bound = step.double() / 2 @ packed.unpack().double().abs().T
        # and float32 adds up the groups: some 50 sums as large as the result
        assert ((ours.double() - expected).abs() <= bound + 1e-5 + 1e-6 * expected.abs()).all()
        for row in range(rows):
            assert torch.equal(packed.product(x[row : row + 1], bias)[0], ours[row]), "alone as in the batch"
        assert torch.equal(packed.product(torch.zeros(1, d), None), torch.zeros(1, n))


@needs_native
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_comes_out_again(wrong: float) -> None:
    x, weight = torch.randn(2, 96), torch.randn(5, 96)
    x[1, 70] = wrong
    kinds = [kind(weight, inputs=inputs) for kind in (Int8, Int4) for inputs in (16, 8)]
    for ours in (native.linear(x, weight, None), *(packed.product(x, None) for packed in kinds)):
        assert ours[0].isfinite().all()
        assert not ours[1].isfinite().any()


@needs_native
@pytest.mark.parametrize("value", [1e30, 1e-30])
def test_sizes_at_the_edge(value: float) -> None:
    x, weight = torch.randn(3, 128) * value, torch.randn(7, 128)
    for packed in (Int8(weight), Int4(weight)):
        expected = x.double() @ packed.unpack().double().T
        torch.testing.assert_close(packed.product(x, None).double(), expected, rtol=0, atol=1e-3 * value)


def paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, counts: Tensor, scale: float, window: int) -> Tensor:
    """The equation, row by row in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b, count in enumerate(counts.tolist()):
        low = max(0, count - window) if window else 0
        where = [(int(table[b, p // k.shape[2]]), p % k.shape[2]) for p in range(low, count)]
        for h in range(q.shape[1] if where else 0):
            head = h // (q.shape[1] // k.shape[1])
            keys, values = (torch.stack([x[block, head, slot].double() for block, slot in where]) for x in (k, v))
            out[b, h] = (keys @ q[b, h].double() * scale).softmax(0) @ values
    return out


@needs_native
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(3, 3, 64), (6, 2, 17), (5, 1, 128), (4, 2, 32)])
@pytest.mark.parametrize("block", [4, 16, 19])
@pytest.mark.parametrize("window", [0, 7, 100])
def test_paged_attention(heads: int, kv_heads: int, width: int, block: int, window: int) -> None:
    counts = torch.tensor([1, 37, 0, 16, 53, 7, 38], dtype=torch.int32)
    n_blocks = 61
    # as a pool lays it out: layers and k, v between block and head
    memory = torch.randn(n_blocks, 2, 2, kv_heads, block, width)
    k, v = memory[:, 1, 0], memory[:, 1, 1]
    table = torch.randint(0, n_blocks, (len(counts), 53 // block + 2), dtype=torch.int32)
    q = torch.randn(len(counts), heads, width) * 3
    ours = native.paged_attention(q, k, v, table, counts, width**-0.5, window)
    # float32 scores up to about 10, then a softmax: 1e-6 of them, twice
    torch.testing.assert_close(ours.double(), paged(q, k, v, table, counts, width**-0.5, window), rtol=1e-5, atol=1e-5)
    for b in range(len(counts)):
        row = slice(b, b + 1)
        assert torch.equal(
            native.paged_attention(q[row], k, v, table[row], counts[row], width**-0.5, window)[0], ours[b]
        )


@needs_native
def test_paged_attention_of_far_apart_scores() -> None:
    """What the largest score drowns is 0, and neither NaN nor infinite."""
    q, k = torch.ones(1, 1, 8), torch.full((2, 1, 4, 8), -1e4)
    v = torch.randn(2, 1, 4, 8)
    k[1, 0, 2] = 1e4
    table, counts = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    assert torch.equal(native.paged_attention(q, k, v, table, counts, 1.0, 0)[0, 0], v[1, 0, 2])


@needs_native
def test_store() -> None:
    memory = torch.zeros(7, 2, 2, 3, 4, 5)
    k, v = memory[:, 1, 0], memory[:, 1, 1]
    table = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)
    projected = torch.randn(3, 1, 2, 3, 5)  # as one product leaves k and v side by side
    new_k, new_v = projected[:, 0, 0], projected[:, 0, 1]
    native.store(new_k, new_v, k, v, table, torch.tensor([6, -1, 3], dtype=torch.int32))
    expected = torch.zeros_like(memory)
    expected[2, 1, 0, :, 2], expected[2, 1, 1, :, 2] = new_k[0], new_v[0]
    expected[5, 1, 0, :, 3], expected[5, 1, 1, :, 3] = new_k[2], new_v[2]
    assert torch.equal(memory, expected)


@needs_native
def test_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is taken for a few rows without gradient, and for nothing else."""
    taken: list[int] = []
    real = native.linear

    def seen(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        taken.append(len(x))
        return real(x, weight, bias)

    monkeypatch.setattr(native, "linear", seen)
    layer, fused, x = Linear(17, 5), FusedLinear(17, {"q": 3, "k": 2}, bias={"k"}), torch.randn(2, 3, 17)

    with torch.no_grad():
        _ = layer(x), fused(x), layer(x[0, 0]), layer(x.transpose(0, 1)[1:])
        assert taken == [6, 6, 1, 4]
        # float32, 17 products in another order
        torch.testing.assert_close(layer(x.transpose(0, 1)), F.linear(x, layer.weight, layer.bias).transpose(0, 1))
        taken.clear()
        _ = layer(torch.randn(100, 17)), layer(x[:0]), linear(x.double(), layer.weight.double())
        with torch.autocast("cpu"):
            layer(x)
        with FlopCounterMode(display=False) as counter:
            layer(x)
        assert counter.get_total_flops() == 2 * 6 * 17 * 5
        torch.func.vmap(layer)(x)
    layer(x).sum().backward()
    assert taken == []


OTHER = """
import torch
from clearhead.kernels import native
from clearhead.quantization.integer import Int4, Int8
assert native.is_there(), native.why_not()
assert not native.has_tiles()
x, weight = torch.randn(5, 160), torch.randn(37, 160)
for packed in (Int8(weight), Int4(weight)):
    expected, bound = x.double() @ packed.unpack().double().T, x.abs().max() / 32512 / 2 * packed.unpack().abs().sum(1)
    assert ((packed.product(x, None).double() - expected).abs() <= bound + 1e-5).all()
    assert torch.equal(packed.product(x[3:4], None)[0], packed.product(x, None)[3])
torch.testing.assert_close(native.linear(x, weight, None), x @ weight.T, rtol=0, atol=1e-4)
q, k, v = (torch.randn(2, 45, 3, 48).transpose(1, 2) for _ in "qkv")
for causal in (False, True):
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    ours = native.text_attention(q, k, v, 48**-0.5, causal=causal)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5)
import clearhead as ch
from clearhead.quantization.integer import quantize
from clearhead.engine.native_step import NativeStep
for kind in ("int8", "int4", "w8a8", "w4a8"):
    model = ch.build(ch.preset("gpt2", n_layers=2, d_model=96, n_heads=4, d_ff=64, max_len=41, vocab_size=307), seed=0)
    quantize(model, kind)
    texts = ch.generate(model, [[5, 7], [11]], max_new_tokens=19, eos=())
    with torch.no_grad():
        run, NativeStep.run = NativeStep.run, lambda *_, **__: None
        assert ch.generate(model, [[5, 7], [11]], max_new_tokens=19, eos=()) == texts
        NativeStep.run = run
"""


@pytest.mark.slow
@needs_native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are its levels")
@pytest.mark.parametrize("level", ["x86-64-v4", "x86-64-v3", "x86-64"])
def test_lesser_processors(level: str, tmp_path: Path) -> None:
    """The kernels of processors that know less than this one: compiled for them, and run here."""
    if not native_library.LEVELS[level][1] <= native_library.processor_words():
        pytest.skip(f"this processor is below {level}")
    env = {**os.environ, "CLEARHEAD_CACHE": str(tmp_path), "CLEARHEAD_NATIVE": level}
    done = subprocess.run([sys.executable, "-c", OTHER], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr


WITHOUT = """
import torch
from clearhead.kernels import native
from clearhead.layers.linear import Linear
layer, x = Linear(5, 3), torch.randn(2, 5)
with torch.no_grad():
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
assert not native.is_there()
print(native.why_not())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"CLEARHEAD_NATIVE": "0"}, "CLEARHEAD_NATIVE=0"),
        ({"CLEARHEAD_NATIVE": "avx9"}, "CLEARHEAD_NATIVE=avx9 is not one of 0, 1, x86-64-v4-vnni"),
        ({"PATH": "", "CXX": ""}, r"no C\+\+ compiler was found; install g\+\+"),
        ({"CXX": "/bin/false"}, "/bin/false could not compile native.cpp"),
        pytest.param({"CLEARHEAD_CACHE": "/proc/nowhere"}, "/proc/nowhere", marks=needs_native),
    ],
)
def test_without(settings: dict[str, str], reason: str, tmp_path: Path) -> None:
    """Whatever is missing, the sums are right and the reason can be asked for."""
    env = {**os.environ, "CLEARHEAD_CACHE": str(tmp_path), **settings}
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(reason, done.stdout), done.stdout
    said = [line for line in done.stderr.splitlines() if not line.startswith("compiling the CPU kernels")]
    if settings.get("CLEARHEAD_NATIVE") == "0":
        assert said == []
    else:
        assert len(said) == 1, done.stderr
        assert re.search(f"no CPU kernels of our own: .*{reason}", said[0]), done.stderr
        again = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, env=env, check=True)
        assert ("no CPU kernels" in again.stderr) == (not env["CLEARHEAD_CACHE"].startswith(str(tmp_path))), "said once"
