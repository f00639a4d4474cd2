"""One token a row in one native call against the same blocks run one by one: every kind of stack, alone and in a batch."""

from __future__ import annotations

import copy
import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.config import Config, Generation
from clearhead.engine import gpu_step as one_token
from clearhead.engine import native_stack as prepared
from clearhead.engine import native_step as whole_step
from clearhead.engine.kv_cache import PagedCache, Pool
from clearhead.kernels import native
from clearhead.layers.linear import Linear
from clearhead.layers.masks import Pages
from clearhead.models import Decoder, EncoderDecoder, build
from clearhead.quantization.integer import quantize

pytestmark = pytest.mark.skipif(not native.is_there(), reason=str(native.why_not()))

SMALL: dict[str, Any] = dict(n_layers=3, d_model=32, n_heads=4, d_ff=37, vocab_size=61, max_len=41)
GPT2 = dict(shape="decoder", positions="learned", norm_first=True, feedforward="gelu_tanh", tie_embeddings=True)
LLAMA = dict(
    shape="decoder", positions="rotary", norm="rms", norm_first=True, feedforward="silu", gated=True, bias=False
)
ORIGINAL = dict(shape="encoder-decoder", positions="sinusoidal", n_decoder_layers=3, embedding_scale=True)
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "odd": {**GPT2, "d_model": 39, "n_heads": 3, "d_ff": 131},
    "llama": {**LLAMA, "n_kv_heads": 2},
    "interleaved": {**LLAMA, "rotary_interleaved": True, "n_kv_heads": 1},
    "mistral": {**LLAMA, "window": 5, "n_kv_heads": 2},
    "qwen": {**LLAMA, "qk_norm": True, "attention_bias": "qkv", "d_head": 16},
    "unbiased": {**GPT2, "bias": False, "feedforward": "relu2"},
    "no positions": {**GPT2, "positions": "none", "feedforward": "gelu", "gated": True},
    "original": ORIGINAL,
    "marian": {**ORIGINAL, "feedforward": "silu", "sinusoid_halves": True},
    "whisper": {**ORIGINAL, "norm_first": True, "feedforward": "gelu", "attention_bias": "qvo", "positions": "learned"},
    "cross qk-norm": {**ORIGINAL, "qk_norm": True, "norm": "rms", "norm_first": True},
}
OTHERS: dict[str, dict[str, Any]] = {
    "alibi": {**GPT2, "positions": "alibi"},
    "t5": {**ORIGINAL, "positions": "t5", "norm": "rms", "norm_first": True},
    "explicit": {**GPT2, "kernel": "explicit"},
    "without norms": {**GPT2, "norm": "none"},
}


def make(name: str) -> Decoder | EncoderDecoder:
    model = build(Config.from_dict({**SMALL, **{**KINDS, **OTHERS}[name]}), seed=3).eval()
    assert isinstance(model, Decoder | EncoderDecoder)
    with torch.no_grad():
        for each in model.parameters():  # biases and norms' weights too
            each.add_(torch.randn(each.shape, generator=torch.Generator().manual_seed(each.numel())) * 0.1)
    return model


class Steps:
    """Rows of several lengths, and a source each, in a pool's blocks; then one token a row at a time."""

    def __init__(self, model: Decoder | EncoderDecoder, counts: tuple[int, ...]) -> None:
        self.model, self.n = model, len(counts)
        config, width = model.config, 11
        self.pool = Pool(n_blocks=97, block=4, n_layers=3, n_kv_heads=config.n_kv_heads, d_head=config.d_head)
        torch.manual_seed(5)
        self.pool.memory.normal_()
        blocks = torch.randperm(96)[: 2 * self.n * width].int().view(2, self.n, width) + 1
        self.table, self.source = blocks[0], Pages(blocks[1], torch.randint(1, 40, (self.n,)).int(), 4)
        self.counts = torch.tensor(counts, dtype=torch.int32)

    def __call__(self, tokens: Tensor, rows: slice = slice(None)) -> Tensor:
        cache = PagedCache(self.pool, self.table[rows], self.counts[rows])
        if isinstance(self.model, Decoder):
            return self.model.states(tokens[rows, None], cache=cache)
        cache.look_at(Pages(self.source.table[rows], self.source.counts[rows], 4))
        return self.model.states(tokens[rows, None], None, cache=cache)


