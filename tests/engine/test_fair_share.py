"""Clients take turns: one with many requests does not keep another waiting."""

from __future__ import annotations

from typing import Any

import pytest

import clearhead as ch
from clearhead.engine.fair_queue import FairQueue
from clearhead.generation import Engine, Request


@pytest.fixture(scope="module")
def model() -> Any:
    return ch.build(ch.preset("gpt2", n_layers=2, d_model=24, n_heads=3, vocab_size=97, max_len=128)).eval()


def ask(client: str | None, at: int = 0, n_prompt: int = 3, n_new: int = 20) -> Request:
    return Request(prompt=[5 + at % 80] * n_prompt, max_new_tokens=n_new, eos=(), client=client)


def test_the_queue_takes_turns() -> None:
    queue = FairQueue[int]()
    for client, item in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5), ("c", 6)):
        queue.append(client, item)
    queue.keep("b", lambda item: item != 5)
    assert len(queue) == 5
    found = [queue.pop(queue.heads()[0][0]) for _ in range(5)]
    assert found == [1, 4, 6, 2, 3]
    assert len(queue) == 0
    assert queue.heads() == []


def test_requests_are_admitted_client_by_client(model: Any) -> None:
    engine = Engine(model, max_rows=1)
    tickets = {
        f"{client}{at}": engine.submit(ask(client, at, n_new=2)) for client, at in zip("aaabbc", range(6), strict=True)
    }
    order: list[str] = []
    while engine.is_busy:
        engine.step()
        order += [name for name, ticket in tickets.items() if not ticket.is_waiting and name not in order]
    assert order == ["a0", "b3", "c5", "a1", "b4", "a2"]


def test_who_comes_to_a_full_engine_is_admitted_at_once(model: Any) -> None:
    engine = Engine(model, max_rows=16)
    many = [engine.submit(ask("a", at, n_new=90)) for at in range(60)]
    engine.step()
    assert engine.n_running == 14  # an eighth is for others
    late = engine.submit(ask("b"))
    engine.step()
    assert not late.is_waiting
    engine.step()
    assert late.ids
    assert sum(ticket.is_waiting for ticket in many) == engine.n_waiting == engine.n_waiting_of("a") == 46
    assert engine.n_waiting_of("b") == 0
    engine.run()
    alone = Engine(model, max_rows=1)
    expected = alone.submit(ask("b"))
    alone.run()
    assert late.ids == expected.ids


def test_of_many_rows_eight_are_spared(model: Any) -> None:
    engine = Engine(model, max_rows=96)
    for at in range(100):
        engine.submit(ask("a", at))
    engine.step()
    assert engine.n_running == 88
    others = [engine.submit(ask(str(at))) for at in range(9)]
    engine.step()
    assert [each.is_waiting for each in others] == [False] * 8 + [True]


def test_blocks_are_spared_too(model: Any) -> None:
    engine = Engine(model, max_tokens=1024)
    for at in range(20):
        engine.submit(ask("a", at, n_new=100))
    engine.step()
    assert engine.n_waiting > 0
    late = engine.submit(ask("b"))
    engine.step()
    assert not late.is_waiting


def test_without_a_name_all_of_the_engine_is_used(model: Any) -> None:
    engine = Engine(model, max_rows=16)
    for at in range(20):
        engine.submit(ask(None, at))
    engine.step()
    assert engine.n_running == 16


def test_a_client_alone_may_need_everything(model: Any) -> None:
    engine = Engine(model, max_tokens=128, max_rows=1)
    ticket = engine.submit(ask("a", n_prompt=28, n_new=100))
    engine.run()
    assert len(ticket.ids) == 100


def test_a_large_request_is_not_overtaken_for_ever(model: Any) -> None:
    engine = Engine(model, max_tokens=256)
    for at in range(40):
        engine.submit(ask("a", at, n_new=12))
    engine.step()
    large = engine.submit(ask("b", n_prompt=28, n_new=100))
    for _ in range(30):  # two texts of the other client, and some
        engine.step()
    assert not large.is_waiting
    assert engine.n_waiting_of("a") > 0


def test_prompts_are_prefilled_in_turns(model: Any) -> None:
    engine = Engine(model, max_rows=16, prefill_tokens=32)
    for at in range(10):
        engine.submit(ask("a", at, n_prompt=64))
    engine.step()
    for at in range(2):
        engine.submit(ask("b", at, n_prompt=60))
    engine.scheduler.admit()
    assert [sequence.ticket.request.client for sequence in engine.scheduler.prefilling][:5] == ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize("client", [None, "a"])
def test_a_cancelled_request_leaves_the_queue_at_once(model: Any, client: str | None) -> None:
    engine = Engine(model, max_rows=1)
    engine.submit(ask("b", 0, n_new=5))
    waits, follows = engine.submit(ask(client, 1, n_new=2)), engine.submit(ask(client, 2, n_new=2))
    engine.step()
    assert engine.n_waiting == 2
    engine.cancel(waits)
    assert engine.n_waiting == 1
    engine.run()
    assert (waits.ids, waits.reason, len(follows.ids)) == ([], "cancelled", 2)
