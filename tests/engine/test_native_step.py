"""A whole step in one native call against the model itself: every kind of model, watched, changed and replaced."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.engine import native_step as whole_step
from clearhead.engine.kv_cache import PagedCache, Pool
from clearhead.generation import Engine, Request
from clearhead.kernels import huge_pages as large_pages
from clearhead.kernels import native
from clearhead.layers.embedding import TokenHead
from clearhead.layers.masks import Pages
from clearhead.models import Decoder, EncoderDecoder
from clearhead.quantization.integer import quantize
from tests.engine.test_gpu_step import KINDS, OTHERS, SMALL, by_blocks, make

pytestmark = pytest.mark.skipif(not native.is_there(), reason=str(native.why_not()))

COUNTS = 0, 3, 4, 17
MORE: dict[str, dict[str, Any]] = {
    "embedding norm": {**KINDS["gpt2"], "embedding_norm": True, "tie_embeddings": False},
    "scaled": {
        **KINDS["llama"],
        "embedding_scale": True,
        "head_scale": True,
        "rotary_scaling": "linear",
        "rotary_factor": 2.0,
    },
    "head bias": {**KINDS["marian"], "head_bias": "fixed"},
}


class Rows:
    """Rows of several lengths in a pool's blocks, as a runner holds them, and two ways to read their tokens."""

    def __init__(self, model: Decoder | EncoderDecoder) -> None:
        self.model, self.steps = model, whole_step.Steps(model)
        config, rng = model.config, np.random.default_rng(5)
        self.pool = Pool(n_blocks=97, block=4, n_layers=3, n_kv_heads=config.n_kv_heads, d_head=config.d_head)
        self.pool.memory.copy_(torch.randn(self.pool.memory.shape, generator=torch.Generator().manual_seed(5)))
        blocks = rng.permutation(96)[:88].astype(np.int32).reshape(2, 4, 11) + 1
        self.pages = blocks[0].copy(), np.array(COUNTS, np.int32)
        self.source = blocks[1].copy(), rng.integers(1, 40, 4).astype(np.int32)

    def at_once(self, tokens: Tensor, n: int = 4) -> tuple[Tensor | None, Tensor]:
        """Logits, and the tokens that were put in place of the given ones."""
        held = tokens.clone()
        with torch.no_grad():
            return self.steps.write(held[:n], self.pool, self.pages, self.source), held

    @torch.no_grad()
    def by_model(self, tokens: Tensor) -> Tensor:
        table, counts, theirs, n_theirs = (torch.from_numpy(each) for each in (*self.pages, *self.source))
        cache = PagedCache(self.pool, table, counts)
        if isinstance(self.model, Decoder):
            return self.model.project(self.model.states(tokens[:, None], cache=cache))[:, 0]
        cache.look_at(Pages(theirs, n_theirs, 4))
        return self.model.project(self.model.states(tokens[:, None], None, cache=cache))[:, 0]


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("name", [*KINDS, *MORE])
def test_as_the_model(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, name, {**KINDS, **MORE}[name])
    model = make(name)
    if kind != "fp32":
        quantize(model, kind)
    ours, theirs = Rows(model), Rows(model)
    for _ in range(3):
        tokens = torch.randint(0, SMALL["vocab_size"], (4,))
        found, likeliest = ours.at_once(tokens)
        with by_blocks(monkeypatch):
            expected = theirs.by_model(tokens)
        assert found is not None
        # float32, sums in another order; a rounded input may fall on the other side, by 2^-15 of the largest
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if kind == "fp32" else 3e-3)
        torch.testing.assert_close(ours.pool.memory, theirs.pool.memory, rtol=0, atol=1e-5 if kind == "fp32" else 1e-3)
        assert torch.equal(likeliest, found.argmax(-1))
        alone, _ = ours.at_once(tokens, n=1)
        assert alone is not None
        assert torch.equal(alone, found[:1]), "alone as in the batch"
        ours.pages[1][:] += 1
        theirs.pages[1][:] += 1


@pytest.mark.parametrize("name", OTHERS)
def test_what_it_leaves_to_the_model(name: str) -> None:
    tokens = torch.randint(0, 61, (4,))
    found, same = Rows(make(name)).at_once(tokens)
    assert found is None
    assert torch.equal(same, tokens)


def test_the_first_of_the_largest() -> None:
    """As torch's argmax: of equal ones the first, and NaN before all. The vocabulary is of several pieces."""
    model = ch.build(ch.preset("gpt2", n_layers=3, d_model=64, n_heads=4, d_ff=64, vocab_size=1009, max_len=41), seed=0)
    assert isinstance(model, Decoder)
    model.head.bias = nn.Parameter(torch.zeros(1009))
    rows, tokens, bias = Rows(model.eval()), torch.randint(0, 1009, (4,)), model.head.bias.data
    for wrong in (1e9, float("inf"), float("nan"), -float("inf")):
        for places in ([7], [1008, 640, 16], range(1009)):
            bias.zero_()[list(places)] = wrong
            found, likeliest = rows.at_once(tokens)
            assert found is not None
            assert torch.equal(likeliest, found.argmax(-1)), (wrong, places)


