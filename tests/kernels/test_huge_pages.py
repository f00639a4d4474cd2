"""Weights move to huge pages while they are used: no number is lost, and a mapped file waits for other threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clearhead.kernels import huge_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has huge pages")

SIZE = 8 * huge_pages.PIECE  # bytes


@pytest.fixture
def weight(tmp_path: Path) -> Tensor:
    """Zeros in a mapped file, as a checkpoint's weights are."""
    (tmp_path / "weights").write_bytes(bytes(SIZE))
    return torch.from_file(str(tmp_path / "weights"), shared=False, size=SIZE // 4)


@pytest.fixture
def writer(weight: Tensor) -> Iterator[tuple[threading.Event, threading.Thread, list[int]]]:
    """A thread that adds 1 to every number, as a training step writes to weights, until it is told to stop."""
    stop, n_added = threading.Event(), [0]

    def add() -> None:
        while not stop.is_set():
            weight.add_(1)
            n_added[0] += 1

    thread = threading.Thread(target=add)
    thread.start()
    yield stop, thread, n_added
    stop.set()
    thread.join()


def is_mapped_file(weight: Tensor) -> bool:
    middle = weight.data_ptr() + SIZE // 2
    return any(is_file for start, end, is_file in huge_pages._maps() if start <= middle < end)  # pyright: ignore[reportPrivateUsage]


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have left threads."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def test_a_mapped_file_becomes_plain_memory(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    weight[5], weight[-1] = 7, 11
    before, address = weight.clone(), weight.data_ptr()
    assert is_mapped_file(weight)
    assert len([*huge_pages.move([weight])]) >= 7  # all but the ends, which share their pages
    assert not is_mapped_file(weight)
    assert weight.data_ptr() == address
    assert torch.equal(weight, before)


def test_no_write_is_lost(weight: Tensor, writer: tuple[threading.Event, threading.Thread, list[int]]) -> None:
    """While another thread lives, a mapped file stays: a number written between its copy and its move would be gone."""
    stop, thread, n_added = writer
    mover = huge_pages.move([weight])
    for _ in range(50):
        next(mover)
        assert is_mapped_file(weight)
    stop.set()
    thread.join()
    assert n_added[0] > 0
    assert (weight == n_added[0]).all()


def test_it_goes_on_when_it_is_alone(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    mover = huge_pages.move([weight])
    assert len([*islice(mover, 99)]) == 99
    assert is_mapped_file(weight)
    alone(monkeypatch)
    assert len([*mover]) >= 6
    assert not is_mapped_file(weight)


def test_what_nobody_else_has_does_not_wait(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert len([*huge_pages.move([weight], shared=False)]) >= 7
    assert not is_mapped_file(weight)


def test_plain_memory_moves_under_writes() -> None:
    """The operating system moves it: a thread that writes waits for the page."""
    weight, stop, n_added = torch.zeros(SIZE // 4), threading.Event(), [0]

    def add() -> None:
        while not stop.is_set():
            weight.add_(1)
            n_added[0] += 1

    thread = threading.Thread(target=add)
    thread.start()
    for _ in range(5):
        assert len([*huge_pages.move([weight])]) >= 7
    stop.set()
    thread.join()
    assert (weight == n_added[0]).all()


def test_memory_stays_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that gets other data gives its memory back; the mover must not write to what comes there then."""
    alone(monkeypatch)
    (tmp_path / "weights").write_bytes(bytes(SIZE))
    parameter = torch.nn.Parameter(torch.from_file(str(tmp_path / "weights"), shared=False, size=SIZE // 4))
    last = parameter.data_ptr() + SIZE - 4096
    mover = huge_pages.move([parameter])
    next(mover)
    parameter.data = torch.zeros(3)
    is_there = [start <= last < end and is_file for start, end, is_file in huge_pages._maps()]  # pyright: ignore[reportPrivateUsage]
    assert any(is_there)
    assert [*mover]
