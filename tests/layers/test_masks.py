"""Masks: a few facts, the same answer for each pair however they are combined or cut."""

from __future__ import annotations

from functools import reduce
from operator import and_

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from clearhead.errors import InputError
from clearhead.layers.masks import ABSENT, Mask, causal, check_real, documents, padding, positions_of, window

from . import drawn
from .reference import B, Facts, S

CPU = torch.device("cpu")
ALL = slice(None)


def dense(mask: Mask, T: int, S: int = S, rows: slice = ALL, cols: slice = ALL) -> Tensor:
    """Every pair's answer, (B, T, S), written out."""
    n_rows, n_cols = len(range(T)[rows]), len(range(S)[cols])
    allowed = mask.allowed(T, S, rows, cols, CPU)
    return torch.ones(B, n_rows, n_cols).bool() if allowed is None else allowed[:, 0].expand(B, n_rows, n_cols)


@given(facts=drawn.facts(B, S), queries=st.integers(1, S))
def test_a_mask_answers_for_every_pair(facts: Facts, queries: int) -> None:
    assert torch.equal(dense(facts.mask(), queries), facts.pairs(B, queries, S))


@given(left=drawn.facts(B, S), right=drawn.facts(B, S))
def test_and_commutes(left: Facts, right: Facts) -> None:
    assert torch.equal(dense(left.mask() & right.mask(), S), dense(right.mask() & left.mask(), S))


@given(a=drawn.facts(B, S), b=drawn.facts(B, S), c=drawn.facts(B, S))
def test_and_is_associative(a: Facts, b: Facts, c: Facts) -> None:
    a, b, c = a.mask(), b.mask(), c.mask()
    assert torch.equal(dense((a & b) & c, S), dense(a & (b & c), S))


@given(facts=drawn.facts(B, S))
def test_and_is_idempotent_and_the_empty_mask_is_its_one(facts: Facts) -> None:
    mask = facts.mask()
    assert torch.equal(dense(mask & mask, S), dense(mask, S))
    assert torch.equal(dense(mask & Mask(), S), dense(mask, S))
    assert torch.equal(dense(Mask() & mask, S), dense(mask, S))


@given(left=drawn.facts(B, S), right=drawn.facts(B, S))
def test_and_without_padding_allows_what_both_allow(left: Facts, right: Facts) -> None:
    """With padding, positions count real tokens, so a window reaches further than either mask's alone; and with documents a
    pattern counts in each of them."""
    left.real = right.real = None
    if left.patterns or right.patterns:
        left.documents = right.documents = []
    assert torch.equal(dense(left.mask() & right.mask(), S), dense(left.mask(), S) & dense(right.mask(), S))


@given(real=st.lists(st.lists(st.booleans(), min_size=S, max_size=S), min_size=2 * B, max_size=2 * B))
def test_two_paddings_keep_what_is_real_in_both(real: list[list[bool]]) -> None:
    one, two = torch.tensor(real[:B]), torch.tensor(real[B:])
    for first, second in ((one, two), (two, one)):
        combined = causal() & padding(first) & padding(second)
        assert torch.equal(dense(combined, S), dense(causal() & padding(one & two), S))


@given(
    facts=drawn.facts(B, S),
    queries=st.integers(1, S),
    ends=st.tuples(*(st.integers(0, S) for _ in range(4))),
)
def test_a_part_is_a_cut_of_the_whole(facts: Facts, queries: int, ends: tuple[int, int, int, int]) -> None:
    rows, cols = slice(min(ends[0], queries), min(max(ends[:2]), queries)), slice(min(ends[2:]), max(ends[2:]))
    part = dense(facts.mask(), queries, S, rows, cols)
    assert torch.equal(part, dense(facts.mask(), queries)[:, rows, cols])


