"""Every fast path against the plain equations in float64, on configs that hypothesis draws: it computes the same, or says no.

On a CPU: the forward pass with its kernels, and the engine with the native decode step. On a GPU, where there is one: the engine
with its Triton kernels and CUDA graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clearhead.config import Config
from clearhead.engine.allocator import BLOCK_SIZE
from clearhead.engine.engine import Engine
from clearhead.engine.request import Request
from clearhead.kernels import native
from clearhead.kernels.decode_step import DecodeStep
from clearhead.layers.linear import ACTIVATIONS
from clearhead.models import Decoder, EncoderDecoder, build
from clearhead.quantization.integer import Quantized, quantize
from tests.models.drawn import fields

Model = Decoder | EncoderDecoder

PROMPTS = [5, 7, 11], [3], [2, 41, 17, 19, 23]
SOURCES = [13, 29, 31, 37], [43], [47, 5, 3]
NEW = 6  # tokens
# float32 against float64, at most three layers; an input of packed weights is rounded by 2^-15 of the largest.
WITHIN = {"fp32": 3e-5, "int8": 6e-3, "int4": 6e-3}

needs_native = pytest.mark.skipif(not native.is_there(), reason=str(native.why_not()))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


Drawn = tuple[dict[str, Any], str, list[set[int]]]


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Fields of a config, how its weights are held, and of each attention the key/value heads to prune: never all."""
    kind = draw(st.sampled_from(["fp32", "fp32", "int8", "int4"]))
    wide = {"d_model": 32} if draw(st.booleans()) else {}  # int4 needs a multiple of 32
    chosen = draw(fields(shapes=("decoder", "encoder-decoder"), only_tokens=True, **wide))
    n = chosen["n_kv_heads"]
    gone = draw(st.lists(st.sets(st.integers(0, n - 1), max_size=n - 1), max_size=8)) if draw(st.booleans()) else []
    return chosen, kind, gone


def make(chosen: dict[str, Any], gone: Sequence[set[int]] = ()) -> Model:
    config = Config.from_dict(chosen)
    group = config.n_heads // config.n_kv_heads
    pruned = [
        f"{place}.{kv * group + i}"
        for place, heads in zip(config.attentions, gone, strict=False)
        for kv in sorted(heads)
        for i in range(group)
    ]
    model = build(Config.from_dict({**chosen, "pruned_heads": tuple(pruned)}), seed=1).eval()
    assert isinstance(model, Decoder | EncoderDecoder)
    with torch.no_grad():
        for each in model.parameters():  # biases and the weights of norms too
            each.add_(torch.randn(each.shape) * 0.1)
    return model


def reference_of(model: Model, packed: Model | None = None) -> Model:
    """The same model in float64, which no kernel of ours takes; with the weights that `packed` stands for."""
    wide = copy.deepcopy(model).double()
    for name, module in () if packed is None else packed.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(weight, Quantized):
            wide.get_submodule(name).weight = nn.Parameter(weight.unpack().double())
    return wide


@torch.no_grad()
def logits_of(model: Model, prompt: Sequence[int], source: Sequence[int]) -> Tensor:
    """The scores after each token, by the plain forward pass."""
    tokens = torch.tensor([prompt])
    return (model(tokens) if isinstance(model, Decoder) else model(torch.tensor([source]), tokens))[0]


def write(model: Model, n: int = NEW) -> list[list[int]]:
    """What the engine writes greedily after each prompt, all in one batch."""
    engine = Engine(model, max_tokens=400, max_rows=4)
    has_source = isinstance(model, EncoderDecoder)
    tickets = [
        engine.submit(Request(prompt=prompt, source=source if has_source else None, max_new_tokens=n, eos=()))
        for prompt, source in zip(PROMPTS, SOURCES, strict=True)
    ]
    engine.run()
    return [list(ticket.ids) for ticket in tickets]


def assert_greedy(texts: list[list[int]], reference: Model, within: float) -> None:
    """Each token has the highest score that the reference gives after what came before, but for rounding."""
    for prompt, source, text in zip(PROMPTS, SOURCES, texts, strict=True):
        logits = logits_of(reference, [*prompt, *text], source)[len(prompt) - 1 : -1]
        lost = logits.amax(-1) - logits.gather(-1, torch.tensor(text)[:, None])[:, 0]
        assert lost.max() <= 2 * within, (prompt, text, lost)


def is_for_native_step(config: Config) -> bool:
    n_layers = config.n_layers if config.shape == "decoder" else config.n_decoder_layers
    plain = config.positions not in ("alibi", "t5")
    plain = plain and all(pattern.block % BLOCK_SIZE == 0 for pattern in config.patterns)
    return plain and config.norm != "none" and not config.head_transform and n_layers > 0


