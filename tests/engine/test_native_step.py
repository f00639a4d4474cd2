"""The native decode step against the model itself: every kind of model, hooked, changed, replaced, and used by two threads."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead import kernels
from clearhead.config import Config, Generation
from clearhead.engine import native_step
from clearhead.engine.kv_cache import BlockTable, PagedCache, Pool
from clearhead.engine.native_step import NativeStep
from clearhead.generation import Engine, Request
from clearhead.kernels import huge_pages, native
from clearhead.kernels.decode_step import DecodeStep, Table
from clearhead.kernels.snapshot import Snapshot
from clearhead.layers.embedding import TokenHead
from clearhead.layers.linear import Linear
from clearhead.models import Decoder, EncoderDecoder, build
from clearhead.quantization.integer import quantize

pytestmark = pytest.mark.skipif(not native.is_there(), reason=str(native.why_not()))

COUNTS = 0, 3, 4, 17
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
    "embedding norm": {**GPT2, "embedding_norm": True, "tie_embeddings": False},
    "scaled": {
        **LLAMA,
        "n_kv_heads": 2,
        "embedding_scale": True,
        "head_scale": True,
        "rotary_scaling": "linear",
        "rotary_factor": 2.0,
    },
    "head bias": {**ORIGINAL, "head_bias": "fixed"},
    "pruned": {**GPT2, "pruned_heads": ("blocks.0.attention.1", "blocks.2.attention.0", "blocks.2.attention.3")},
    "pruned groups": {**LLAMA, "n_kv_heads": 2, "pruned_heads": ("blocks.1.attention.0", "blocks.1.attention.1")},
    "pruned cross": {**ORIGINAL, "pruned_heads": ("decoder.blocks.0.attention.3", "decoder.blocks.1.cross.0")},
}
OTHERS: dict[str, dict[str, Any]] = {
    "alibi": {**GPT2, "positions": "alibi"},
    "t5": {**ORIGINAL, "positions": "t5", "norm": "rms", "norm_first": True},
    "explicit": {**GPT2, "kernel": "explicit"},
    "without norms": {**GPT2, "norm": "none"},
    "head transform": {**GPT2, "head_transform": True},
}


def make(name: str) -> Decoder | EncoderDecoder:
    model = build(Config.from_dict({**SMALL, **{**KINDS, **OTHERS}[name]}), seed=3).eval()
    assert isinstance(model, Decoder | EncoderDecoder)
    with torch.no_grad():
        for each in model.parameters():  # biases and norms' weights too
            each.add_(torch.randn(each.shape, generator=torch.Generator().manual_seed(each.numel())) * 0.1)
    return model


class Rows:
    """Rows of several lengths in a pool's blocks, as a runner holds them, and two ways to decode their next tokens."""

    def __init__(self, model: Decoder | EncoderDecoder) -> None:
        self.model, self.step = model, NativeStep(model)
        config, rng = model.config, np.random.default_rng(5)
        blocks: Any = (model if isinstance(model, Decoder) else model.decoder).blocks
        sizes: Any = dict(n_layers=3, n_kv_heads=config.n_kv_heads, d_head=config.d_head)
        n_cross_heads = [block.cross.n_kv_heads for block in blocks if block.cross is not None]
        self.pool = Pool(n_blocks=97, block=4, n_cross_heads=n_cross_heads, **sizes)
        self.pool.memory.copy_(torch.randn(self.pool.memory.shape, generator=torch.Generator().manual_seed(5)))
        tables = rng.permutation(96)[:88].astype(np.int32).reshape(2, 4, 11) + 1
        self.own = Table(tables[0].copy(), np.array(COUNTS, np.int32))
        self.source = Table(tables[1].copy(), rng.integers(1, 40, 4).astype(np.int32))

    def native(self, tokens: Tensor, n: int = 4) -> tuple[Tensor | None, Tensor]:
        """Logits, and the tokens that took the place of the given ones."""
        held = tokens.clone()
        with torch.no_grad():
            return self.step.run(held[:n], self.pool, self.own, self.source), held

    @torch.no_grad()
    def by_model(self, tokens: Tensor) -> Tensor:
        table, counts, theirs, n_theirs = (torch.from_numpy(each) for each in (*self.own, *self.source))
        cache = PagedCache(self.pool, table, counts)
        if isinstance(self.model, Decoder):
            return self.model.project(self.model.states(tokens[:, None], cache=cache))[:, 0]
        cache.attach_source(BlockTable(theirs, n_theirs, 4))
        return self.model.project(self.model.states(tokens[:, None], None, cache=cache))[:, 0]