@given(facts=drawn.facts(B, S), queries=st.integers(1, S + 3))
@example(facts=Facts(window=S), queries=S + 3)
def test_simplify_changes_nothing(facts: Facts, queries: int) -> None:
    if queries > S:
        facts.documents = []  # a query that is no key has no document
    mask = facts.mask()
    assert torch.equal(dense(mask.simplify(queries, S), queries), dense(mask, queries))


def test_simplify_finds_the_mask_that_forbids_nothing() -> None:
    """What the fused kernel needs no tensor for: one new token, and a window as long as the sequence."""
    assert (causal() & window(S)).simplify(1, S).allowed(1, S, ALL, ALL, CPU) is None
    assert window(S).simplify(S, S).allowed(S, S, ALL, ALL, CPU) is None


@given(facts=drawn.facts(B, S), queries=st.integers(1, S))
def test_distances_are_between_real_tokens(facts: Facts, queries: int) -> None:
    ours = facts.mask().distances(queries, S, ALL, ALL, CPU).expand(B, queries, S)
    theirs = [[[facts.distance(b, t + S - queries, j) for j in range(S)] for t in range(queries)] for b in range(B)]
    assert ours.tolist() == theirs


def test_positions_count_real_tokens_only() -> None:
    real = torch.tensor([[True, False, True, True, False], [False, False, True, False, True]])
    assert positions_of(real).tolist() == [[0, ABSENT, 1, 2, ABSENT], [ABSENT, ABSENT, 0, ABSENT, 1]]


def test_the_same_text_is_the_same_computation_wherever_the_padding_is() -> None:
    left = torch.tensor([[False, False, True, True, True]])
    right = torch.tensor([[True, True, True, False, False]])
    pairs = [dense(causal() & window(2) & padding(real), 5, 5)[0][real[0]][:, real[0]] for real in (left, right)]
    assert torch.equal(pairs[0], pairs[1])
    assert torch.equal(pairs[0], dense(causal() & window(2), 3, 3)[0])


def test_batch_is_that_of_the_facts() -> None:
    assert causal().batch is None
    assert (causal() & padding(torch.ones(3, S).bool())).batch == 3
    assert documents(torch.zeros(3, S).long()).batch == 3
    # one padding for all rows, documents of each row: the mask differs by row
    assert (padding(torch.ones(1, S).bool()) & documents(torch.zeros(3, S).long())).batch == 3


def test_windows_meet_in_the_smaller() -> None:
    masks = [window(5), causal(), window(3), window(7)]
    assert reduce(and_, masks).window == 3


def test_a_window_holds_at_least_the_token_itself() -> None:
    for width in (0, -3):
        with pytest.raises(InputError, match=rf"at least the token itself; got width={width}; use 1 or more"):
            window(width)


def test_masks_of_a_cache_do_not_combine() -> None:
    placed = Mask(queries=torch.arange(3)[None], keys=torch.arange(5)[None])
    for combine in (lambda: placed & causal(), lambda: causal() & placed):
        with pytest.raises(InputError, match=r"query positions.*cache.*combine first"):
            combine()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_padding_is_boolean(unchecked: None, dtype: torch.dtype) -> None:
    """A float mask may be additive and an integer one inverted: both are refused with the convention."""
    with pytest.raises(InputError, match=rf"boolean, True = a real token.*{dtype}.*tokens != pad.*additive == 0"):
        padding(torch.ones(B, S).to(dtype))


@pytest.mark.parametrize("shape", [(S,), (B, 1, S), (B, 1, S, S)])
def test_padding_has_one_value_a_token(unchecked: None, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"shape \(batch, length\), one value a token; got \(.*\)") as error:
        padding(torch.ones(shape).bool())
    assert str(shape) in str(error.value)


def test_padding_has_the_shape_of_the_tokens() -> None:
    assert check_real(torch.ones(B, S).bool(), (B, S)).all()
    with pytest.raises(InputError, match=r"shape \(2, 7\).*got \(2, 11\)"):
        check_real(torch.ones(B, S).bool(), (2, 7))
