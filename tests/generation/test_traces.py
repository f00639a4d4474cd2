"""The trace of a search against the search's result, and against a forward pass over each text."""

from __future__ import annotations

import functools
import io
import json
from typing import Any

import pytest
import torch
from rich.console import Console

import clearhead as ch
from clearhead.errors import InputError
from clearhead.generation import Engine, Request, Ticket
from clearhead.generation.traces import draw_trace, make_trace

TEXTS = ["the cat sat on the mat", "one two three four", "a dog ran"] * 3
K = 3


@functools.cache
def made(preset: str = "transformer-base", extra: int = 0) -> tuple[Any, Any]:
    tokenizer = ch.train_tokenizer(texts=TEXTS, kind="bpe", vocab_size=300, add_bos=False)
    small: dict[str, Any] = dict(n_layers=2, d_model=16, n_heads=2, d_head=8, d_ff=24, max_len=61, init_std=0.5)
    model = ch.build(ch.preset(preset, **small, vocab_size=tokenizer.vocab_size + extra), seed=7).eval()
    ends = (tokenizer.eos, *range(40, 80))  # several, so that some texts end early
    model.generation = ch.Generation(bos=tokenizer.bos, eos=ends, decoder_start=tokenizer.bos)
    return model, tokenizer


def search(**options: Any) -> Ticket:
    model, tokenizer = made()
    source = [*tokenizer.encode("one two the cat"), tokenizer.eos]
    engine = Engine(model, max_tokens=4096, max_rows=16)
    ticket = engine.submit(Request(source=source, beams=K, n_best=K, trace=True, **{"max_new_tokens": 12, **options}))
    engine.run()
    return ticket


@functools.cache
def traced() -> tuple[Ticket, dict[str, Any]]:
    ticket = search(max_new_tokens=7)
    return ticket, make_trace(ticket, *made(), text="one two the cat")


def test_what_ended_is_what_the_search_tells() -> None:
    ticket, trace = traced()
    model, tokenizer = made()
    ranked = [each for each in trace["finished"] if each["rank"] is not None]
    assert [each["rank"] for each in ranked] == [1, 2, 3]
    for each, found in zip(ranked, ticket.hypotheses, strict=True):
        assert each["ids"][: len(found.tokens)] == found.tokens
        assert each["ids"][len(found.tokens) :] == [] or each["ids"][-1] in model.generation.eos
        assert each["score"] == pytest.approx(found.score, rel=1e-6)
        assert each["text"] == tokenizer.decode(each["ids"])
    assert [each["score"] for each in trace["finished"]] == sorted(
        (e["score"] for e in trace["finished"]), reverse=True
    )


def ways(trace: dict[str, Any]) -> list[tuple[list[int], dict[str, Any]]]:
    """Each candidate that was possible, with the ids before it, followed from step to step."""
    found: list[tuple[list[int], dict[str, Any]]] = []
    running: dict[int, list[int]] = {0: []}
    for step in trace["steps"]:
        after: dict[int, list[int]] = {}
        for each in step["candidates"]:
            if each["score"] is not None:
                before = running[each["parent"]]
                found.append((before, each))
                if each["fate"] == "kept":
                    after[each["beam"]] = [*before, each["id"]]
        running = after
    return found


@torch.no_grad()
def test_scores_and_attention_are_those_of_each_text_read_alone() -> None:
    ticket, trace = traced()
    model, tokenizer = made()
    source = torch.tensor([list(ticket.request.source or [])])
    assert trace["source"]["ids"] == source[0].tolist()
    assert len(ways(trace)) > 2 * K * 3
    site = "decoder.blocks.1.cross.weights"

    @functools.cache
    def read(*before: int) -> tuple[torch.Tensor, torch.Tensor]:
        with ch.probe(model, site) as seen:
            logits = model(source, torch.tensor([[model.generation.decoder_start, *before]]))
        return logits[0, -1].log_softmax(-1), seen[site][0].mean(0)[-1]

    for before, each in ways(trace):
        log_probs, attention = read(*before)
        # float32: another batch, another order of summation
        assert each["log_prob"] == pytest.approx(float(log_probs[each["id"]]), abs=1e-4)
        assert each["text"] == tokenizer.decode([*before, each["id"]])
        if each["fate"] != "dropped":
            torch.testing.assert_close(torch.tensor(each["attention"]), attention, rtol=0, atol=1e-5)
        else:
            assert "attention" not in each


def test_why_each_lived_or_died() -> None:
    ticket, trace = traced()
    ends = made()[0].generation.eos
    for step in trace["steps"]:
        scores = [each["score"] for each in step["candidates"] if each["score"] is not None]
        assert scores == sorted(scores, reverse=True)
        kept = [each for each in step["candidates"] if each["fate"] == "kept"]
        assert [each["beam"] for each in kept] == [*range(len(kept))]
        assert len(kept) == (0 if step is trace["steps"][-1] and len(trace["steps"]) == 7 else K)
    said = {each["fate"]: each["why"] for _, each in ways(trace)}
    assert "goes on as beam" in said["kept"]
    assert "ended: " in said["finished"]
    assert any("behind the last of 3 that went on" in each["why"] for _, each in ways(trace))
    for _, each in ways(trace):
        assert ("and an end" in each["why"]) == (each["fate"] == "dropped" and each["id"] in ends)
    winner = [each["id"] for _, each in ways(trace) if each["wins"]]
    assert winner[: len(ticket.hypotheses[0].tokens)] == ticket.hypotheses[0].tokens


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(max_new_tokens=2), "max_new_tokens=2 was reached"),
        (dict(early_stopping=True), "3 texts had ended"),
        (dict(), "is behind the worst of 3 ended"),
    ],
)
def test_why_it_stopped(options: dict[str, Any], said: str) -> None:
    assert said in make_trace(search(**options), *made())["stopped"]


def test_another_layer() -> None:
    trace = make_trace(search(max_new_tokens=7), *made(), layer=0)
    assert trace["attention"]["layer"] == 0
    assert trace["finished"][0]["attention"] != traced()[1]["finished"][0]["attention"]


def test_it_is_json_and_can_be_drawn() -> None:
    _, trace = traced()
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(draw_trace(trace))
    text = console.export_text()
    for word in (
        "step",
        "dropped: ",
        "Texts that ended",
        "over because",
        "Where layer 1 looked",
        trace["finished"][0]["text"],
    ):
        assert word in text


def test_a_decoder_has_no_source() -> None:
    model, tokenizer = made("gpt2", extra=100)  # and rows that no token has
    engine = Engine(model, max_tokens=4096, max_rows=16)
    ticket = engine.submit(Request(prompt=tokenizer.encode("the cat"), beams=K, trace=True, max_new_tokens=5))
    engine.run()
    trace = make_trace(ticket, model, tokenizer)
    assert trace["source"] is None
    assert trace["finished"][0]["attention"] is None
    Console(file=io.StringIO()).print(draw_trace(trace))


def test_no_search_no_trace() -> None:
    model, tokenizer = made()
    engine = Engine(model, max_tokens=1024, max_rows=4)
    ticket = engine.submit(Request(source=[5, 6], beams=1, trace=True, max_new_tokens=3))
    engine.run()
    with pytest.raises(InputError, match=r"there is no search to tell of: trace=True, beams=1"):
        make_trace(ticket, model, tokenizer)