@contextmanager
def without_native_step(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(NativeStep, "run", lambda *_, **__: None)
        yield


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Generator[list[int]]:
    """The rows of each native step."""
    taken: list[int] = []
    real = DecodeStep.run

    def run(self: DecodeStep, tokens: Tensor, *args: Any) -> Tensor:
        taken.append(len(tokens))
        return real(self, tokens, *args)

    with monkeypatch.context() as patch:
        patch.setattr(DecodeStep, "run", run)
        yield taken


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("name", KINDS)
def test_as_the_model(name: str, kind: str) -> None:
    model = make(name)
    if kind != "fp32":
        quantize(model, kind)
    ours, theirs = Rows(model), Rows(model)
    for _ in range(3):
        tokens = torch.randint(0, SMALL["vocab_size"], (4,))
        found, likeliest = ours.native(tokens)
        expected = theirs.by_model(tokens)
        assert found is not None
        # float32, sums in another order; a rounded input may fall on the other side, by 2^-15 of the largest
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if kind == "fp32" else 3e-3)
        torch.testing.assert_close(ours.pool.memory, theirs.pool.memory, rtol=0, atol=1e-5 if kind == "fp32" else 1e-3)
        assert torch.equal(likeliest, found.argmax(-1))
        alone, _ = ours.native(tokens, n=1)
        assert alone is not None
        assert torch.equal(alone, found[:1]), "alone as in the batch"
        ours.own.counts[:] += 1
        theirs.own.counts[:] += 1


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4", "w8a8", "w4a8"])
@pytest.mark.parametrize("d_head", [1, 7, 10, 15, 16, 24])
def test_the_same_bits_alone_and_in_a_batch(d_head: int, kind: str) -> None:
    """Of any head width, with any number of threads; widths at which no row of a matrix ends with a register."""
    wide = dict(d_head=d_head, d_model=96, d_ff=371, vocab_size=761)
    model = build(Config.from_dict({**SMALL, **GPT2, **wide}), seed=3).eval()
    assert isinstance(model, Decoder)
    rows = Rows(model if kind == "fp32" else quantize(model, kind))
    tokens, before, found = torch.tensor([3, 5, 7, 11]), torch.get_num_threads(), list[Tensor]()
    try:
        for n_threads in (1, 3):
            torch.set_num_threads(n_threads)
            for n in (4, 3, 1):
                logits, _ = rows.native(tokens, n)
                assert logits is not None
                found.append(logits)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(logits, found[0][: len(logits)]) for logits in found)


@pytest.mark.slow
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
    with without_native_step(monkeypatch):
        assert write() == ours


@pytest.mark.parametrize("name", OTHERS)
def test_what_it_leaves_to_the_model(name: str) -> None:
    tokens = torch.randint(0, 61, (4,))
    found, same = Rows(make(name)).native(tokens)
    assert found is None
    assert torch.equal(same, tokens)


def test_training_and_many_rows_are_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make("gpt2"), torch.randint(0, 61, (4,))
    rows = Rows(model)
    model.train()
    assert rows.native(tokens)[0] is None
    model.eval()
    block: Any = model.get_submodule("blocks.1")
    block.train().dropout = 0.5
    assert rows.native(tokens)[0] is None, "a part of it"
    model.eval()
    monkeypatch.setattr(kernels, "CPU_ROWS", 3)
    assert isinstance(model, Decoder)
    model.blocks[1] = copy.deepcopy(model.blocks[1])
    assert rows.native(tokens)[0] is None
    assert rows.native(tokens, 3)[0] is not None