@contextmanager
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """The way through the modules."""
    with monkeypatch.context() as patch:
        patch.setattr(one_token, "fits", lambda *_: False)
        patch.setattr(whole_step.Steps, "write", lambda *_: None)
        yield


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Generator[list[int]]:
    """The rows of each native step."""
    taken: list[int] = []
    real = native.one_token

    def seen(step: native.Step) -> None:
        taken.append(step.rows)
        real(step)

    with monkeypatch.context() as patch:
        patch.setattr(native, "one_token", seen)
        yield taken


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_as_the_blocks(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(name)
    if kind != "fp32":
        quantize(model, kind)
    ours, theirs = Steps(model, (0, 3, 4, 17)), Steps(model, (0, 3, 4, 17))
    for _ in range(3):
        tokens = torch.randint(0, 61, (4,))
        with counted(monkeypatch) as taken:
            found = ours(tokens)
            alone = torch.cat([ours(tokens, slice(row, row + 1)) for row in range(4)])
        assert taken == [4, 1, 1, 1, 1]
        with by_blocks(monkeypatch):
            expected = theirs(tokens)
        # float32, sums in another order; a rounded input may fall on the other side, by 2^-15 of the largest
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if kind == "fp32" else 1e-3)
        assert torch.equal(alone, found), "alone as in the batch"
        torch.testing.assert_close(ours.pool.memory, theirs.pool.memory, rtol=0, atol=1e-5 if kind == "fp32" else 1e-3)
        ours.counts += 1
        theirs.counts += 1


@pytest.mark.parametrize("name", KINDS)
def test_the_same_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(name)
    model.generation = Generation(decoder_start=1, eos=(0,))
    prompts = [torch.randint(0, 61, (n,)).tolist() for n in (1, 7, 13)]

    def write() -> list[Any]:
        if isinstance(model, Decoder):
            return ch.generate(model, prompts, max_new_tokens=19, eos=())
        return [ch.translate(model, prompts, beams=beams, max_new_tokens=19) for beams in (1, 3)]

    with counted(monkeypatch) as taken:
        ours = write()
    assert len(taken) >= 18
    with by_blocks(monkeypatch):
        assert write() == ours


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_what_it_leaves_to_the_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(make(name), (0, 3, 4, 17))
    with counted(monkeypatch) as taken:
        steps(torch.randint(0, 61, (4,)))
    assert taken == []


@torch.no_grad()
def test_it_follows_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is changed, moved, replaced or watched between two steps, the next one knows."""
    model, tokens = make("whisper"), torch.randint(0, 61, (4,))
    assert isinstance(model, EncoderDecoder)
    steps = Steps(model, (0, 3, 4, 17))
    block: Any = model.decoder.blocks[1]

    def check(n_native: int) -> Tensor:
        with counted(monkeypatch) as taken:
            found = steps(tokens)
        assert len(taken) == n_native
        with by_blocks(monkeypatch):
            torch.testing.assert_close(found, steps(tokens), rtol=0, atol=1e-3)
        return found

    def double(linear: Linear) -> None:
        linear.weight = nn.Parameter(linear.weight * 2)

    def swap(linear: Linear) -> None:
        linear.weight.data = linear.weight.data * 0.5

    class Louder(Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    before = check(1)
    changes: list[tuple[Any, int]] = [
        (lambda: block.feedforward.down.weight.mul_(1.5), 1),
        (lambda: block.attention.qkv.bias.add_(0.5), 1),
        (lambda: double(block.feedforward.up), 1),
        (lambda: swap(block.cross.o_proj), 1),
        (lambda: setattr(block.feedforward, "down", Linear(37, 32)), 1),
        (lambda: setattr(block.cross, "o_proj", Louder(32, 32)), 0),
        (lambda: setattr(block.cross, "o_proj", Linear(32, 32)), 1),
        (lambda: setattr(model.decoder.blocks[2], "feedforward", block.feedforward), 1),
        (lambda: model.decoder.blocks.__setitem__(0, copy.deepcopy(block)), 1),
    ]
    for change, n_native in changes:
        change()
        after = check(n_native)
        assert not torch.allclose(before, after, atol=1e-4)
        before = after
    handle = block.cross_norm.register_forward_hook(lambda *_: None)
    check(0)
    handle.remove()
    check(1)
    quantize(model, "int8")
    check(1)
    model.train(False)
    with torch.autocast("cpu", torch.bfloat16):
        with counted(monkeypatch) as taken:
            steps(tokens)
        assert taken == []
    check(1)


@torch.no_grad()
def test_a_copy_is_another() -> None:
    model = make("llama")
    tokens = torch.randint(0, 61, (4,))
    first = Steps(model, (0, 3, 4, 17))(tokens)
    other = copy.deepcopy(model)
    for each in other.parameters():
        each.mul_(0.5)
    assert not torch.allclose(Steps(other, (0, 3, 4, 17))(tokens), first)
    assert torch.equal(Steps(model, (0, 3, 4, 17))(tokens), first)
    n = len(prepared._STACKS)  # pyright: ignore[reportPrivateUsage]
    del other
    gc.collect()
    assert len(prepared._STACKS) < n, "what was prepared goes with the model"  # pyright: ignore[reportPrivateUsage]


@torch.no_grad()
def test_training_and_many_rows_go_by_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make("gpt2"), torch.randint(0, 61, (4,))
    steps = Steps(model, (0, 3, 4, 17))
    with counted(monkeypatch) as taken:
        model.train()
        steps(tokens)
        model.eval()
        monkeypatch.setattr(prepared, "CPU_ROWS", 3)
        assert isinstance(model, Decoder)
        model.blocks[1] = copy.deepcopy(model.blocks[1])
        steps(tokens)
        assert taken == []
        steps(tokens, slice(0, 3))
    assert taken == [3]
