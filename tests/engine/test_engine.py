"""The engine: each request gets the text that it gets alone, whatever else joins and leaves, and no block is lost."""

from __future__ import annotations

import copy
import functools
import math
import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models
from torch import nn

from clearhead.config import Generation
from clearhead.data import Tokenizer
from clearhead.engine import engine as engine_module
from clearhead.engine.allocator import BLOCK_SIZE, NO_OWNER
from clearhead.engine.processor_cache import ProcessorCache
from clearhead.engine.runner import ModelRunner
from clearhead.errors import InputError
from clearhead.generation import Engine, Grammar, Hypothesis, Request, Strategy, Ticket, Token, generate, stream
from clearhead.inside import intervene, zero
from clearhead.inside.evaluation_mode import eval_mode
from clearhead.sampling.logits_processors import LogitsProcessor
from tests.generation.models import ENDS
from tests.models.tiny import tiny

MODELS = ["llama", "mistral", "alibi", "original", "t5"]
# fp32 keeps 7 digits, of which a larger batch's other order of summation takes one or two.
DTYPES = dict(llama=(torch.float32, 1e-5), original=(torch.float32, 1e-5))
EXACT = (torch.float64, 1e-9)
MAX_LEN, SOURCE = 89, 40


@functools.cache
def model_of(name: str, dtype: torch.dtype | None = None) -> Any:
    """A tiny model with room for several blocks, and several end tokens, so that many texts end early."""
    model: Any = tiny(name, dtype=dtype or DTYPES.get(name, EXACT)[0], max_len=MAX_LEN)
    model.generation = Generation(decoder_start=1, bos=1, eos=tuple(ENDS))
    return model


def is_pair(model: Any) -> bool:
    return model.config.shape == "encoder-decoder"


@functools.cache
def tokenizer() -> Tokenizer:
    """One piece for each id of the tiny models; the pieces of ENDS occur in no grammar here."""
    words = {f"<{id}>" if id in ENDS else chr(ord("A") + id): id for id in range(53)}
    core = tokenizers.Tokenizer(models.WordLevel(words, "A"))
    core.decoder = decoders.Fuse()
    return Tokenizer(core, {"eos": 11})


@functools.cache
def grammar(kind: int) -> Grammar:
    if kind == 0:
        return Grammar.choice(["FGH", "FGGG", "IJ"], tokenizer(), vocab_size=53, ends=ENDS)
    return Grammar.regex("[F-J]{2}(KF)*[G-I]", tokenizer(), vocab_size=53, ends=ENDS)


def ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(53) for _ in range(n)]


def some_strategy(rng: random.Random, beams: int) -> Strategy:
    """Any combination of options; with beams, none that samples."""
    fields: dict[str, list[Any]] = dict(
        repetition_penalty=[1.2, 0.8],
        presence_penalty=[0.5, -0.5],
        frequency_penalty=[0.4],
        no_repeat_ngram=[1, 2, 3],
        logit_bias=[{5: 1.0, 7: -math.inf}],
        suppress=[[9, 10]],
        min_new_tokens=[3, 9],
    )
    drawn: dict[str, Any] = {name: rng.choice(of) for name, of in fields.items() if rng.random() < 0.15}
    if beams == 1 and rng.random() < 0.6:
        drawn |= dict(temperature=rng.choice([0.7, 1, 2.5]))
        drawn |= {n: v for n, v in dict(top_k=11, top_p=0.9, min_p=0.02).items() if rng.random() < 0.3}
    return Strategy(**drawn)


def some_request(rng: random.Random, model: Any, name: str) -> Request:
    """A random request for this model; many prompts have a common prefix."""
    beams = rng.choice([1, 1, 1, 1, 2, 3, 4])
    common = random.Random(rng.randrange(3))  # one of three texts
    start = ids(common, 60)[: rng.choice([0, 8, 16, 30, 32, 33, 48, 60])]
    prompt = start + ids(rng, rng.choice([0, 1, 3, 11]))
    more: dict[str, Any] = dict(prompt=prompt, beams=beams, strategy=some_strategy(rng, beams))
    if is_pair(model):
        more |= dict(source=ids(rng, rng.randint(1, 31)), prompt=prompt[: rng.choice([0, 0, 2, 20])])
    if beams > 1:
        more |= dict(length_penalty=rng.choice([1.0, 0.6, 0.0, -1.0]), n_best=rng.randint(1, beams))
        more |= dict(early_stopping=rng.choice([True, False, "never"]))
    elif rng.random() < 0.5:
        more |= dict(stop=[ids(rng, rng.choice([1, 1, 2])) for _ in range(rng.choice([2, 20]))])
    if rng.random() < 0.1:
        more |= dict(grammar=grammar(rng.randrange(2)), strategy=Strategy(temperature=1.0 if beams == 1 else 0.0))
    if rng.random() < 0.1:
        more |= dict(eos=rng.choice([(), 5, [5, 7]]), grammar=None)
    if beams == 1 and rng.random() < 0.2:
        more |= dict(alternatives=3)
    limit, seed = rng.choice([1, 2, 5, 12, 18]), rng.randrange(-99, 99)
    more |= dict(lookup=beams == 1 and not is_pair(model) and seed % 3 == 0)
    return Request(max_new_tokens=limit, seed=seed, scored=True, name=name, **more)


def alone(model: Any, request: Request) -> Ticket:
    """The request in an engine of its own, its prompt prefilled at once."""
    engine = Engine(model, max_tokens=600, max_rows=4, prefixes=False)
    ticket = engine.submit(request)
    engine.run()
    return ticket


