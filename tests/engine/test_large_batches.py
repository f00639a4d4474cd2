"""A large batch on a GPU changes seldom: texts that are over keep their rows, and requests wait, until several do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from clearhead.engine.scheduler import HOLD_STEPS
from clearhead.generation import Engine, Request, Strategy
from tests.engine.test_async_scheduling import on_a_gpu
from tests.engine.test_engine import MAX_LEN, alone, assert_nothing_left, assert_same, check_memory, model_of


def large(max_rows: int, **options: Any) -> Engine:
    """In float64: in a large batch the products of float32 have other last digits."""
    made = on_a_gpu(Engine(model_of("llama", torch.float64), max_rows=max_rows, **options))
    made.scheduler.hold_steps = HOLD_STEPS
    return made


@pytest.mark.usefixtures("unchecked")
def test_few_requests_wait_for_others_but_not_long() -> None:
    made = large(96, max_tokens=4000)
    for place in range(70):
        made.submit(Request(prompt=[1 + place % 40], max_new_tokens=40, eos=()))
    made.step()
    assert made.n_running == 70
    waits: list[int] = []
    for n in (1, 9):  # nine are an eighth of the batch: they join at once
        tickets = [made.submit(Request(prompt=[3, 5], max_new_tokens=2, eos=())) for _ in range(n)]
        waits.append(0)
        while any(ticket.is_waiting for ticket in tickets):
            made.step()
            waits[-1] += 1
    assert waits == [HOLD_STEPS + 1, 1]
    made.run()
    assert_nothing_left(made)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("client", "max_tokens"), [(None, 8000), ("a", 8000), ("a", 4800)], ids=["rows", "spared rows", "spared blocks"]
)
def test_a_full_batch_is_refilled_by_several_requests_at_once(client: str | None, max_tokens: int) -> None:
    """Whatever makes requests wait: each time that some join a large batch costs a prefill."""
    rng, engine = random.Random("full"), large(80, max_tokens=max_tokens)
    for _ in range(200):
        prompt = [rng.randrange(1, 50) for _ in range(3)]
        engine.submit(Request(prompt=prompt, max_new_tokens=rng.randint(20, 60), eos=(), client=client))
    engine.step()
    since = 0  # some joined
    while engine.n_waiting:
        n_waiting = engine.n_waiting
        engine.step()
        n_joined = n_waiting - engine.n_waiting
        assert n_joined == 0 or n_joined >= 4 or since >= HOLD_STEPS
        since = 0 if n_joined else since + 1
    engine.run()
    assert_nothing_left(engine)


def some_texts(rng: random.Random, n: int, **more: Any) -> list[Request]:
    """Of many lengths; some fill the model's, some end by themselves."""
    found: list[Request] = []
    for place in range(n):
        prompt = [rng.randrange(1, 50) for _ in range(rng.choice([3, 15, 16, 17]))]
        limit = MAX_LEN - len(prompt) if place % 9 == 0 else rng.randint(9, 40)
        found.append(Request(prompt=prompt, max_new_tokens=limit, eos=[(), (5, 7)][place % 2], scored=True, **more))
    return found


@pytest.mark.usefixtures("unchecked")
def test_texts_that_are_over_keep_their_rows_for_some_steps() -> None:
    rng, engine, changes = random.Random("over"), large(80), list[int]()
    keep_rows = engine.runner.keep_rows

    def keep(rows: Any, **more: Any) -> None:
        changes.extend([engine.n_steps] * engine.scheduler.is_large)
        keep_rows(rows, **more)

    engine.runner.keep_rows = keep
    tickets = [engine.submit(request) for request in some_texts(rng, 160)]
    n_ends, reported = 0, list[Any]()
    while engine.is_busy:
        large_batch = engine.scheduler.is_large
        for ticket, token in engine.step():
            n_ends += token is None and large_batch
            reported += [ticket] if token is None else []
        check_memory(engine)
        assert engine.n_running + engine.n_waiting <= sum(not ticket.is_done for ticket in tickets)
    assert sorted(map(id, reported)) == sorted(map(id, tickets))  # each once, and at its end
    assert n_ends > 80
    assert len(changes) < n_ends / 2
    for ticket in tickets[::3]:
        assert_same(ticket, alone(engine.model, ticket.request), 1e-9)
    assert_nothing_left(engine)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("more", [{"strategy": Strategy(temperature=0.0, repetition_penalty=1.3)}, {"lookup": True}])
def test_batches_that_need_the_last_tokens_change_at_once(more: dict[str, Any]) -> None:
    """What a penalty or a draft is computed from would be that of rows whose texts are over."""
    engine = large(80)
    tickets = [engine.submit(request) for request in some_texts(random.Random("now"), 76, **more)]
    while engine.is_busy:
        engine.step()
        assert not any(sequence.is_over for sequence in engine.scheduler.running)
    for ticket in tickets[::9]:
        assert_same(ticket, alone(engine.model, ticket.request), 1e-9)
    assert_nothing_left(engine)


@pytest.mark.usefixtures("unchecked")
def test_who_leaves_frees_the_memory_of_all_that_is_over() -> None:
    engine = large(80)
    tickets = [engine.submit(request) for request in some_texts(random.Random("leave"), 76)]
    while not engine.scheduler.over:
        engine.step()
    n_used = engine.allocator.n_used
    engine.cancel(next(ticket for ticket in tickets if not ticket.is_done))
    assert engine.allocator.n_used < n_used
    assert not any(sequence.is_over for sequence in engine.scheduler.running)
    check_memory(engine)
    engine.run()
    assert_nothing_left(engine)


@pytest.mark.usefixtures("unchecked")
def test_no_row_goes_beyond_the_model() -> None:
    """A text that has filled the model's length leaves at once: there is no position for another token."""
    engine = large(80)
    for place in range(70):
        engine.submit(Request(prompt=[1 + place % 40], max_new_tokens=40, eos=()))
    full = engine.submit(Request(prompt=[3] * (MAX_LEN - 9), max_new_tokens=9, eos=()))
    while engine.is_busy:
        engine.step()
        assert engine.runner.lengths.max() <= MAX_LEN
    assert len(full.ids) == 9
