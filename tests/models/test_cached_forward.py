"""A model with a cache: reading in pieces is reading at once, for random configs and in every family.

What the cache promises by itself (positions, windows, rows moved or freed, memory, errors) is in tests/layers/test_cache.py.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import clearhead as ch
from clearhead.layers.cache import Cache
from clearhead.models import Model

from .drawn import Fields, fields, pieces
from .test_padding import masks
from .tiny import EVERY, assert_same, built, inputs, run, tiny, tiny_config

WRITERS = [name for name in EVERY if tiny_config(name).shape != "encoder"]
LENGTH = 11


def read(
    model: Model,
    sources: tuple[Tensor, ...],
    tokens: Tensor,
    real: Tensor | None,
    cache: Cache,
    source_real: Tensor | None,
):
    """One call with a cache: the source at the first, None afterwards."""
    if model.config.shape == "decoder":
        return run(model, tokens, mask=real, cache=cache)
    if cache.length:
        return model(None, tokens, target_mask=real, cache=cache)
    return run(model, *sources, tokens, mask=source_real, target_mask=real, cache=cache)


def whole(
    model: Model, sources: tuple[Tensor, ...], tokens: Tensor, real: Tensor | None, source_real: Tensor | None
) -> Tensor:
    if model.config.shape == "decoder":
        return run(model, tokens, mask=real)
    return run(model, *sources, tokens, mask=source_real, target_mask=real)


def assert_cache_changes_nothing(
    model: Model,
    sizes: list[int],
    *,
    real: Tensor | None = None,
    source_real: Tensor | None = None,
) -> None:
    """Pieces read one by one give the logits of the whole."""
    *sources, tokens = inputs(model.config, length=LENGTH)
    sources = tuple(sources)
    expected = whole(model, sources, tokens, real, source_real)
    cache = model.new_cache(batch=3, max_len=LENGTH)
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        part = slice(end - size, end)
        seen = None if real is None else real[:, part]
        ours = read(model, sources, tokens[:, part], seen, cache, source_real)
        theirs = expected[:, part]
        assert_same(*((ours, theirs) if seen is None else (ours[seen], theirs[seen])))
    assert cache.length == LENGTH


@pytest.mark.slow
@given(
    drawn=fields(shapes=("decoder", "encoder-decoder")),
    sizes=pieces(LENGTH),
    real=st.none() | masks(3, LENGTH),
    source_real=st.none() | masks(3, 13),
)
@settings(max_examples=60)
def test_cached_is_whole(drawn: Fields, sizes: list[int], real: Tensor | None, source_real: Tensor | None) -> None:
    model = built(ch.Config(**drawn))
    assert_cache_changes_nothing(model, sizes, real=real, source_real=source_real)
    width = model.config.window or LENGTH
    assert model.new_cache(batch=3, max_len=LENGTH).layers[0].k.shape[2] == width


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("sizes", [[1] * LENGTH, [LENGTH], [2, 7, 1, 1]], ids=str)
def test_cached_is_whole_in_every_family(name: str, sizes: list[int]) -> None:
    assert_cache_changes_nothing(tiny(name), sizes)


def test_rows_come_to_differ_in_length() -> None:
    """A batch whose rows take a different number of tokens at each step, as in continuous batching."""
    model = tiny("llama")
    (tokens,) = inputs(model.config)
    cache = model.new_cache(batch=3, max_len=2 * LENGTH)
    done, answers = [0, 0, 0], [[], [], []]
    for takes in ([4, 1, 2], [0, 3, 1], [1, 1, 1], [5, 0, 3]):
        width = max(takes)
        piece, real = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.bool)
        for b, n in enumerate(takes):
            piece[b, :n], real[b, :n] = tokens[b, done[b] : done[b] + n], True
        out = model(piece, real, cache=cache)
        for b, n in enumerate(takes):
            answers[b].append(out[b, :n])
            done[b] += n
    for b, n in enumerate(done):
        assert_same(torch.cat(answers[b])[None], model(tokens[b : b + 1, :n]))


def test_a_cache_keeps_no_gradient() -> None:
    model = tiny("gpt2")
    (tokens,) = inputs(model.config)
    cache = model.new_cache(batch=3, max_len=LENGTH)
    assert not model(tokens, cache=cache).requires_grad
    assert torch.is_grad_enabled()
    translator = tiny("original")
    cache = translator.new_cache(batch=3, max_len=LENGTH)
    assert not translator(*inputs(translator.config), cache=cache).requires_grad


def test_two_caches_do_not_know_each_other() -> None:
    model = tiny("gpt2")
    (tokens,) = inputs(model.config)
    one, two = (model.new_cache(batch=3, max_len=LENGTH) for _ in "ab")
    model(tokens[:, :5], cache=one)
    model(tokens[:, 6:], cache=two)
    assert_same(model(tokens[:, 5:], cache=one), model(tokens)[:, 5:])


def test_encode_then_decode_is_forward() -> None:
    model = tiny("marian")
    source, target = inputs(model.config)
    expected = model(source, target)
    assert_same(model.decode(target, model.encode(source)), expected)
    cache = model.new_cache(batch=3, max_len=LENGTH)
    with torch.no_grad():
        first = model.decode(target[:, :4], model.encode(source), cache=cache)
        rest = model.decode(target[:, 4:], None, cache=cache)
    assert_same(torch.cat([first, rest], 1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_under_autocast(dtype: torch.dtype) -> None:
    model = tiny("llama", dtype=torch.float32)
    (tokens,) = inputs(model.config)
    with torch.autocast("cpu", dtype=dtype), torch.no_grad():
        expected = model(tokens)
        cache = model.new_cache(batch=3, max_len=LENGTH)
        parts = [model(piece, cache=cache) for piece in tokens.split(4, 1)]
    assert cache.layers[0].k.dtype == dtype
    # bfloat16 keeps 8 bits, float16 11: each of a dozen roundings is within 2^-8 (2^-11) of numbers up to 5
    torch.testing.assert_close(
        torch.cat(parts, 1).float(), expected.float(), rtol=0, atol=0.25 if dtype == torch.bfloat16 else 0.03
    )