@torch.no_grad()
def naive(model: Any, request: Request) -> list[Token]:
    """One token after the other, by a whole forward pass for each; includes the tokens that end the text."""
    processor, text, written = (
        LogitsProcessor(model, request.eos, request.strategy),
        list(request.prompt),
        list[Token](),
    )
    text = text or [1]
    n_prompt, constraint = len(text), None if request.grammar is None else request.grammar.start()
    while len(written) < request.max_new_tokens:
        args = [torch.tensor([list(each)]) for each in (request.source, text) if each is not None]
        raw = model(*args)[:, -1]
        facts = [torch.tensor([n]) for n in (n_prompt, len(written), request.max_new_tokens)]
        logits = processor(raw, torch.tensor([text]) if processor.needs_history else None, *facts)
        if constraint is not None:
            logits = logits.masked_fill(~constraint.allowed(), -math.inf)
        token = int(request.strategy.choose(logits, torch.tensor([request.seed]), facts[1]))
        log_probs = raw.log_softmax(-1)[0]
        best = log_probs.topk(request.alternatives)
        others = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        written.append(Token(token, float(log_probs[token]), others))
        text.append(token)
        if token in processor.ends or any(text[n_prompt:][-len(stop) :] == list(stop) for stop in request.stop):
            break
        if constraint is not None:
            constraint.push(token)
            if constraint.is_done:
                break
    return written


def assert_same(found: Ticket, expected: Ticket, within: float) -> None:
    assert (found.ids, found.reason) == (expected.ids, expected.reason)
    assert_alike(found.hypotheses, expected.hypotheses, within)
    for token, other in zip(found.tokens, expected.tokens, strict=True):
        assert token.score == pytest.approx(other.score, abs=within, nan_ok=True)
        assert [id for id, _ in token.alternatives] == [id for id, _ in other.alternatives]
        assert [s for _, s in token.alternatives] == pytest.approx([s for _, s in other.alternatives], abs=within)


def assert_alike(found: list[Hypothesis], expected: list[Hypothesis], within: float) -> None:
    assert [(one.tokens, one.finished) for one in found] == [(one.tokens, one.finished) for one in expected]
    assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=within, rel=within)


def check_memory(engine: Engine) -> None:
    """Reference counts match the block tables, every block is in one place, and every reservation can be met."""
    blocks, runner = engine.allocator, engine.runner
    running, prefilling = engine.scheduler.running, engine.scheduler.prefilling
    named = [runner.block_table[: runner.n].ravel(), *(s.source_blocks for s in running)]
    named += [each for s in prefilling for each in (s.blocks, s.source_blocks)]
    counted = np.bincount(np.concatenate([*named, np.zeros(0, np.int32)]), minlength=blocks.n_blocks)
    counted[0] = 0
    assert (counted == blocks.ref_counts).all()
    free = blocks.free_stack[: blocks.n_free].tolist()
    everywhere = [*free, *blocks.evictable, *np.flatnonzero(blocks.ref_counts).tolist()]
    assert sorted(everywhere) == list(range(1, blocks.n_blocks))
    assert (blocks.reserved >= 0).all()
    assert blocks.n_reserved == blocks.reserved.sum()
    assert blocks.n_available >= 0
    assert blocks.n_used == np.count_nonzero(blocks.ref_counts)
    assert runner.n == sum(s.n_rows for s in running)
    assert runner.n + sum(s.n_rows for s in prefilling) <= engine.max_rows
    assert sorted(blocks.cached.values()) == sorted(blocks.hashes)
    for block in blocks.evictable:
        assert block in blocks.hashes


def assert_nothing_left(engine: Engine) -> None:
    check_memory(engine)
    blocks = engine.allocator
    assert not engine.is_busy
    assert (blocks.n_used, blocks.n_reserved, blocks.n_available) == (0, 0, blocks.n_blocks - 1)
    assert not blocks.ref_counts.any()
    assert not blocks.reserved.any()
    assert (blocks.owners == NO_OWNER).all()
    assert sorted(blocks.free_numbers) == list(range(engine.max_rows))
    assert not engine.scheduler.names
    assert not engine.beam_searcher.groups
    assert engine.runner.n == 0
    assert not engine.runner.block_table.any()


# 500 in all: their number, rows, tokens of memory, prompt tokens a step, and how many come between two steps.
CROWDS = [(50, 8, 260, 13, 0.7), (50, 24, 2000, 200, 6.0)]


