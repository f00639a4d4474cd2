"""Schedules of the rate, the batch and the length: the paper's formula, and properties that hold for all settings."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from clearhead.lessons import references
from clearhead.training.recipe import Train
from clearhead.training.schedules import lr_factor, max_lr, mean_batch, spell_batch, stages

CLOSE = 1e-12  # float64, a handful of operations


def rates(**train: Any) -> list[float]:
    made = Train(**train)
    return [lr_factor(step, made) for step in range(made.steps)]


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 4096))
def test_noam_is_the_paper(step: int, warmup: int, d_model: int):
    """lrate = d_model^-0.5 min(step^-0.5, step warmup^-1.5), section 5.3."""
    train = Train(schedule="noam", lr=0.0, warmup=warmup, steps=10**6)
    wanted = references.noam(step, d_model, warmup)
    assert math.isclose(lr_factor(step - 1, train) * max_lr(train, d_model), wanted, rel_tol=CLOSE)


def test_a_rate_given_with_noam_is_the_highest():
    train = Train(schedule="noam", lr=0.003, warmup=7)
    assert max_lr(train, 64) == 0.003
    assert lr_factor(6, train) == 1


@given(
    st.sampled_from(["constant", "cosine", "noam", "wsd"]),
    st.integers(1, 60),
    st.integers(0, 70),
    st.floats(0, 0.99),
    st.floats(0, 0.99),
)
def test_every_rate_rises_once_and_never_again(schedule: Any, steps: int, warmup: int, decay: float, least: float):
    found = rates(schedule=schedule, steps=steps, warmup=warmup, decay=decay, min_lr=least)
    assert all(0 <= r <= 1 for r in found)
    assert found[0] > 0 or (schedule == "cosine" and steps == 1)
    until = min(steps, math.floor((1 - decay) * steps) if schedule == "wsd" else steps, max(warmup, 1))
    assert all(a < b for a, b in pairwise(found[:until]))  # the warm-up
    peak = max(warmup, 1) - 1
    assert all(a >= b - CLOSE for a, b in pairwise(found[peak:]))


@given(st.integers(1, 40), st.integers(41, 90), st.floats(0, 0.99))
def test_cosine_ends_at_the_least(warmup: int, steps: int, least: float):
    found = rates(schedule="cosine", steps=steps, warmup=warmup, min_lr=least)
    assert math.isclose(found[warmup - 1], 1)
    assert math.isclose(found[-1], least, abs_tol=CLOSE)
    assert all(least - CLOSE <= r for r in found[warmup:])


def test_cosine_is_half_way_down_half_way():
    found = rates(schedule="cosine", steps=31, warmup=11, min_lr=0.2)
    assert math.isclose(found[20], 0.6)  # ten of twenty falling steps are done


@given(st.integers(0, 20), st.integers(60, 120), st.floats(0.05, 0.5), st.floats(0, 0.9))
def test_wsd_stays_and_falls_in_a_line(warmup: int, steps: int, decay: float, least: float):
    found = rates(schedule="wsd", steps=steps, warmup=warmup, decay=decay, min_lr=least)
    falls = math.floor(decay * steps)
    assume(falls >= 2)
    assert all(math.isclose(r, 1) for r in found[max(warmup - 1, 0) : steps - falls - 1])
    last = found[-falls:]
    drops = [a - b for a, b in pairwise(last)]
    assert all(math.isclose(drop, (1 - least) / (decay * steps), rel_tol=1e-6) for drop in drops)
    # one more step of the line would be the least
    assert math.isclose(last[-1] - (1 - least) / (decay * steps), least, abs_tol=1e-9)


def test_without_warmup_the_first_step_is_whole():
    assert rates(schedule="constant", steps=3, warmup=0) == [1, 1, 1]
    assert rates(schedule="noam", steps=3, warmup=0) == pytest.approx([1, 2**-0.5, 3**-0.5])


def test_wsd_without_decay_is_constant():
    assert rates(schedule="wsd", steps=5, warmup=2, decay=0.0) == [0.5, 1, 1, 1, 1]


@given(st.integers(1, 10**6), st.integers(0, 5), st.integers(0, 5), st.floats(0.01, 0.999))
def test_stages_only_grow_and_end_full(steps: int, batch: int, length: int, growth: float):
    train = Train(steps=steps, batch_doublings=batch, length_doublings=length, growth=growth)
    found = stages(train)
    assert found[0].first == 0
    assert found[-1].stop == steps
    assert all(a.stop == b.first for a, b in pairwise(found))
    assert all(stage.first < stage.stop for stage in found)
    assert found[-1][2:] == (0, 0)
    for name, n in (("batch_halvings", batch), ("length_halvings", length)):
        halvings = [getattr(stage, name) for stage in found]
        assert halvings == sorted(halvings, reverse=True)
        assert max(halvings) <= n
        if growth * steps >= n + 1:  # a step or more for each
            assert set(halvings) == set(range(n + 1))
    assert mean_batch(train) <= 1
    assert (mean_batch(train) == 1) == (found[0].batch_halvings == 0)


def test_doublings_are_at_equal_distances():
    train = Train(steps=100, batch_tokens=4096, batch_doublings=2, length_doublings=1, growth=0.4)
    assert [tuple(stage) for stage in stages(train)] == [(0, 20, 2, 1), (20, 40, 1, 1), (40, 100, 0, 0)]
    assert mean_batch(train) == (20 / 4 + 20 / 2 + 60) / 100
    assert spell_batch(train) == "1,024 to 4,096"
    assert spell_batch(Train(batch_tokens=4096)) == "4,096"
