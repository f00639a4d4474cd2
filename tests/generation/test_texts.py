"""Text in, text out, against the ids underneath; stops against a search in the whole text."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.engine.outputs import StopMatcher, stop_overlap
from clearhead.errors import InputError
from clearhead.generation import Engine, Request
from clearhead.generation.engines import make_engine
from clearhead.generation.texts import (
    StoppingStream,
    fit,
    follow,
    in_order,
    make_request,
    stream_text,
    write_texts,
)
from tests.shared_data import shared_data

TEXTS = ["the cat sat on the mat", "one two three four", "a dog ran", '{"a": [0.5, 12]}, yes or no'] * 3


@functools.cache
def made(kind: str = "bpe") -> tuple[Any, Any]:
    """`pieces` is SentencePiece's way: a space is part of the word after it, and a text's first word loses it."""
    if kind == "pieces":
        tokenizer = ch.load_tokenizer(shared_data("stories260K") / "tok512.bin")
    else:
        tokenizer = ch.train_tokenizer(texts=TEXTS, kind=kind, vocab_size=300 if kind == "bpe" else None)
    small: dict[str, Any] = dict(n_layers=2, d_model=16, n_heads=2, d_head=8, d_ff=24, max_len=61, init_std=0.3)
    model = ch.build(ch.preset("gpt2", **small, vocab_size=tokenizer.vocab_size), seed=3).eval()
    model.generation = ch.Generation(bos=tokenizer.bos, eos=(tokenizer.eos,))
    return model, tokenizer


def longest_certain(whole: str, stops: list[str]) -> str:
    """The text before the stop that is complete first, found in all of it."""
    for end in range(len(whole) + 1):
        met = [stop for stop in stops if whole[:end].endswith(stop)]
        if met:
            return whole[: end - max(map(len, met))]
    return whole


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_its_first_stop(text: str, stops: list[str]) -> None:
    _, tokenizer = made()
    ids = tokenizer.encode(text, special=False)
    stream = StoppingStream(tokenizer, stops)
    pieces = [*map(stream.push, ids), stream.finish()]
    whole = tokenizer.decode(ids)
    assert "".join(pieces) == longest_certain(whole, stops)
    assert (stream.stop is not None) == any(stop in whole for stop in stops)


@given(st.text("ab", max_size=20), st.text("ab", min_size=1, max_size=7), st.integers(0, 20))
def test_the_overlap_with_a_stop_is_the_longest(text: str, stop: str, cut: int) -> None:
    longest = max(n for n in range(min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
    matcher = StopMatcher(stop)
    matcher.push(text[:cut])
    assert stop_overlap(text, stop) == matcher.push(text[cut:]) == longest


def test_long_stops_take_little_time() -> None:
    """Each token looked through every beginning of every stop: with 15 of 991 characters, other clients waited 107 s."""
    tokenizer = ch.train_tokenizer(kind="chars", texts=["ab"])
    stream = StoppingStream(tokenizer, ["a" * (975 + at) + "b" for at in range(16)])
    ids = tokenizer.encode("a", special=False) * 3000
    began = time.process_time()
    pieces = [*map(stream.push, ids), stream.finish()]
    assert time.process_time() - began < 2  # it was 9 s
    assert "".join(pieces) == "a" * 3000


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    _, tokenizer = made()
    stream = StoppingStream(tokenizer, ["at the"])
    said = [stream.push(id) for id in tokenizer.encode("a ca", special=False)]
    assert "".join(said) == "a c"
    assert stream.push(tokenizer.encode("x", special=False)[0]) == "ax"


def test_scores_are_those_of_the_ids() -> None:
    model, tokenizer = made()
    prompts, options = ["the cat", "one <b>"], dict(max_new_tokens=7, temperature=0.9)
    found = write_texts(model, tokenizer, prompts, return_scores=True, alternatives=3, **options)
    assert [one.text for one in found] == write_texts(model, tokenizer, prompts, **options)
    assert [str(one) for one in found] == [one.prompt + one.text for one in found]
    scores = ch.generate(model, [tokenizer.encode(text) for text in prompts], return_scores=True, **options)
    for one, score in zip(found, scores, strict=True):
        assert [token.name for token in one.tokens] == tokenizer.names(score.tokens)
        # the log-probability of the end counts in a finished text's score
        ended = 0.0 if score.finished else sum(math.log(token.probability) for token in one.tokens) - score.score
        assert ended == pytest.approx(0, abs=1e-4)
        for token in one.tokens:
            assert len(token.alternatives) == 3
            assert token.alternatives[0][1] == max(share for _, share in token.alternatives) >= token.probability
    html = found._repr_html_()
    assert html.count("<hr>") == 1
    assert "one &lt;b&gt;" in html
    assert f"{found[0].tokens[0].probability:.1%}" in html
    assert "instead: " in html
    with pytest.raises(ch.InputError, match="alternatives=2; add return_scores=True"):
        write_texts(model, tokenizer, prompts, alternatives=2)


@pytest.mark.parametrize("kind", ["bpe", "pieces"])
def test_texts_are_those_of_the_ids(kind: str) -> None:
    model, tokenizer = made(kind)
    prompts = ["the cat", "one", "a dog ran", ""]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    options: dict[str, Any] = dict(max_new_tokens=11, temperature=0.9, top_p=0.8)
    written = ch.generate(model, ids, seed=5, **options)
    # Together with its prompt a text has the spaces of the whole.
    whole = [tokenizer.decode([*before, *after]) for before, after in zip(ids, written, strict=True)]
    texts = write_texts(model, tokenizer, prompts, seed=5, **options)
    assert [tokenizer.decode(before) + text for before, text in zip(ids, texts, strict=True)] == whole
    assert "".join(stream_text(model, tokenizer, "one", seed=6, **options)) == texts[1]
    stop = texts[1][3:5]
    stopped = write_texts(model, tokenizer, prompts, seed=5, stop=[stop], **options)
    assert stopped == [text.partition(stop)[0] for text in texts]
    assert write_texts(model, tokenizer, []) == []


def test_texts_that_match() -> None:
    model, tokenizer = made()
    options: dict[str, Any] = dict(max_new_tokens=40, temperature=1.0)
    prompts = ["the cat", "one", "a dog"]
    for text in write_texts(model, tokenizer, prompts, regex="[a-c]{3,5}!", **options):
        assert re.fullmatch("[a-c]{3,5}!", text)
    for text in write_texts(model, tokenizer, prompts, json_schema={"type": "boolean"}, **options):
        assert json.loads(text) in (True, False)
    assert set(write_texts(model, tokenizer, prompts * 5, choices=["yes", "no"], **options)) <= {"yes", "no"}
    assert "".join(stream_text(model, tokenizer, "one", choices=["maybe"], **options)) == "maybe"
    with pytest.raises(InputError, match=r"one thing; got regex and choices"):
        write_texts(model, tokenizer, prompts, regex="a", choices=["b"])


def test_a_special_token_can_be_a_stop() -> None:
    model, tokenizer = made()
    name = tokenizer.token(tokenizer.pad)
    assert make_request(model, tokenizer, "the", stop=[name, "cat"], max_new_tokens=9).stop == [[tokenizer.pad]]
    favoured: dict[str, Any] = dict(max_new_tokens=9, logit_bias={tokenizer.pad: 50.0})
    assert write_texts(model, tokenizer, ["the"], stop=[name], **favoured) == [""]


def test_a_prompt_that_is_too_long_is_cut_by_choice() -> None:
    model, tokenizer = made()
    bos = model.generation.bos
    assert fit([bos, *range(5, 60)], model, 50, "left") == [bos, *range(50, 60)]
    assert fit([*range(5, 60)], model, 50, "left") == [*range(49, 60)]
    assert fit([*range(5, 16)], model, 50, None) == [*range(5, 16)]
    with pytest.raises(
        InputError, match=r"has 12 tokens, but with max_new_tokens=50 the model's max_len=61 leaves room for 11"
    ):
        fit([*range(5, 17)], model, 50, None)
    with pytest.raises(InputError, match=r"max_new_tokens=61 leaves no room for a prompt"):
        fit([5], model, 61, "left")
    long = "the cat " * 40
    cut = fit(tokenizer.encode(long), model, 50, "left")
    assert write_texts(model, tokenizer, [long], max_new_tokens=50, truncate="left") == write_texts_of(cut)


def write_texts_of(ids: list[int]) -> list[str]:
    model, tokenizer = made()
    written = ch.generate(model, [ids], max_new_tokens=50)[0]
    return [tokenizer.decode([*ids, *written]).removeprefix(tokenizer.decode(ids))]


@pytest.mark.usefixtures("unchecked")
def test_mistakes() -> None:
    model, tokenizer = made()
    for wrong, said in (
        (dict(stop=[""]), "a stop is empty"),
        (dict(stop="end"), "stop is one str"),
        (dict(top_p=7), "top_p must be above 0 and at most 1; got 7"),
        (dict(truncate="right"), "cut at its start only"),
        (dict(max_new_tokens=0), "max_new_tokens is a whole number of at least 1"),
        (dict(tempreature=1), "did you mean 'temperature'"),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            write_texts(model, tokenizer, ["the"], **{"max_new_tokens": 9, **wrong})
    with pytest.raises(InputError, match="prompts is one str"):
        write_texts(model, tokenizer, "the")
    with pytest.raises(InputError, match=r"the stop '語' can not be written"):
        write_texts(*made("chars"), ["the"], stop=["語"], max_new_tokens=9)


def test_a_model_in_training_writes_without_dropout_and_goes_on_training() -> None:
    model, tokenizer = made()
    options: dict[str, Any] = dict(max_new_tokens=9)
    wanted = write_texts(model, tokenizer, ["the", "one"], **options)
    noisy = copy.deepcopy(model).train()
    for block in noisy.blocks:
        block.dropout = 0.5
    assert write_texts(noisy, tokenizer, ["the", "one"], **options) == wanted
    said = ""
    for piece in stream_text(noisy, tokenizer, "the", **options):
        said += piece
        assert noisy.training
        assert torch.is_grad_enabled()
    assert said == wanted[0]


def test_a_closed_iterator_cancels() -> None:
    model, tokenizer = made()
    request = make_request(model, tokenizer, "the", max_new_tokens=30)
    engine = make_engine(model, [request])
    ticket = engine.submit(request)
    pieces = follow(engine, ticket, StoppingStream(tokenizer))
    next(pieces)
    pieces.close()
    assert ticket.reason == "cancelled"
    assert not engine.n_running
    assert engine.allocator.n_available == engine.allocator.n_blocks - 1


@pytest.mark.slow
def test_tickets_come_in_order_and_are_asked_for_lazily() -> None:
    model, tokenizer = made()
    prompts = [tokenizer.encode("the cat " * (1 + at % 5)) for at in range(61)]
    asked: list[int] = []

    def requests() -> Any:
        for at, prompt in enumerate(prompts):
            asked.append(at)
            yield Request(prompt=prompt, max_new_tokens=3 + 7 * (at % 3 == 0), eos=())

    engine = Engine(model, max_rows=3)
    found = []
    for at, ticket in enumerate(in_order(engine, requests(), at_once=4)):
        assert len(asked) <= at + 1 + 5 * 4
        found.append(ticket.ids)
    wanted = [ch.generate(model, [p], max_new_tokens=3 + 7 * (at % 3 == 0), eos=())[0] for at, p in enumerate(prompts)]
    assert found == wanted
    assert [*in_order(engine, [])] == []


def test_tokens_as_a_person_reads_them() -> None:
    _, words = made("pieces")
    _, letters = made()
    ids = words.encode("the cat", special=False)
    assert "".join(words.name(id) for id in ids) == " the cat"
    assert letters.name(letters.eos) == letters.token(letters.eos)
    half = letters.encode("語", special=False)[0]
    assert letters.name(half) == letters.token(half)
    assert letters.name(4000) == "<4000>"
