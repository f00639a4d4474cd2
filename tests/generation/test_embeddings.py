"""Embeddings: a text has the same vector packed, padded or alone."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

import clearhead as ch
from clearhead.data import Tokenizer
from clearhead.errors import InputError
from clearhead.generation import embeddings as vectors
from clearhead.generation.embeddings import embed, embed_ids, packs, run_packed, run_padded, share
from clearhead.layers.masks import causal
from clearhead.layers.packing import packed
from clearhead.models import Encoder

TEXTS = ["a b c", "b", "c a b b a", "a a"]


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    core = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(core, {})


def make(**fields: Any) -> Encoder:
    torch.manual_seed(3)
    sizes: dict[str, Any] = dict(n_layers=2, d_model=24, n_heads=3, d_ff=40, vocab_size=97, max_len=31, dropout=0.0)
    model = ch.build(ch.preset("bert-base", **{**sizes, **fields})).eval()
    assert isinstance(model, Encoder)
    return model


@pytest.mark.parametrize("pool", ["mean", "max", "first"])
@pytest.mark.parametrize("normed", [False, True])
def test_packed_is_padded_is_alone(pool: str, normed: bool) -> None:
    model = make(pool=pool, pool_normed=normed, pooler=pool == "first")
    rows = [torch.randint(0, 97, (n,)).tolist() for n in (7, 1, 29, 5, 7)]  # together longer than max_len
    alone = torch.cat([model.pooled(model.states(torch.tensor([row]))) for row in rows])
    # fp32, two layers: only the order of summation differs
    torch.testing.assert_close(run_packed(model, rows, model.pool), alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(run_padded(model, rows, model.pool), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("d_head", [7, 10, 15, 16])
def test_a_vector_alone_and_in_a_batch(d_head: int) -> None:
    """Not the same bits: the products of 33 rows and more, and attention at most head widths, are torch's. But near."""
    model = make(d_head=d_head, d_model=96, d_ff=384, pool="mean", pool_normed=True, n_layers=6)
    rows = [torch.randint(0, 97, (n,)).tolist() for n in (7, 1, 29, 5, 7, 31, 30, 12, 3)]
    together, alone = embed_ids(model, rows), np.concatenate([embed_ids(model, [row]) for row in rows])
    # docs/generation.md says so: vectors of length 1, float32, six layers
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)


def test_spans_stay_with_the_documents_they_describe() -> None:
    mask, positions = packed([3, 2])
    assert mask.spans is not None
    assert positions.tolist() == [0, 1, 2, 0, 1]
    assert mask.spans.starts.tolist() == [0, 3, 5]
    assert (mask & causal()).spans is mask.spans  # the kernel looks at the rest of the mask too
    assert (mask & packed([4, 1])[0]).spans is None
    with pytest.raises(InputError, match="one token at least"):
        packed([3, 0])


def test_parts_hold_at_most_so_many_tokens() -> None:
    lengths = [5, 3, 9, 1, 1]
    assert list(share([0, 1, 2, 3, 4], lengths, 8)) == [[0, 1], [2], [3, 4]]
    assert list(share([], lengths, 8)) == []


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_rows_come_in_order(tokens: int) -> None:
    model, tokenizer = make(pool="mean"), tiny_tokenizer()
    found = embed(model, tokenizer, TEXTS, tokens=tokens)
    for text, row in zip(TEXTS, found, strict=True):
        wanted = model.pooled(model.states(torch.tensor([tokenizer.encode(text)])))[0]
        torch.testing.assert_close(torch.from_numpy(row), wanted, rtol=0, atol=1e-5)


def test_too_long_a_text_is_named_or_cut() -> None:
    model, tokenizer = make(pool="mean"), tiny_tokenizer()
    with pytest.raises(InputError, match=r"line 3 has \d+ tokens, and the model takes 3"):
        embed(model, tokenizer, TEXTS, max_len=3)
    assert embed(model, tokenizer, TEXTS, max_len=3, truncate=True).shape == (4, 24)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"kernel": "explicit"}, False),
        ({"window": 3}, False),
        ({"positions": "alibi"}, False),
        ({"dropped_token": 3}, False),
    ],
)
def test_texts_are_packed_where_attention_goes_from_text_to_text(
    fields: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ran = make(pool="mean", **fields), list[str]()
    assert packs(model) is expected
    for name in ("run_packed", "run_padded"):
        run = getattr(vectors, name)
        monkeypatch.setattr(vectors, name, lambda *given, run=run, name=name: ran.append(name) or run(*given))
    found = embed(model, tiny_tokenizer(), TEXTS)
    assert ran == ["run_packed" if expected else "run_padded"]
    for text, row in zip(TEXTS, found, strict=True):
        wanted = model.pooled(model.states(torch.tensor([tiny_tokenizer().encode(text)])))[0]
        torch.testing.assert_close(torch.from_numpy(row), wanted, rtol=0, atol=1e-5)


def test_many_texts_have_weights_laid_out_and_the_same_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = make(pool="mean"), ["a b c a", "c b a"] * 29
    plain = embed(model, tiny_tokenizer(), texts)
    monkeypatch.setattr(vectors, "WORTH_A_LAYOUT", 1)
    # fp32, two layers: only the order of summation differs
    torch.testing.assert_close(
        torch.from_numpy(embed(model, tiny_tokenizer(), texts)), torch.from_numpy(plain), rtol=0, atol=1e-5
    )