def test_logits_in_the_memory_of_the_last_ones() -> None:
    """Only where the caller is done with these: a step of fewer rows, too, writes to the same place, with the same bits."""
    rows, tokens = Rows(make("gpt2")), torch.tensor([3, 5, 7, 11])
    with torch.no_grad():
        kept, _ = rows.native(tokens)
        found = [rows.step.run(tokens[:n].clone(), rows.pool, rows.own, rows.source, reuse=True) for n in (4, 2)]
        other, _ = rows.native(tokens)
    first, second, kept, other = (each for each in (*found, kept, other) if each is not None)
    assert first.data_ptr() == second.data_ptr()
    assert kept.data_ptr() != other.data_ptr()
    assert torch.equal(first, kept)
    assert torch.equal(second, kept[:2])


def test_the_first_of_the_largest() -> None:
    """As torch's argmax: of equal ones the first, and NaN before all. The vocabulary is of several pieces."""
    model = ch.build(ch.preset("gpt2", n_layers=3, d_model=64, n_heads=4, d_ff=64, vocab_size=1009, max_len=41), seed=0)
    assert isinstance(model, Decoder)
    model.head.bias = nn.Parameter(torch.zeros(1009))
    rows, tokens, bias = Rows(model.eval()), torch.randint(0, 1009, (4,)), model.head.bias.data
    for wrong in (1e9, float("inf"), float("nan"), -float("inf")):
        for places in ([7], [1008, 640, 16], range(1009)):
            bias.zero_()[list(places)] = wrong
            found, likeliest = rows.native(tokens)
            assert found is not None
            assert torch.equal(likeliest, found.argmax(-1)), (wrong, places)


