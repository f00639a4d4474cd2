"""Fewer threads on a busy machine, and the same number when a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clearhead.training import read_run, train
from clearhead.training.threads import choose_threads, num_threads, time_products
from training.tiny_runs import Watching, make_recipe, weights


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


def fewer_is_faster(n: int) -> float:
    return 0.1 * n


def no_measurement(n: int) -> float:
    return pytest.fail("measured")


def test_a_busy_machine() -> None:
    threads, why = choose_threads(3.0, fewer_is_faster)
    assert threads == 1
    assert (
        why
        == "the machine is busy (load 3.0): 1 thread instead of 4, 4.0 times as fast here; --set train.threads=4 for all"
    )
    assert choose_threads(2.0, fewer_is_faster)[0] == 2
    assert choose_threads(99.0, fewer_is_faster)[0] == 1


def test_load_that_slows_nothing_down_is_no_reason() -> None:
    """The load is a minute's mean: what caused it may have ended."""
    assert choose_threads(3.0, lambda n: 1.0 / n) == (4, "")


def test_a_quiet_machine_is_not_measured() -> None:
    assert choose_threads(1.0, no_measurement) == (4, "")


def test_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert choose_threads(99.0, no_measurement) == (4, "")


def test_one_thread_can_not_be_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert choose_threads(99.0, no_measurement) == (1, "")


def test_a_product_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # else the number of threads that is put back would be the false one
    before = torch.get_num_threads()
    assert 0 < time_products(2) < 1
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_a_run_sets_its_threads_and_resumes_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    seen: list[int] = []

    class Asking(Watching):
        def begin(self, summary: dict[str, str], step: int, steps: int) -> None:
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    recipe = make_recipe("language", tmp_path, threads=2)
    train(recipe, tmp_path / "x", show=(first := Asking(stop=3)))
    assert torch.get_num_threads() == before
    train(read_run(tmp_path / "x"), tmp_path / "x", resume=True, show=(second := Asking()))
    assert seen == [2, 2]
    assert not [note for note in first.notes + second.notes if "threads" in note]
    train(recipe, tmp_path / "y")
    assert weights(tmp_path / "x") == weights(tmp_path / "y")


@pytest.mark.slow
def test_another_number_of_threads_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    recipe = make_recipe("language", tmp_path)
    with num_threads(2):
        train(recipe, tmp_path / "x", show=Watching(stop=3))
    with num_threads(1):
        train(recipe, tmp_path / "x", resume=True, show=(show := Watching()))
    assert any(
        "used 2 threads and goes on with 1" in note and "train.threads=2 keeps them" in note for note in show.notes
    )
