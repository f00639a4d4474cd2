"""A store as one stream of tokens: the windows of a step, their documents, and evaluations that have every token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data import Column, StoreWriter, Windows, split_stream
from clearhead.data.token_store import Store
from clearhead.errors import InputError


def column(lengths: list[int]) -> Column:
    """Token i of the stream is i."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Column(np.arange(offsets[-1], dtype=np.uint16), offsets)


def test_a_batch_has_tokens_and_documents() -> None:
    tokens, documents = Windows(column([3, 0, 5, 9]), 4, seed=0).batch(np.array([1, 6]))
    assert tokens.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert documents.tolist() == [[0, 0, 2, 2, 2], [2, 2, 3, 3, 3]]
    assert tokens.dtype == documents.dtype == torch.int64


@given(st.integers(2, 60), st.integers(1, 13), st.integers(0, 7), st.integers(0, 3))
def test_windows_are_inside_the_stream_and_do_not_overlap(n_tokens: int, length: int, start: int, seed: int) -> None:
    if n_tokens <= length:
        with pytest.raises(InputError, match="too few for one window"):
            Windows(column([start + n_tokens]), length, seed, start)
        return
    windows = Windows(column([start + n_tokens + 3]), length, seed, start, start + n_tokens)
    for epoch in range(3):
        starts = np.concatenate([windows.starts(epoch * len(windows) + step) for step in range(len(windows))])
        assert starts.min() >= start
        assert starts.max() + length < start + n_tokens
        assert len(set(starts)) == len(windows)
        assert len(set(starts % length)) == 1  # one shift for all, so targets do not overlap
        # Tokens that are not a target in this epoch: the first one, and less than a window at each end.
        assert n_tokens - len(windows) * length < 2 * length + 1


def test_the_shift_changes() -> None:
    windows = Windows(column([1009]), 13, seed=3)
    cuts = {int(windows.starts(epoch * len(windows))[0]) % 13 for epoch in range(60)}
    assert len(cuts) > 10


def test_steps_are_a_pure_function() -> None:
    one, two = (Windows(column([1009]), 13, seed=3, rows_per_step=7) for _ in range(2))
    forward = [one.starts(step).tolist() for step in range(40)]
    assert forward == [two.starts(step).tolist() for step in reversed(range(40))][::-1]
    other = Windows(column([1009]), 13, seed=4, rows_per_step=7)
    assert forward != [other.starts(step).tolist() for step in range(40)]
    assert one.epoch(len(one)) == 7


@given(st.integers(2, 50), st.integers(1, 13), st.integers(0, 5))
def test_an_evaluation_has_each_target_once(n_tokens: int, length: int, start: int) -> None:
    if n_tokens <= length:
        return
    windows = Windows(column([start + n_tokens + 2]), length, 0, start, start + n_tokens)
    tokens, documents = windows.batch(windows.in_order())
    targets = tokens[:, 1:][documents[:, 1:] >= 0]
    assert targets.tolist() == list(range(start + 1, start + n_tokens))


def test_nanogpt_split() -> None:
    assert split_stream(1_115_394, 0.1) == 1_003_854
    assert split_stream(100, 0.25) == 75


def test_a_store_is_not_copied(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", {"text": np.uint32}) as writer:
        writer.add(text=np.arange(70_001))
        writer.add(text=np.arange(11))
    text = Store(tmp_path / "s")["text"]
    tokens, documents = Windows(text, 5, 0).batch(np.array([69_998]))
    assert tokens.tolist() == [[69_998, 69_999, 70_000, 0, 1, 2]]
    assert documents.tolist() == [[0, 0, 0, 1, 1, 1]]