class Louder(Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def new_memory(module: Any) -> None:
    module.weight.data = module.weight.data * 1.5


def transpose(module: Any) -> None:
    """In the same memory."""
    module.weight.data = module.weight.data.T


def replace_forward(module: nn.Module) -> None:
    real = module.forward
    module.forward = lambda *args, **named: real(*args, **named) * 2


WHISPER_CHANGES: list[
    tuple[Callable[[Any, Any], object], bool]
] = [  # of (model, decoder block 1), and whether still native
    (lambda model, _: model.tokens.weight.data.mul_(1.5), True),
    (lambda model, _: new_memory(model.tokens), True),
    (lambda model, _: setattr(model.tokens, "weight", nn.Parameter(torch.randn(61, 32))), True),
    (lambda model, _: new_memory(model.decoder.positions), True),
    (lambda model, _: setattr(model, "head", TokenHead(d_model=32, vocab_size=61)), True),
    (lambda model, _: setattr(model.head, "bias", nn.Parameter(torch.randn(61))), True),
    (lambda model, _: setattr(model.head, "scale", 0.7), True),
    (lambda model, _: setattr(model.tokens, "factor", 3.0), True),
    (lambda model, _: setattr(model.decoder, "norm", nn.LayerNorm(32, eps=0.5)), True),
    (lambda model, _: setattr(model.decoder.norm, "eps", 0.1), True),
    (lambda _, block: block.feedforward.down.weight.data.mul_(1.5), True),
    (lambda _, block: block.attention.qkv.bias.data.add_(0.5), True),
    (lambda _, block: setattr(block.feedforward.up, "weight", nn.Parameter(block.feedforward.up.weight * 2)), True),
    (lambda _, block: new_memory(block.cross.o_proj), True),
    (lambda _, block: setattr(block.feedforward, "down", Linear(37, 32)), True),
    (lambda _, block: transpose(block.cross.o_proj), False),
    (lambda _, block: setattr(block.cross, "o_proj", Louder(32, 32)), False),
    (lambda _, block: setattr(block.cross, "o_proj", Linear(32, 32)), True),
    (lambda model, block: setattr(model.decoder.blocks[2], "feedforward", block.feedforward), True),
    (lambda model, block: model.decoder.blocks.__setitem__(0, copy.deepcopy(block)), True),
    (lambda _, block: setattr(block.cross.heads, "scale", 0.9), True),
    (lambda _, block: setattr(block.attention_norm, "eps", 0.3), True),
    (lambda _, block: setattr(block.feedforward, "activation", "relu"), False),  # the others have another one
    (lambda model, _: [setattr(each.feedforward, "activation", "relu") for each in model.decoder.blocks], True),
    (lambda model, _: [setattr(each, "norm_first", False) for each in model.decoder.blocks], True),
    (lambda _, block: replace_forward(block.feedforward), False),
    (lambda _, block: delattr(block.feedforward, "forward"), True),
    (lambda _, block: setattr(block, "feedforward", nn.Identity()), False),
    (lambda model, block: setattr(block, "feedforward", copy.deepcopy(model.decoder.blocks[0].feedforward)), True),
    (lambda model, _: quantize(model, "int8"), True),
]


def test_it_follows_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is changed, replaced or hooked between two steps, the next one computes what the model does, or says no."""
    model, tokens = make("whisper"), torch.randint(0, 61, (4,))
    assert isinstance(model, EncoderDecoder)
    rows = Rows(model)
    before = rows.by_model(tokens)
    for at, (change, is_native) in enumerate(WHISPER_CHANGES):
        change(model, model.decoder.blocks[1])
        found, _ = rows.native(tokens)
        assert (found is not None) == is_native, at
        expected = rows.by_model(tokens)
        if found is not None:
            torch.testing.assert_close(
                found, expected, rtol=0, atol=1e-3, msg=lambda said, at=at: f"change {at}: {said}"
            )
        assert not torch.allclose(expected, before, atol=1e-4), at
        before = expected
    for module in (model.head, model.decoder.get_submodule("blocks.1.cross_norm")):
        handle = module.register_forward_hook(lambda *_: None)
        assert rows.native(tokens)[0] is None
        handle.remove()
        assert rows.native(tokens)[0] is not None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert rows.native(tokens)[0] is None, "a hook on all modules"
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert rows.native(tokens)[0] is None
    for owner, name in ((model, "states"), (model, "project"), (model.decoder, "run")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, getattr(owner, name))
            assert rows.native(tokens)[0] is None
    assert rows.native(tokens)[0] is not None
    assert rows.step.run(tokens, rows.pool, rows.own, rows.source) is None, "not while gradients are kept"


def test_a_copy_is_another_model() -> None:
    model = make("llama")
    tokens = torch.randint(0, 61, (4,))
    first, _ = Rows(model).native(tokens)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(0.5)
    second, _ = Rows(other).native(tokens)
    again, _ = Rows(model).native(tokens)
    assert first is not None
    assert second is not None
    assert again is not None
    assert not torch.allclose(second, first)
    assert torch.equal(again, first)


def test_rotary_tables_follow_their_base() -> None:
    model, tokens = make("llama"), torch.randint(0, 61, (4,))
    assert isinstance(model, Decoder)
    rows = Rows(model)
    before, _ = rows.native(tokens)
    model.positions.base = 30.0  # type: ignore[assignment]
    after, _ = rows.native(tokens)
    assert after is not None
    assert before is not None
    assert not torch.allclose(before, after, atol=1e-4)
    torch.testing.assert_close(after, rows.by_model(tokens), rtol=0, atol=1e-5)


def test_between_two_runs_the_model_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a run it is looked at once; in the next one anew. A hook counts at once, and step by step everything does."""
    model = make("llama")
    assert isinstance(model, Decoder)
    looks: list[None] = []
    real = Snapshot.is_current
    monkeypatch.setattr(Snapshot, "is_current", lambda self: looks.append(None) or real(self))  # pyright: ignore
    first = ch.generate(model, [[5, 7]], max_new_tokens=9, eos=())
    assert len(looks) <= 1
    model.head.weight = nn.Parameter(-model.head.weight)  # type: ignore[operator]
    second = ch.generate(model, [[5, 7]], max_new_tokens=9, eos=())
    assert first != second
    with without_native_step(monkeypatch):
        assert ch.generate(model, [[5, 7]], max_new_tokens=9, eos=()) == second
    engine = Engine(model, max_tokens=160)
    ticket = engine.submit(Request(prompt=[5, 7], max_new_tokens=9, eos=()))
    looks.clear()
    while engine.is_busy:
        engine.step()
    assert len(looks) == 8
    assert ticket.ids == second[0]


def test_it_goes_with_the_model() -> None:
    model = make("gpt2")
    Rows(model).native(torch.randint(0, 61, (4,)))
    n = len(native_step._PREPARED)  # pyright: ignore[reportPrivateUsage]
    del model
    gc.collect()
    assert len(native_step._PREPARED) < n  # pyright: ignore[reportPrivateUsage]


def test_large_models_move_to_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first steps, a part at each step; what is computed stays what it was."""
    monkeypatch.setattr(native_step, "LARGE_MODEL", 2**10)
    monkeypatch.setattr(huge_pages, "PIECE", 2**21)
    config = dict(n_layers=3, d_model=256, n_heads=4, d_ff=1024, vocab_size=8_009, max_len=41)
    model = ch.build(ch.preset("gpt2", **config), seed=0).eval()
    assert isinstance(model, Decoder)
    rows, tokens = Rows(model), torch.randint(0, 8_009, (4,))
    addresses = [each.data_ptr() for each in model.parameters()]
    first, _ = rows.native(tokens)
    for _ in range(30):
        found, _ = rows.native(tokens)
        assert found is not None
        assert first is not None
        assert torch.equal(found, first)
    assert addresses == [each.data_ptr() for each in model.parameters()]


@pytest.mark.slow
def test_two_threads_one_model() -> None:
    """Each call has its own state: texts of two threads are those of one."""
    model = ch.build(ch.preset("gpt2", n_layers=4, d_model=64, n_heads=4, d_ff=128, vocab_size=509, max_len=80), seed=0)
    assert isinstance(model, Decoder)
    prompts = [[at + 1, 7 * at + 2] for at in range(20)]

    def write(_: int = 0) -> list[list[int]]:
        return [ch.generate(model, [prompt], max_new_tokens=60, eos=())[0] for prompt in prompts]

    expected = write()
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(write, range(2)):
            assert found == expected


@pytest.mark.slow
def test_generating_while_another_thread_trains() -> None:
    """Nothing breaks: each text has its tokens, each step its finite loss, and afterwards both agree with the plain forward."""
    model = ch.build(ch.preset("gpt2", n_layers=4, d_model=64, n_heads=4, d_ff=128, vocab_size=509, max_len=80), seed=0)
    assert isinstance(model, Decoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, is_over = torch.randint(0, 509, (2, 33)), threading.Event()
    losses: list[float] = []

    def train() -> None:
        while not is_over.is_set():
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        texts = [ch.generate(model, [[at + 1, 2]], max_new_tokens=60, eos=())[0] for at in range(20)]
        is_over.set()
        training.result()
    assert {len(text) for text in texts} == {60}
    assert all(0 <= token < 509 for text in texts for token in text)
    assert losses[-1] < losses[0]
    text = ch.generate(model, [[1, 2]], max_new_tokens=20, eos=())[0]
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, *text]]))[0, 1:-1].argmax(-1).tolist() == text


def test_unknown_numbers_are_refused() -> None:
    """native.cpp computes no kind that it does not know."""
    model = make("gpt2")
    rows, tokens = Rows(model), torch.randint(0, 61, (4,))
    assert rows.native(tokens)[0] is not None
    assert rows.step.prepared is not None
    assert rows.step.prepared.weights is not None
    raw: Any = rows.step.prepared.weights.model
    for name, value in (("activation", 5), ("activation", -1)):
        real = getattr(raw, name)
        setattr(raw, name, value)
        with pytest.raises(RuntimeError, match="does not know"):
            rows.native(tokens)
        setattr(raw, name, real)
    for part, name, value in ((raw.final_norm, "kind", 3), (raw.head, "bits", 16), (raw.embedding, "bits", 4)):
        real = getattr(part, name)
        setattr(part, name, value)
        with pytest.raises(RuntimeError, match="does not know"):
            rows.native(tokens)
        setattr(part, name, real)
    assert rows.native(tokens)[0] is not None