def test_it_follows_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is changed, replaced or watched around the blocks between two steps, the next one knows."""
    model, tokens = make("whisper"), torch.randint(0, 61, (4,))
    rows = Rows(model)
    before = torch.zeros(4, 61)

    def check(at_once: bool = True) -> None:
        nonlocal before
        found, _ = rows.at_once(tokens)
        assert (found is not None) == at_once
        with by_blocks(monkeypatch):
            expected = rows.by_model(tokens)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
        assert not torch.allclose(expected, before, atol=1e-4)
        before = expected

    def swap(module: Any) -> None:
        module.weight.data = module.weight.data * 1.5

    check()
    assert isinstance(model, EncoderDecoder)
    head, down = TokenHead(d_model=32, vocab_size=61), model.decoder.get_submodule("blocks.0.feedforward.down")
    changes: list[Any] = [
        lambda: model.tokens.weight.data.mul_(1.5),
        lambda: swap(model.tokens),
        lambda: setattr(model.tokens, "weight", nn.Parameter(torch.randn(61, 32))),
        lambda: swap(model.decoder.positions),
        lambda: setattr(model, "head", head),
        lambda: setattr(head, "bias", nn.Parameter(torch.randn(61))),
        lambda: setattr(model.decoder, "norm", nn.LayerNorm(32, eps=0.5)),
        lambda: setattr(down, "weight", nn.Parameter(torch.randn(32, 37))),
        lambda: quantize(model, "int8"),
    ]
    for change in changes:
        change()
        check()
    seen: list[Tensor] = []
    handle = model.head.register_forward_hook(lambda *args: seen.append(args[2]))
    assert rows.at_once(tokens)[0] is None
    handle.remove()
    assert rows.at_once(tokens)[0] is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert rows.at_once(tokens)[0] is None
    with monkeypatch.context() as patch:
        patch.setattr(model, "states", model.states)
        assert rows.at_once(tokens)[0] is None
    assert rows.steps.write(tokens, rows.pool, rows.pages, rows.source) is None, "not while gradients are kept"


def test_rotary_tables_follow_their_base() -> None:
    model, tokens = make("llama"), torch.randint(0, 61, (4,))
    assert isinstance(model, Decoder)
    rows = Rows(model)
    before, _ = rows.at_once(tokens)
    model.positions.base = 30.0  # type: ignore[assignment]
    after, _ = rows.at_once(tokens)
    assert after is not None
    assert before is not None
    assert not torch.allclose(before, after, atol=1e-4)
    torch.testing.assert_close(after, rows.by_model(tokens), rtol=0, atol=1e-5)


def test_between_two_runs_the_model_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a run it is looked at once; in the next one anew. A hook counts at once, and step by step everything does."""
    model = make("llama")
    assert isinstance(model, Decoder)
    looks: list[None] = []
    real = whole_step.Whole.is_as_it_was
    monkeypatch.setattr(whole_step.Whole, "is_as_it_was", lambda self: looks.append(None) or real(self))  # pyright: ignore
    first = ch.generate(model, [[5, 7]], max_new_tokens=9, eos=())
    assert len(looks) <= 1
    model.head.weight = nn.Parameter(-model.head.weight)  # type: ignore[operator]
    second = ch.generate(model, [[5, 7]], max_new_tokens=9, eos=())
    assert first != second
    with by_blocks(monkeypatch):
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
    Rows(model).at_once(torch.randint(0, 61, (4,)))
    n = len(whole_step._MODELS)  # pyright: ignore[reportPrivateUsage]
    del model
    gc.collect()
    assert len(whole_step._MODELS) < n  # pyright: ignore[reportPrivateUsage]


def test_large_models_move_to_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first steps, a part at each step; what is computed stays what it was."""
    monkeypatch.setattr(whole_step, "LARGE", 2**10)
    monkeypatch.setattr(large_pages, "PIECE", 2**21)
    config = dict(n_layers=3, d_model=256, n_heads=4, d_ff=1024, vocab_size=8_009, max_len=41)
    model = ch.build(ch.preset("gpt2", **config), seed=0).eval()
    assert isinstance(model, Decoder)
    rows, tokens = Rows(model), torch.randint(0, 8_009, (4,))
    addresses = [each.data_ptr() for each in model.parameters()]
    first, _ = rows.at_once(tokens)
    for _ in range(30):
        found, _ = rows.at_once(tokens)
        assert found is not None
        assert first is not None
        assert torch.equal(found, first)
    assert addresses == [each.data_ptr() for each in model.parameters()]