@pytest.mark.slow
@pytest.mark.parametrize("crowd", CROWDS, ids=["narrow", "wide"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("unchecked")  # it is long; shapes are checked by the others
def test_each_as_if_alone(name: str, crowd: tuple[int, int, int, int, float]) -> None:
    """Random requests at random times, some cancelled: each text is the one it gets alone, and all memory is freed."""
    model, within = model_of(name), DTYPES.get(name, EXACT)[1]
    n, max_rows, max_tokens, prefill_tokens, rush = crowd
    rng = random.Random(f"{name} {n} {rush}")
    engine = Engine(model, max_tokens=max_tokens, max_rows=max_rows, prefill_tokens=prefill_tokens)
    requests = [some_request(rng, model, f"request {place}") for place in range(n)]
    tickets, streams = list[Ticket](), dict[int, list[Token | None]]()
    waited = pieces_read = 0
    while len(tickets) < n or engine.is_busy:
        while len(tickets) < n and rng.random() < rush / (1 + rush):
            tickets.append(engine.submit(requests[len(tickets)]))
        for ticket, token in engine.step():
            streams.setdefault(id(ticket), []).append(token)
        check_memory(engine)
        waited += bool(engine.n_waiting)
        pieces_read += any(s.n_prefilled > s.ticket.n_cached for s in engine.scheduler.prefilling)
        if tickets and rng.random() < 0.2:
            engine.cancel(rng.choice(tickets[-9:]))
            check_memory(engine)
    assert_nothing_left(engine)
    done = [ticket for ticket in tickets if ticket.reason != "cancelled"]
    for ticket in done:
        assert_same(ticket, alone(model, ticket.request), within)
        assert streams[id(ticket)] == [*ticket.tokens, None]
    # It was a crowd, and of all kinds.
    assert n * 0.6 < len(done) < n
    assert waited
    assert pieces_read or rush > 1
    assert is_pair(model) or sum(ticket.n_cached > 0 for ticket in tickets) > n / 10
    assert {ticket.reason for ticket in done} == {"end", "stop", "length"}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("unchecked")
def test_alone_is_one_token_after_the_other(name: str) -> None:
    """The same requests against a loop without cache, blocks or batches: ids, log-probabilities and alternatives."""
    model, within = model_of(name), DTYPES.get(name, EXACT)[1]
    rng = random.Random(name)
    drawn = [some_request(rng, model, "") for _ in range(40)]
    requests = [request for request in drawn if request.beams == 1]
    requests += [replace(requests[kind], grammar=grammar(kind), eos=None, strategy=Strategy()) for kind in (0, 1)]
    for request in requests:
        ticket, written = alone(model, request), naive(model, request)
        shown = ticket.tokens
        assert ticket.ids == [token.id for token in written][: len(shown)]
        assert len(written) - len(shown) <= max([1, *map(len, request.stop)])
        for token, other in zip(shown, written, strict=False):
            assert token.score == pytest.approx(other.score, abs=within)
            assert [id for id, _ in token.alternatives] == [id for id, _ in other.alternatives]
            assert [s for _, s in token.alternatives] == pytest.approx([s for _, s in other.alternatives], abs=within)
        total = sum(token.score for token in written) / (len(written) if is_pair(model) else 1)
        assert ticket.hypotheses[0].score == pytest.approx(total, abs=10 * within)


def counted(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Fills with the rows and tokens of each call of the model."""
    calls, prefill, decode = list[tuple[int, int]](), ModelRunner.prefill, ModelRunner.decode

    def counted_prefill(runner: ModelRunner, sequences: Any, T: int) -> Any:
        calls.append((len(sequences), min(T, max(s.n_to_prefill for s in sequences))))
        return prefill(runner, sequences, T)

    def counted_decode(runner: ModelRunner, *args: Any) -> Any:
        calls.append((runner.n, 1))
        return decode(runner, *args)

    patch.setattr(ModelRunner, "prefill", counted_prefill)
    patch.setattr(ModelRunner, "decode", counted_decode)
    return calls


def ask(prompt: list[int], n: int = 5, **more: Any) -> Request:
    """A greedy request without end tokens."""
    return Request(**dict[str, Any](prompt=prompt, max_new_tokens=n, eos=()) | more)


def text(seed: int, n: int) -> list[int]:
    return ids(random.Random(seed), n)


# The prefix cache.


@pytest.mark.parametrize("name", ["llama", "mistral", "alibi"])
def test_a_prefix_is_computed_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt with a known prefix, only the tokens after its full blocks are computed."""
    model = model_of(name)
    expected = alone(model, ask(text(0, 37) + text(2, 3))).ids
    calls = counted(monkeypatch)
    engine = Engine(model, max_tokens=400)
    engine.submit(ask(text(0, 37) + text(1, 3)))
    engine.run()
    calls.clear()
    second = engine.submit(ask(text(0, 37) + text(2, 3)))
    engine.run()
    assert second.n_cached == 32
    assert calls == [(1, 8)] + 4 * [(1, 1)]
    assert second.ids == expected


def test_the_last_token_is_always_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if all blocks of a prompt are cached: its logits choose the first new token."""
    model = model_of("llama")
    calls = counted(monkeypatch)
    engine = Engine(model, max_tokens=400)
    tickets = list[Ticket]()
    for _ in range(2):
        calls.clear()
        tickets.append(engine.submit(ask(text(0, 32))))
        engine.run()
    assert [ticket.n_cached for ticket in tickets] == [0, 16]
    assert calls[0] == (1, 16)
    assert tickets[0].ids == tickets[1].ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "alibi"])
def test_generated_tokens_are_cached_too(name: str) -> None:
    model = model_of(name)
    engine = Engine(model, max_tokens=400)
    first = engine.submit(ask(text(0, 20), 30))
    engine.run()
    # 50 tokens, the last of which is not in the cache: three full blocks
    prompt = text(0, 20) + first.ids + text(1, 7)
    second = engine.submit(ask(prompt))
    engine.run()
    assert second.n_cached == 48
    assert second.ids == alone(model, ask(prompt)).ids
    # A prompt that differs in one early token finds nothing.
    other = [(prompt[0] + 1) % 53, *prompt[1:]]
    third = engine.submit(ask(other))
    engine.run()
    assert third.n_cached == 0
    assert third.ids == alone(model, ask(other)).ids


def test_blocks_of_a_running_text_are_shared() -> None:
    """Two requests share blocks; the first is cancelled, and the second continues with them."""
    model = model_of("llama")
    engine = Engine(model, max_tokens=400)
    first = engine.submit(ask(text(0, 40), 9))
    engine.step()
    before = engine.allocator.n_used
    second = engine.submit(ask([*text(0, 40), 5], 20))
    engine.step()
    assert second.n_cached == 32
    assert engine.allocator.n_used == before + 1  # its own are only those after the prefix
    check_memory(engine)
    engine.cancel(first)
    check_memory(engine)
    engine.run()
    assert second.ids == alone(model, ask([*text(0, 40), 5], 20)).ids
    assert_nothing_left(engine)


def test_the_least_recently_used_is_evicted() -> None:
    """Prefixes stay until their memory is needed; then the least recently used is evicted, its last blocks first."""
    model = model_of("llama")
    engine = Engine(model, max_tokens=10 * BLOCK_SIZE)

    def cached(seed: int, n: int = 33) -> int:
        ticket = engine.submit(ask(text(seed, n), 1))
        engine.run()
        return ticket.n_cached

    assert [cached(seed) for seed in (0, 1, 2)] == [0, 0, 0]  # six of ten blocks are cached now
    assert cached(0) == 32  # used again: now 1 is the oldest
    assert len(engine.allocator.evictable) == 6
    assert cached(3, 81) == 0  # six of ten: four were free, so two more are needed
    assert [len(engine.allocator.find_prefix(text(seed, 33))) for seed in (0, 1, 2)] == [2, 0, 2]
    assert cached(4, 50) == 0  # five free ones are gone but one: three more, of 2's and 0's
    assert [len(engine.allocator.find_prefix(text(seed, 33))) for seed in (0, 2)] == [1, 0]
    assert cached(0) == 16
    assert_nothing_left(engine)


@pytest.mark.parametrize("kind", ["numbers", "weight", "hook", "hook before"])
def test_a_changed_model_computes_prefixes_anew(kind: str) -> None:
    """Numbers written into a weight, another weight, a hook that comes and goes: what was computed before is not read any more."""
    model = copy.deepcopy(model_of("llama"))
    engine, request = Engine(model, max_tokens=400), ask(text(0, 37), scored=True)

    def scores() -> tuple[list[float], int]:
        ticket = engine.submit(request)
        while not ticket.is_done:
            engine.step()
        assert ticket.scores == pytest.approx(alone(model, request).scores, abs=1e-5)
        return ticket.scores, ticket.n_cached

    off: Any = nullcontext() if kind != "hook before" else intervene(model, zero("blocks.0.attention.out"))
    running = engine.submit(ask(text(1, 37), 45))  # what it computes is of two models
    with off:
        engine.step()
        first, _ = scores()
        scores()  # after a hook came, nothing is taken for known at first
        assert scores()[1] == 32
    weight: Any = model.blocks[0].attention.o_proj.weight
    with torch.no_grad():
        if kind == "numbers":
            weight.mul_(0.5)
        elif kind == "weight":
            model.blocks[0].attention.o_proj.weight = torch.nn.Parameter(weight * 0.5)
    with intervene(model, zero("blocks.0.attention.out")) if kind == "hook" else nullcontext():
        second, n_cached = scores()
        assert second != pytest.approx(first, abs=1e-4)
        assert (n_cached, scores()[1]) == (0, 32)
    assert scores()[1] == (0 if kind == "hook" else 32)
    assert not running.is_done
    engine.run()
    again = engine.submit(ask(text(1, 37), 18))
    engine.run()
    assert again.ids == alone(model, again.request).ids
    assert_nothing_left(engine)


def test_prefixes_off() -> None:
    engine = Engine(model_of("llama"), max_tokens=400, prefixes=False)
    for _ in range(2):
        ticket = engine.submit(ask(text(0, 40)))
        engine.run()
        assert ticket.n_cached == 0
    assert not engine.allocator.evictable


@pytest.mark.parametrize("name", ["original", "t5"])
def test_no_prefix_is_shared_after_a_source(name: str) -> None:
    """The same prompt after another source has other keys and values."""
    model = model_of(name)
    engine = Engine(model, max_tokens=800)
    for seed in range(3):
        ticket = engine.submit(ask(text(9, 40), source=text(seed, 20)))
        engine.run()
        assert ticket.n_cached == 0
        assert ticket.ids == alone(model, ask(text(9, 40), source=text(seed, 20))).ids
    assert not engine.allocator.evictable


# Long prompts.


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_long_prompt_does_not_hold_up_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefilled in chunks, it gives the same text, and running requests get a token in every step."""
    model = model_of(name)
    more: dict[str, Any] = dict(source=text(7, 5)) if is_pair(model) else {}
    short, long = ask(text(0, 3), 30, **more), ask(text(1, 61), 7, **more)
    expected = [alone(model, each).ids for each in (short, long)]
    calls = counted(monkeypatch)
    engine = Engine(model, max_tokens=600, prefill_tokens=8)
    running = engine.submit(short)
    engine.step()
    waiting = engine.submit(long)
    while not waiting.tokens:
        before = len(running.tokens)
        calls.clear()
        engine.step()
        assert len(running.tokens) == before + 1
        assert sum(rows * n for rows, n in calls) <= 8 + 2
    assert len(running.tokens) == 2 + 8  # the prompt's 61 tokens took 8 steps
    engine.run()
    assert [running.ids, waiting.ids] == expected
    assert_nothing_left(engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "original"])
@pytest.mark.parametrize("prefill_tokens", [1, 5, 16, 40])
@pytest.mark.usefixtures("unchecked")
def test_chunks_of_any_size(name: str, prefill_tokens: int) -> None:
    model = model_of(name, torch.float64)
    more: dict[str, Any] = dict(source=text(7, 25)) if is_pair(model) else {}
    engine = Engine(model, max_tokens=2000, prefill_tokens=prefill_tokens)
    requests = [ask(text(seed, n), 4, scored=True, **more) for seed, n in enumerate([1, 40, 17, 16, 2, 33])]
    tickets = [engine.submit(request) for request in requests]
    while engine.is_busy:
        engine.step()
        check_memory(engine)
    for ticket in tickets:
        assert_same(ticket, alone(model, ticket.request), 1e-9)


# Beam search.


@pytest.mark.parametrize("name", ["llama", "original"])
def test_beams_share_blocks(name: str) -> None:
    """All beams share the prompt's full blocks; other blocks are copied only where beams differ."""
    model, beams = model_of(name), 4
    more: dict[str, Any] = dict(source=text(7, 30)) if is_pair(model) else {}
    engine = Engine(model, max_tokens=2000)
    ticket = engine.submit(ask(text(0, 40), 40, beams=beams, **more))
    held, most = list[int](), 0
    while not ticket.is_done:
        engine.step()
        check_memory(engine)
        if not ticket.is_done:
            held.append(engine.allocator.n_used)
            most = max(most, len(np.unique(engine.runner.block_table[:beams])) - 1)
    source = 2 if is_pair(model) else 0
    apart = beams * -(-80 // BLOCK_SIZE)
    assert held[0] <= source + 2 + beams
    assert 2 + beams < most < 2 + beams * 3 < apart  # copied where beams differ, shared where one continues another
    assert max(held) == source + most
    assert_nothing_left(engine)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_search_returns_its_tokens_at_its_end(name: str) -> None:
    """No token before; then all of the best text, and None. The n_best texts come best first, and do not depend on n_best."""
    model = model_of(name)
    more: dict[str, Any] = dict(source=text(7, 30)) if is_pair(model) else {}
    engine = Engine(model, max_tokens=2000)
    tickets = [engine.submit(ask(text(0, 9), 6, beams=4, n_best=n, **more)) for n in (1, 3, 4)]
    outputs = [each for _ in range(5) for each in engine.step()]
    assert [(ticket, token) for ticket, token in outputs if token is not None] == [
        (ticket, token) for ticket in tickets for token in ticket.tokens
    ]
    assert outputs == [each for ticket in tickets for each in [*((ticket, t) for t in ticket.tokens), (ticket, None)]]
    one, three, four = (ticket.hypotheses for ticket in tickets)
    assert (len(one), len(three), len(four)) == (1, 3, 4)
    assert_alike(one, four[:1], 1e-5)
    assert_alike(three, four[:3], 1e-5)
    assert [each.score for each in four] == sorted((each.score for each in four), reverse=True)
    assert tickets[0].ids == one[0].tokens
    assert_nothing_left(engine)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral", "alibi", "original", "t5"])
def test_beams_copy_before_they_write(name: str) -> None:
    """A text's score is that of one forward pass over it: no beam has overwritten another's keys."""
    model = model_of(name, torch.float64)
    source = dict[str, Any](source=text(7, 30)) if is_pair(model) else {}
    for n_prompt in (1, 15, 16, 17, 31):
        prompt = text(n_prompt, n_prompt)
        ticket = alone(model, ask(prompt, 21, beams=4, n_best=4, length_penalty=0.5, **source))
        assert len({tuple(one.tokens) for one in ticket.hypotheses}) == 4
        for one in ticket.hypotheses:
            whole = torch.tensor([prompt + one.tokens])
            args = [torch.tensor([source["source"]]), whole] if source else [whole]
            log_probs = model(*args)[0, n_prompt - 1 : -1].log_softmax(-1)
            total = float(log_probs[range(21), one.tokens].sum())
            assert one.score == pytest.approx(total / 21**0.5, abs=1e-9)


# Admission.


def test_first_come_first_served() -> None:
    """A small request does not overtake a large one that waits for memory."""
    model = model_of("llama")
    engine = Engine(model, max_tokens=8 * BLOCK_SIZE, max_rows=2)
    sizes = [(60, 20), (60, 21), (3, 3), (3, 3), (60, 20)]
    tickets = [engine.submit(ask(text(seed, n), more)) for seed, (n, more) in enumerate(sizes)]
    order = list[Ticket]()
    while engine.is_busy:
        order += dict.fromkeys(ticket for ticket, _ in engine.step() if ticket not in order)
        check_memory(engine)
    assert order == tickets
    for ticket in tickets:
        assert ticket.ids == alone(model, ticket.request).ids


def test_rows_are_bounded() -> None:
    engine = Engine(model_of("llama"), max_tokens=4000, max_rows=5)
    tickets = [engine.submit(ask(text(seed, 3), beams=beams)) for seed, beams in enumerate([2, 2, 2, 1, 5, 1])]
    seen = set[int]()
    while engine.is_busy:
        engine.step()
        check_memory(engine)
        seen.add(engine.runner.n)
    assert max(seen) <= 5
    assert all(ticket.is_done for ticket in tickets)
    assert_nothing_left(engine)


def test_a_request_that_can_never_fit_is_refused() -> None:
    engine = Engine(model_of("llama"), max_tokens=64, max_rows=3)
    engine.submit(ask(text(0, 44), 20))  # exactly
    with pytest.raises(
        InputError, match=r"prompt may need 80 tokens of memory \(45 of its own, max_new_tokens=20, beams=1\), b"
    ):
        engine.submit(ask(text(0, 45), 20))
    with pytest.raises(InputError, match=r"beams=3\), but there are 64; ask for fewer, or raise max_tokens"):
        engine.submit(ask(text(0, 17), 20, beams=3))
    with pytest.raises(InputError, match="beams=4 is more than max_rows=3; lower it, or raise the other"):
        engine.submit(ask([5], 2, beams=4))
    engine.run()
    assert_nothing_left(engine)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["llama", "original"])
def test_a_reservation_is_enough(name: str) -> None:
    """With exactly enough blocks, no search ever allocates more than it has reserved."""
    model = model_of(name)
    more: dict[str, Any] = dict(source=text(7, 16)) if is_pair(model) else {}
    for n_prompt, new in [(1, 15), (1, 40), (15, 2), (16, 17), (17, 30), (33, 33)]:
        shared, whole = n_prompt // BLOCK_SIZE, -(-(n_prompt + new) // BLOCK_SIZE)
        need = len(more) + shared + 4 * (whole - shared)
        request = ask(text(n_prompt, n_prompt), new, beams=4, n_best=4, **more)
        with pytest.raises(InputError, match="tokens of memory"):
            Engine(model, max_tokens=(need - 1) * BLOCK_SIZE).submit(request)
        engine = Engine(model, max_tokens=need * BLOCK_SIZE)
        ticket = engine.submit(request)
        while engine.is_busy:
            engine.step()
            check_memory(engine)
        assert_same(ticket, alone(model, request), 1e-5)


def test_a_model_in_training_generates_without_dropout() -> None:
    """Also step by step; its training mode is restored afterwards."""
    model: Any = tiny("llama", dropout=0.5)
    expected = alone(model, ask(text(0, 5))).ids
    model.train()
    engine = Engine(model, max_tokens=400)
    ticket = engine.submit(ask(text(0, 5)))
    while engine.is_busy:
        engine.step()
    assert ticket.ids == expected
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("trained", [False, True])
def test_the_modules_of_a_model_are_asked_once_a_run(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again if somebody calls `train` meanwhile, so that no step has dropout."""
    model: Any = tiny("llama", dropout=0.5)
    expected = alone(model, ask(text(0, 5))).ids
    engine, asked = Engine(model, max_tokens=400), list[nn.Module]()

    def counted(model: nn.Module) -> AbstractContextManager[None]:
        asked.append(model)
        return eval_mode(model)

    def decode() -> None:
        plain_decode()
        if engine.n_steps == 3 and trained:
            model.train()

    plain_decode = engine._decode
    monkeypatch.setattr(engine_module, "eval_mode", counted)
    monkeypatch.setattr(engine, "_decode", decode)
    ticket = engine.submit(ask(text(0, 5)))
    engine.run()
    assert ticket.ids == expected
    assert len(asked) == 1 + trained


# Cancelling.


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["llama", "original"])
@pytest.mark.usefixtures("unchecked")
def test_cancelled_at_any_moment(name: str, beams: int) -> None:
    """Waiting, partly prefilled, running or done: its memory is free at once, and the other request is not affected."""
    model = model_of(name)
    more: dict[str, Any] = dict(source=text(7, 25)) if is_pair(model) else {}
    other = ask(text(1, 20), 25, name="other", **more)
    expected, places = alone(model, other).ids, set[str]()
    for moment in (0, 2, 4, 7, 9, 13):
        engine = Engine(model, max_tokens=800, max_rows=1 + beams, prefill_tokens=8, prefixes=False)
        stays = engine.submit(other)
        for _ in range(4):
            engine.step()
        held, promised = engine.allocator.n_used, engine.allocator.n_reserved
        gone = engine.submit(ask(text(0, 37), 8, beams=beams, name="gone", **more))
        for _ in range(moment):
            engine.step()
        scheduler = engine.scheduler
        now = [s.ticket for s in scheduler.prefilling], [s.ticket for s in scheduler.running]
        place = (
            "over" if gone.is_done else "prefilling" if gone in now[0] else "running" if gone in now[1] else "waiting"
        )
        places.add(place)
        texts = list(gone.tokens)
        engine.cancel(gone)
        check_memory(engine)
        engine.cancel(gone)
        assert gone.reason == ("length" if place == "over" else "cancelled")
        used = -(-(20 + len(stays.tokens)) // BLOCK_SIZE) + len(more) * 2
        assert engine.allocator.n_used in (used, used - 1)  # the last token may still have to get its block
        assert engine.allocator.n_used + engine.allocator.n_reserved == held + promised
        assert gone not in [s.ticket for s in (*scheduler.prefilling, *scheduler.running)]
        engine.submit(ask([5], 1, name="gone", **more))  # the name is free again
        engine.run()
        assert stays.ids == expected
        assert gone.tokens == texts
        assert_nothing_left(engine)
    assert places == {"waiting", "prefilling", "running", "over"}


def test_names() -> None:
    engine = Engine(model_of("llama"), max_tokens=400)
    first = engine.submit(ask([5], name="mine"))
    engine.submit(ask([5], name=""))
    engine.submit(ask([5], 1))
    engine.step()
    for name in ("mine", ""):  # one without a name has ended meanwhile
        with pytest.raises(InputError, match=f"a request of the name '{name}' is not over yet; give each its own"):
            engine.submit(ask([7], name=name))
    engine.run()
    assert engine.submit(ask([5], name="mine")).request.name == first.request.name
    engine.run()
    assert_nothing_left(engine)


# Requests that are refused.

BAD: list[tuple[dict[str, Any], str]] = [
    (dict(prompt=[5] * 80, max_new_tokens=10), r"prompt is too long: 80 tokens \+ max_new_tokens=10 > max_len=89"),
    (dict(prompt=[5, 53]), r"prompt 0 holds ids from 5 to 53; the vocabulary has 0 \.\. 52"),
    (dict(prompt="text"), "prompts are a list of lists of ids; got prompt 0 = 'text'"),
    (dict(prompt=[5.0]), "prompts are a list of lists of ids"),
    (dict(max_new_tokens=0), "max_new_tokens is a whole number of at least 1; got 0"),
    (dict(seed=2**63), "seed is a number of up to 63 bits; got 9223372036854775808"),
    (dict(seed=0.5), "seed is a number of up to 63 bits; got 0.5"),
    (dict(stop=["."]), r"stops are a list of lists of ids; got stop 0 = '\.'"),
    (dict(stop=[5]), "stops are a list of lists of ids; got stop 0 = '5'"),
    (dict(stop=[[5], [99]]), "stop 1 holds ids from 99 to 99"),
    (dict(stop=[[]]), "a stop is a list of at least one id; got"),
    (dict(stop=5), "stop is a list of lists of ids; got 5"),
    (dict(eos=53), "eos holds ids from 53 to 53"),
    (dict(eos="</s>"), "eos is an id, or a list of ids; got '</s>'"),
    (dict(beams=0), "beams is a whole number of at least 1; got 0"),
    (dict(beams=2, n_best=3), "a search finds as many texts as it has beams; got n_best=3, beams=2"),
    (dict(beams=2, strategy=Strategy(temperature=0.5)), "draws nothing; got temperature=0.5, beams=2; leave one out"),
    (dict(beams=2, stop=[[5]]), r"a search ends its texts by eos alone, .*got stop=\[\[5\]\], "),
    (dict(beams=2, alternatives=1), r"its alternatives by trace=True; got stop=\(\), alternatives=1, beams=2; leave"),
    (
        dict(beams=52, eos=[5, 7], max_new_tokens=2),
        "52 beams need as many tokens to go on with; got vocab_size=53; take fewer",
    ),
    (dict(length_penalty=math.nan), "length_penalty must be finite; got nan"),
    (dict(early_stopping="always"), "early_stopping is True, False or 'never'; got 'always'"),
    (dict(alternatives=54), "alternatives must be 0 to vocab_size=53; got 54"),
    (dict(alternatives=-1), "alternatives must be 0 to vocab_size=53; got -1"),
    (dict(strategy=Strategy(suppress=[53])), "logit_bias or suppress holds ids from 53 to 53"),
]


@pytest.mark.parametrize(("more", "words"), BAD, ids=[words[:30] for _, words in BAD])
@pytest.mark.usefixtures("unchecked")
def test_bad_requests_do_not_affect_others(more: dict[str, Any], words: str) -> None:
    model = model_of("llama")
    engine = Engine(model, max_tokens=4000)
    ticket = engine.submit(ask(text(0, 20), 9))
    engine.step()
    with pytest.raises(InputError, match=words):
        engine.submit(Request(**dict[str, Any](prompt=[5], name="mine") | more))
    assert not engine.scheduler.names
    assert not engine.n_waiting
    engine.run()
    assert ticket.ids == alone(model, ticket.request).ids
    assert_nothing_left(engine)
    with pytest.raises(InputError, match=r"top_p must be above 0 and at most 1; got 7; 1 is off, 0\.95 is usual"):
        Strategy(top_p=7)


@pytest.mark.usefixtures("unchecked")
def test_bad_sources() -> None:
    llama, original = Engine(model_of("llama"), max_tokens=400), Engine(model_of("original"), max_tokens=400)
    with pytest.raises(InputError, match="a decoder reads no source; got one; pass it as the prompt"):
        llama.submit(ask([5], source=[5]))
    with pytest.raises(InputError, match="an encoder-decoder reads a source; got none; pass source="):
        original.submit(ask([5]))
    for source, words in {
        (): "the source must have 1 to max_source_len=89 tokens; got 0; give at least one",
        (5,) * 90: "the source must have 1 to max_source_len=89 tokens; got 90; shorten or split it",
        (53,): "source 0 holds ids from 53 to 53",
        "text": "sources are a list of lists of ids",
    }.items():
        with pytest.raises(InputError, match=words):
            original.submit(ask([], source=source))
    assert not llama.is_busy
    assert not original.is_busy


def test_an_empty_prompt_is_the_bos(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    assert alone(model, ask([])).ids == alone(model, ask([1])).ids
    monkeypatch.setattr(model, "generation", replace(model.generation, bos=None))
    with pytest.raises(
        InputError, match=r"prompt is empty, and the model has no bos; got \[\]; give at least one token"
    ):
        alone(model, ask([]))


def test_bad_sound() -> None:
    """Sound that the encoder does not take is refused before it joins a batch."""
    whisper = model_of("whisper")
    engine = Engine(whisper, max_tokens=400)
    sound = torch.randn(5, 57)
    ticket = engine.submit(ask([], source=sound))
    for bad, words in [
        (torch.randn(4, 57), r"sound of shape \(5 mel bands, frames\); got \(4, 57\); use log_mel"),
        ([1, 2], r"sound of shape \(5 mel bands, frames\); got list; use log_mel"),
        (torch.randn(5, 0), "the source must have 1 to 58 frames of floating-point numbers; got 0 of"),
        (torch.randn(5, 59), "the source must have 1 to 58 frames of floating-point numbers; got 59 of"),
        (torch.randint(3, (5, 57)), r"floating-point numbers; got 57 of torch\.int64; cut it"),
    ]:
        with pytest.raises(InputError, match=words):
            engine.submit(ask([], source=bad))
    engine.run()
    assert ticket.ids == alone(whisper, ask([], source=sound)).ids


def test_sound_of_several_lengths() -> None:
    whisper = model_of("whisper")
    engine = Engine(whisper, max_tokens=2000, max_rows=9)
    sounds = [torch.randn(5, n, generator=torch.Generator().manual_seed(n)) for n in (57, 1, 30, 57, 58)]
    tickets = [engine.submit(ask([], source=sound, beams=1 + n % 2, scored=True)) for n, sound in enumerate(sounds)]
    engine.run()
    for ticket in tickets:
        assert_same(ticket, alone(whisper, ticket.request), 1e-9)
    assert_nothing_left(engine)


# Streams.


def test_each_token_once_and_in_order() -> None:
    model = model_of("llama")
    engine = Engine(model, max_tokens=2000)
    tickets = [engine.submit(ask(text(seed, 5), 3 + seed)) for seed in range(4)]
    streams: dict[int, list[Token | None]] = {id(ticket): [] for ticket in tickets}
    steps = 0
    while engine.is_busy:
        steps += 1
        for ticket, token in engine.step():
            streams[id(ticket)].append(token)
        for ticket in tickets:
            # two in the first step: the prompt's, and one more
            n = min(steps + 1, ticket.request.max_new_tokens)
            assert len(ticket.tokens) == n
            assert streams[id(ticket)] == [*ticket.tokens, *([None] if n == ticket.request.max_new_tokens else [])]


def test_a_stop_is_never_shown_early() -> None:
    """Tokens that may be the start of a stop sequence are held back until that is known."""
    model = model_of("llama")
    prompt = next(text(seed, 9) for seed in range(99) if len(set(alone(model, ask(text(seed, 9), 20)).ids)) > 14)
    free = alone(model, ask(prompt, 20)).ids
    for stop, n_shown, reason in [
        (free[5:8], 5, "stop"),
        (free[0:3], 0, "stop"),
        ([*free[5:8], (free[8] + 1) % 53], 20, "length"),  # nearly
        ([*free[18:20], 5], 20, "length"),  # cut by the limit while it was held back
        (free[17:20], 17, "stop"),
    ]:
        found = [n for n in range(20) if free[n : n + len(stop)] == stop]
        assert found == ([n_shown] if reason == "stop" else [])  # the test's own premise
        engine = Engine(model, max_tokens=400)
        ticket = engine.submit(ask(prompt, 20, stop=[stop]))
        shown = list[int]()
        while engine.is_busy:
            shown += [token.id for _, token in engine.step() if token is not None]
            n_written = engine.scheduler.running[0].n_scheduled if engine.n_running else 20
            held = max(n for n in range(len(stop)) if free[n_written - n : n_written] == stop[:n])
            if engine.is_busy:
                assert shown == free[: n_written - held]
        assert (shown, ticket.ids, ticket.reason) == (free[:n_shown], free[:n_shown], reason)


def test_a_grammar_s_end_shows_all() -> None:
    """A text that its grammar completes shows all its tokens, also those that a stop sequence held back."""
    model = model_of("llama")
    only = Grammar.choice(["FGH"], tokenizer(), vocab_size=53, ends=ENDS)
    ticket = alone(model, Request(prompt=[5], grammar=only, stop=[[6, 7, 9], [7, 9]]))
    assert (ticket.ids, ticket.reason) == ([5, 6, 7], "end")


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("lookup", [False, True])
def test_a_grammar_s_end_comes_not_before_the_fewest_tokens(beams: int, lookup: bool) -> None:
    """A text that its grammar completes too early fails; it is not a text of fewer tokens than asked for."""
    model, lookup = model_of("llama"), lookup and beams == 1
    only = Grammar.choice(["FGH"], tokenizer(), vocab_size=53, ends=ENDS)
    ask: dict[str, Any] = dict(prompt=[5, 6, 7, 5, 6], grammar=only, beams=beams, lookup=lookup)
    tickets = [alone(model, Request(**ask, strategy=Strategy(min_new_tokens=n), max_new_tokens=9)) for n in (3, 4)]
    assert (tickets[0].ids, tickets[0].reason) == ([5, 6, 7], "end")
    assert (tickets[1].reason, tickets[1].hypotheses) == ("failed", [])
    assert "strategy or grammar that forbids every token" in str(tickets[1].error)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_grammar_that_can_not_be_followed_fails_alone(beams: int) -> None:
    """Its strategy forbids the tokens that its grammar requires: it fails, and the other request continues."""
    model = model_of("llama")
    engine = Engine(model, max_tokens=400)
    other = engine.submit(ask(text(0, 5), 9))
    failed = engine.submit(Request(prompt=[5], grammar=grammar(0), strategy=Strategy(suppress=[5, 8]), beams=beams))
    engine.run()
    assert other.ids == alone(model, other.request).ids
    assert (failed.reason, failed.ids, failed.hypotheses) == ("failed", [], [])
    assert "a text can not go on after 0 tokens: no token has a score; got NaN logits, or a" in str(failed.error)
    assert_nothing_left(engine)
    for write in (lambda **more: generate(model, [[5]], **more), lambda **more: list(stream(model, [5], **more))):
        with pytest.raises(InputError, match="a text can not go on after 0 tokens"):
            write(grammar=grammar(0), suppress=[5, 8])


@pytest.mark.parametrize("places", [slice(7, 8), slice(None)], ids=["one", "all"])
@pytest.mark.parametrize(
    "strategy", [Strategy(), Strategy(temperature=1.0), Strategy(suppress=[9])], ids=["greedy", "drawn", "bias"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the native step, and the plain one
def test_no_token_is_taken_from_nan(dtype: torch.dtype, strategy: Strategy, places: slice) -> None:
    """argmax would take NaN for the largest."""
    model = copy.deepcopy(model_of("llama", dtype))
    engine = Engine(model, max_tokens=400)
    tickets = [engine.submit(ask([5], 9, strategy=strategy, scored=scored)) for scored in (False, True)]
    engine.step()
    with torch.no_grad():
        model.head.weight[places] = math.nan
    engine.run()
    assert [(ticket.reason, len(ticket.ids)) for ticket in tickets] == [("failed", 2)] * 2
    assert "got NaN logits" in str(tickets[0].error)
    assert_nothing_left(engine)


@pytest.mark.parametrize("places", [slice(7, 8), slice(None)], ids=["one", "all"])
def test_a_search_that_meets_nan_fails(places: slice) -> None:
    """Also where texts have ended before: the search was not over, and nobody knows what it would have found."""
    model = copy.deepcopy(model_of("llama", torch.float32))
    engine = Engine(model, max_tokens=400)
    more: dict[str, Any] = dict(beams=3, eos=None, length_penalty=2.0, early_stopping="never")
    ticket = engine.submit(ask([5], 18, strategy=Strategy(logit_bias={ENDS[0]: 1.0}), **more))
    engine.step()
    (group,) = engine.beam_searcher.groups.values()
    assert group.beams.finished[0]
    with torch.no_grad():
        model.head.weight[places] = math.nan
    engine.run()
    assert (ticket.reason, ticket.hypotheses) == ("failed", [])
    assert "got NaN logits" in str(ticket.error)
    assert_nothing_left(engine)


def test_grammars_of_another_model() -> None:
    engine = Engine(model_of("llama"), max_tokens=400)
    with pytest.raises(
        InputError, match="the grammar is for a vocabulary of 60; got a model of vocab_size=53; make it"
    ):
        engine.submit(ask([5], grammar=Grammar.choice(["FGH"], tokenizer(), vocab_size=60, ends=[59])))
    with pytest.raises(
        InputError, match=r"ends a text by \[3, 11, 17, 29, 31, 41, 47\], .*got eos=\[5\], beams=1; make"
    ):
        engine.submit(ask([5], eos=5, grammar=grammar(0)))
    with pytest.raises(InputError, match=r"by \[\], .*for a search at least one; got eos=\[\], beams=2; make it"):
        engine.submit(ask([5], beams=2, grammar=Grammar.choice(["F"], tokenizer(), vocab_size=53, ends=[])))


@pytest.mark.parametrize("bad", [dict(max_tokens=0), dict(max_rows=0), dict(prefill_tokens=-1)], ids=str)
def test_bad_engines(bad: dict[str, Any]) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(InputError, match=f"{name} is a whole number of at least 1; got {value}; raise it"):
        Engine(model_of("llama"), **bad)


def test_processors_are_kept_up_to_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal requests share one. A thousand of them, each with numbers for a whole vocabulary, took gigabytes."""
    cache = ProcessorCache(model_of("llama"))
    requests = [Request(prompt=[1], strategy=Strategy(logit_bias={at: 1.0})) for at in range(9)]
    size = cache.get(requests[0]).nbytes
    assert size > 4 * 53
    monkeypatch.setattr("clearhead.engine.processor_cache.MAX_BYTES", 4 * size)
    for request in requests:
        cache.get(request)
    assert (len(cache.kept), cache.n_bytes) == (4, 4 * size)
    same = Request(prompt=[2], strategy=Strategy(logit_bias={8: 1.0}))
    assert cache.get(same) is cache.get(requests[8])
    prepared = replace(same, processor=LogitsProcessor(model_of("llama"), None, same.strategy))
    assert cache.get(prepared) is prepared.processor
    assert cache.get(replace(prepared, eos=(3,))).ends == (3,), "one that was prepared for other settings is not used"


def test_a_strategy_that_was_changed_in_place_is_prepared_anew() -> None:
    cache, biases = ProcessorCache(model_of("llama")), {5: 9.0}
    request = Request(prompt=[1], strategy=Strategy(logit_bias=biases))
    assert cache.get(request).bias is not None
    biases.clear()
    assert cache.get(request).bias is None