class Seen:
    """The logits of each native decode step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[Tensor] = []
        real = DecodeStep.run

        def run(step: DecodeStep, *args: Any) -> Tensor:
            logits = real(step, *args)
            self.logits.append(logits.clone())  # the next step writes to the same memory
            return logits

        monkeypatch.setattr(DecodeStep, "run", run)


@pytest.mark.slow
@settings(max_examples=40)
@given(drawn())
@torch.no_grad()
def test_forward(drawn: Drawn) -> None:
    """Few rows and many: kernels for products, norms and attention in the plain forward pass."""
    chosen, kind, gone = drawn
    model = make(chosen, gone)
    packed = None if kind == "fp32" else quantize(copy.deepcopy(model), kind)
    reference = reference_of(model, packed)
    for T in (3, 31):
        tokens, source = torch.randint(0, 53, (2, T)), torch.randint(0, 53, (2, 19))
        inputs = (tokens,) if isinstance(model, Decoder) else (source, tokens)
        found, expected = (packed or model)(*inputs), reference(*inputs)
        torch.testing.assert_close(
            found.double(), expected, rtol=0, atol=WITHIN[kind] * (1 + float(expected.abs().max()))
        )


@pytest.mark.slow
@needs_native
@settings(max_examples=80)
@given(drawn())
@torch.no_grad()
def test_native_step(drawn: Drawn) -> None:
    chosen, kind, gone = drawn
    model = make(chosen, gone)
    packed = None if kind == "fp32" else quantize(copy.deepcopy(model), kind)
    reference = reference_of(model, packed)
    with pytest.MonkeyPatch.context() as patch:
        seen = Seen(patch)
        texts = write(packed or model)
    assert len(seen.logits) == (NEW - 1 if is_for_native_step(model.config) else 0)
    for row, (prompt, source, text) in enumerate(zip(PROMPTS, SOURCES, texts, strict=True)):
        expected = logits_of(reference, [*prompt, *text], source)[len(prompt) : -1]
        within = WITHIN[kind] * (1 + float(expected.abs().max()))
        if seen.logits:
            found = torch.stack([logits[row] for logits in seen.logits])
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=within)
    assert_greedy(texts, reference, WITHIN[kind] * 30)


@pytest.mark.slow
@needs_native
@settings(max_examples=20)
@given(fields(shapes=("decoder", "encoder-decoder"), only_tokens=True), st.integers(0, 10**6))
@torch.no_grad()
def test_a_hook_sees_every_step(chosen: dict[str, Any], which: int) -> None:
    model = make(chosen)
    stack = model if isinstance(model, Decoder) else model.decoder
    called = [model.tokens, model.head, *(module for block in stack.layers for module in block.modules())]
    module, n_calls = called[which % len(called)], 0

    def hook(*_: object) -> None:
        nonlocal n_calls
        n_calls += 1

    expected = write(model)
    with pytest.MonkeyPatch.context() as patch:
        seen = Seen(patch)
        handle = module.register_forward_hook(hook)
        assert write(model) == expected
        assert seen.logits == []
        handle.remove()
        assert write(model) == expected
        assert bool(seen.logits) == is_for_native_step(model.config)
    if isinstance(model, Decoder):
        assert n_calls >= NEW


@pytest.mark.parametrize("gated", [False, True])
def test_a_new_activation_is_computed_by_the_model(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No fast path takes an activation that it does not know for another one."""
    monkeypatch.setitem(ACTIVATIONS, "tanh", torch.tanh)
    sizes = dict(d_model=32, n_layers=2, n_heads=2, d_ff=64, vocab_size=53, max_len=61)
    model = make(dict(shape="decoder", positions="rotary", feedforward="relu", gated=gated, **sizes))
    before = write(model)
    assert isinstance(model, Decoder)
    for block in model.layers:
        block.feedforward.activation = "tanh"
    reference, tokens = reference_of(model), torch.randint(0, 53, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).double(), reference(tokens), rtol=0, atol=1e-4)
    seen = Seen(monkeypatch)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        texts = write(model.to(device))
        assert texts != before
        assert_greedy(texts, reference, WITHIN["fp32"] * 30)
    assert seen.logits == []


@needs_gpu
@settings(max_examples=40)
@given(drawn())
@torch.no_grad()
def test_engine_on_a_gpu(drawn: Drawn) -> None:
    chosen, kind, gone = drawn
    model = make(chosen, gone)
    packed = None if kind == "fp32" else quantize(copy.deepcopy(model), kind)
    reference = reference_of(model, packed)
    assert_greedy(write((packed or model).to("cuda")), reference, WITHIN[kind] * 30)
