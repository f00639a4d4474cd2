"""The order of rows: a pure function of (seed, step), every row once an epoch, new batches in each epoch, little padding."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data import (
    PackedOrder,
    RowOrder,
    Tokenizer,
    TokenOrder,
    held_out,
    in_order,
    padding_waste,
    prepare_pairs,
    read_pairs,
    train_tokenizer,
)
from clearhead.errors import ConfigError, InputError
from tests.shared_data import shared_data


def some_lengths(n: int = 997, seed: int = 3) -> list[np.ndarray]:
    """Lengths like those of real sentences: with long tails, and similar for source and target."""
    random = np.random.default_rng(seed)
    source = 2 + random.gamma(4, 4, n)
    return [source.astype(np.int64), (source * random.uniform(0.8, 1.4, n)).astype(np.int64) + 1]


@given(st.integers(1, 23), st.integers(1, 31), st.integers(0, 5))
def test_every_row_once_an_epoch(n: int, rows_per_step: int, seed: int) -> None:
    order = RowOrder(n, rows_per_step, seed)
    rows = np.concatenate([order.rows(step) for step in range(3 * n)])
    assert all(len(order.rows(step)) == rows_per_step for step in (0, 7))
    for epoch in range(3):
        assert sorted(rows[epoch * n : (epoch + 1) * n]) == list(range(n))


@given(st.integers(1, 23), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 31)), min_size=1, max_size=4))
def test_rows_a_step_may_change(n: int, parts: list[tuple[int, int]]) -> None:
    """Whatever the sizes of steps: every row once an epoch, and `epoch` counts what the steps before have had."""
    stages: list[tuple[int, int]] = []
    first = 0
    for steps, rows_per_step in parts:
        stages.append((first, rows_per_step))
        first += steps
    order, seen = RowOrder(n, stages, 3), np.zeros(0, np.int64)
    for step in range(first + 3 * n):
        assert order.epoch(step) == len(seen) / n
        wanted = next(rows for start, rows in reversed(stages) if start <= step)
        rows = order.rows(step)
        assert len(rows) == wanted
        seen = np.concatenate([seen, rows])
    for epoch in range(len(seen) // n):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert RowOrder(n, stages, 3).rows(first).tolist() == order.rows(first).tolist()  # pure


def test_row_order_is_a_pure_function() -> None:
    one, two = RowOrder(101, 7, 5), RowOrder(101, 7, 5)
    forward = [one.rows(step).tolist() for step in range(40)]
    assert forward == [two.rows(step).tolist() for step in reversed(range(40))][::-1]
    assert forward[:15] != [RowOrder(101, 7, 6).rows(step).tolist() for step in range(15)]
    assert forward[0] != one.rows(101)[:7].tolist()  # step 101 starts epoch 7, with a new order
    assert one.epoch(0) == 0
    assert one.epoch(101) == 7


def test_token_order_is_a_pure_function() -> None:
    one, two = (TokenOrder(some_lengths(), 499, 5) for _ in range(2))
    steps = [0, 3, 211, 40, 100, 1, 170]
    forward = {step: one.rows(step).tolist() for step in sorted(steps)}
    assert forward == {step: two.rows(step).tolist() for step in steps}
    assert forward[0] != TokenOrder(some_lengths(), 499, 6).rows(0).tolist()


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 19), st.integers(1, 13)), min_size=1, max_size=60),
    st.integers(19, 70),
    st.sampled_from([None, 1, 3]),
    st.integers(1, 2),
)
def test_token_order(pairs: list[tuple[int, int]], budget: int, max_rows: int | None, n_columns: int) -> None:
    """Every epoch has each row once, and no batch exceeds the budget in any column."""
    lengths = [np.array(column) for column in zip(*pairs, strict=True)][:n_columns]
    order = TokenOrder(lengths, budget, 7, max_rows)
    step = 0
    for epoch in range(3):
        rows: list[int] = []
        while order.epoch(step) < epoch + 1:
            batch = order.rows(step)
            assert 0 < len(batch) <= (max_rows or len(pairs))
            assert all(len(batch) * column[batch].max() <= budget for column in lengths)
            rows += batch.tolist()
            step += 1
        assert sorted(rows) == list(range(len(pairs)))
    whole = in_order(lengths, budget, max_rows)
    assert sorted(np.concatenate(whole)) == list(range(len(pairs)))
    assert all(len(batch) * column[batch].max() <= budget for batch in whole for column in lengths)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 19), st.integers(1, 13)), min_size=1, max_size=60),
    st.tuples(st.integers(19, 70), st.integers(19, 70)),
    st.sampled_from([None, 1, 3]),
)
def test_packed_order(pairs: list[tuple[int, int]], rooms: tuple[int, int], max_rows: int | None) -> None:
    """Every epoch has each row once, in another order. No batch exceeds its limit, and none had space for the next row."""
    lengths = [np.array(column) for column in zip(*pairs, strict=True)]
    plans = epochs(PackedOrder(lengths, rooms, 7, max_rows), 3)
    for batches in plans:
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(pairs)))
        for batch, after in zip(batches, [*batches[1:], None], strict=True):
            assert 0 < len(batch) <= (max_rows or len(pairs))
            assert all(column[batch].sum() <= room for column, room in zip(lengths, rooms, strict=True))
            more = batch if after is None else np.append(batch, after[0])
            full = any(column[more].sum() > room for column, room in zip(lengths, rooms, strict=True))
            assert after is None or full or len(batch) == max_rows
    if len(pairs) > 9:
        assert np.concatenate(plans[0]).tolist() != np.concatenate(plans[1]).tolist()


def epochs(order: TokenOrder, count: int) -> list[list[np.ndarray]]:
    found: list[list[np.ndarray]] = [[] for _ in range(count)]
    step = 0
    while (epoch := int(order.epoch(step))) < count:
        found[epoch].append(order.rows(step))
        step += 1
    return found


def test_batches_change_from_epoch_to_epoch() -> None:
    lengths = some_lengths(5003)
    first, second = epochs(TokenOrder(lengths, 1009, 1), 2)
    home = np.empty(5003, int)
    for number, batch in enumerate(second):
        home[batch] = number
    together = np.mean([(home[batch][:, None] == home[batch]).mean() for batch in first])
    assert together < 0.4  # the share of pairs of rows that share a batch again; 1 without shuffling
    # Short and long batches are mixed: their widths do not rise.
    widths = [lengths[0][batch].max() for batch in first]
    assert abs(np.corrcoef(widths, np.arange(len(widths)))[0, 1]) < 0.2


def test_batches_are_full() -> None:
    lengths = some_lengths(5003)
    (batches,) = epochs(TokenOrder(lengths, 1009, 1), 1)
    held = [max(len(batch) * int(column[batch].max()) for column in lengths) for batch in batches]
    assert np.mean(held) > 0.9 * 1009


def test_padding_waste() -> None:
    lengths = [np.array([2, 3, 5]), np.array([7, 7, 1])]
    # 2 x 3 + 2 x 7 and 5 + 1 positions, for 2 + 3 + 7 + 7 and 6 tokens
    assert padding_waste(lengths, [np.array([0, 1]), np.array([2])]) == pytest.approx(1 - 25 / 26)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2048, 4096, 8192])
def test_padding_on_multi30k(multi30k: list[np.ndarray], budget: int) -> None:
    for batches in epochs(TokenOrder(multi30k, budget, 1), 2):
        assert padding_waste(multi30k, batches) < 0.10
    assert padding_waste(multi30k, in_order(multi30k, budget)) < 0.09


@pytest.fixture(scope="module")
def multi30k(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    source, target = (shared_data(f"multi30k/train.{language}.gz") for language in ("en", "de"))
    folder = tmp_path_factory.mktemp("multi30k")
    store = prepare_pairs(folder / "s", source, target, learn(source, target))
    assert len(store) == 29_000
    return [store["source"].lengths, store["target"].lengths]


def learn(*files: Path) -> Tokenizer:
    lines = [line for pair in islice(read_pairs(*files), 3001) for line in pair]
    return train_tokenizer(texts=lines, vocab_size=4001)


def test_refusals() -> None:
    with pytest.raises(InputError, match=r"row 1 has 11 tokens, more than a whole batch of 7; raise"):
        TokenOrder([np.array([1, 2]), np.array([1, 11])], 7, 0)
    with pytest.raises(InputError, match="0 rows"):
        in_order([np.zeros(0, np.int64)], 7)
    with pytest.raises(ConfigError, match="at least 1"):
        RowOrder(0, 5, 0)
    with pytest.raises(ConfigError, match="0 rows a step of 7 rows"):
        RowOrder(7, [(0, 0), (4, 5)], 0)


def test_held_out() -> None:
    train, valid = held_out(1009, 0.1, 3)
    assert len(valid) == 101
    assert sorted([*train, *valid]) == list(range(1009))
    assert np.array_equal(valid, held_out(1009, 0.1, 3)[1])
    assert not np.array_equal(valid, held_out(1009, 0.1, 4)[1])
    assert [len(rows) for rows in held_out(2, 0.01, 0)] == [1, 1]
    for n, share in ((1, 0.5), (9, 0.0), (9, 1.0)):
        with pytest.raises(ConfigError, match="can not be split"):
            held_out(n, share, 0)
