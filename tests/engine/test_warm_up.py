"""Warm-up: everything that later steps replay is recorded before the first request."""

from __future__ import annotations

import random
from typing import Any

import pytest

from clearhead.engine.cuda_graphs import round_up
from clearhead.engine.scheduler import HOLD_STEPS
from clearhead.engine.warm_up import batch_sizes, prompt_sizes, warm_up
from clearhead.generation import Engine, Request
from tests.engine.test_async_scheduling import on_a_gpu
from tests.engine.test_engine import alone, assert_nothing_left, assert_same, model_of


@pytest.mark.usefixtures("unchecked")
def test_later_steps_record_nothing() -> None:
    model, rng = model_of("llama"), random.Random("warm")
    made = on_a_gpu(Engine(model, max_tokens=2000, max_rows=12))
    warm_up(made)
    graphs: Any = made.runner.graphs
    recorded = set(graphs.keys)
    assert {key[0] for key in recorded if isinstance(key[0], int)} == set(batch_sizes(12))
    assert {key[1:3] for key in recorded if key[0] == "prefill"} >= set(prompt_sizes(made))
    assert_nothing_left(made)
    tickets = [
        made.submit(Request(prompt=[rng.randrange(1, 50) for _ in range(length)], max_new_tokens=n, scored=True))
        for length, n in [
            (1, 3),
            (2, 9),
            (15, 5),
            (17, 30),
            (31, 1),
            (3, 3),
            (40, 8),
            (16, 2),
            (33, 12),
            (5, 5),
            (1, 1),
        ]
    ]
    made.run()
    assert graphs.keys == recorded
    for ticket in tickets:
        assert_same(ticket, alone(model, ticket.request), 1e-5)  # float32: padding adds zeros in another order


def test_prompts_too_large_for_what_is_recorded_need_no_graph() -> None:
    made = on_a_gpu(Engine(model_of("llama"), max_tokens=500, max_rows=4))
    prompts = made.runner.prompts
    prompts.recorded = [(1, 16), (4, 16), (1, 32)]
    assert prompts._graph_size(made.model, 1, 9, 0) == (1, 16, 0)
    assert prompts._graph_size(made.model, 3, 16, 0) == (4, 16, 0)
    assert prompts._graph_size(made.model, 2, 17, 0) is None


@pytest.mark.parametrize("max_rows", [1, 3, 12, 256])
def test_batch_sizes(max_rows: int) -> None:
    sizes = batch_sizes(max_rows)
    assert sizes[0] == max_rows
    assert set(sizes) == {round_up(n, max_rows) for n in range(1, max_rows + 1)}


def test_little_memory() -> None:
    """Requests that do not fit are left out."""
    made = on_a_gpu(Engine(model_of("llama"), max_tokens=32, max_rows=12))
    warm_up(made)
    assert_nothing_left(made)


@pytest.mark.usefixtures("unchecked")
def test_prompts_that_are_partly_cached_are_computed_together() -> None:
    """Asked again, each prompt of two blocks finds its first one: the rest of all is one call, not one for each."""
    model, rng = model_of("llama"), random.Random("again")
    made = on_a_gpu(Engine(model, max_tokens=4000, max_rows=24))
    prompts = [
        [rng.randrange(1, 50) for _ in range(length)] for length in [32, 19, 27, 32, 17, 31, 30, 32, 20, 25, 18, 32]
    ]
    calls: list[int] = []
    run = made.runner.prompts._run_chunks
    made.runner.prompts._run_chunks = lambda *args: calls.append(len(args[1])) or run(*args)
    for is_again in (False, True):
        tickets = [made.submit(Request(prompt=prompt, max_new_tokens=20, scored=True)) for prompt in prompts]
        made.run()
        for ticket in tickets:
            assert ticket.n_cached == 16 * is_again
            assert_same(ticket, alone(model, ticket.request), 1e-5)  # float32: other sums
    assert calls == [12]
    assert_nothing_left(made)


@pytest.mark.usefixtures("unchecked")
def test_a_large_batch_is_recorded_in_all_sizes_and_a_burst_is_computed() -> None:
    """Also where rows of texts that are over may stay, and for more prompts at once than any graph has."""
    made = on_a_gpu(Engine(model_of("llama"), max_tokens=9000, max_rows=96, prefill_tokens=16_384))
    made.scheduler.hold_steps = HOLD_STEPS
    grids: list[tuple[int, int]] = []
    run = made.runner.prompts._run_padded

    def padded(model: Any, inputs: Any, T: int, *args: Any) -> Any:
        grids.append((len(inputs), T))
        return run(model, inputs, T, *args)

    made.runner.prompts._run_padded = padded
    warm_up(made)
    graphs: Any = made.runner.graphs
    assert {key[0] for key in graphs.keys if isinstance(key[0], int)} == set(batch_sizes(96))
    assert 96 not in {rows for rows, _ in made.runner.prompts.recorded}
    assert any(rows == 96 and length > 1 for rows, length in grids)
    assert_nothing_left(made)
