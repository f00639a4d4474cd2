"""Sparse patterns by themselves: what they keep, how many, what they say of tiles, and their text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clearhead.costs.flops import count_pairs
from clearhead.errors import ConfigError
from clearhead.sparsity import Pattern
from tests.layers.drawn import patterns
from tests.layers.reference import keeps


def kept(pattern: Pattern, length: int) -> Tensor:
    at = torch.arange(length)
    return pattern.keeps(at[:, None], at)


@given(pattern=patterns(), length=st.integers(1, 20))
def test_a_pair_is_kept_by_one_of_the_kinds(pattern: Pattern, length: int) -> None:
    expected = [[keeps(pattern, i, j) for j in range(length)] for i in range(length)]
    assert kept(pattern, length).tolist() == expected
    assert torch.equal(kept(pattern, length), kept(pattern, length).T)
    assert kept(pattern, length).diagonal().all()


@given(pattern=patterns(), length=st.integers(1, 60))
def test_the_closed_form_counts_what_is_kept(pattern: Pattern, length: int) -> None:
    pairs = kept(pattern, length)
    assert pattern.count_pairs(length, length, causal=False) == pairs.sum()
    assert pattern.count_pairs(length, length, causal=True) == pairs.tril().sum()
    assert pattern.count_pairs(1, length, causal=True) == pairs[-1].sum()
    assert count_pairs(length, length, causal=True, patterns=(pattern,)) == pairs.tril().sum()


@given(pattern=patterns(), length=st.integers(1, 40), side=st.integers(1, 9))
def test_tiles_are_exact_where_places_are_in_order(pattern: Pattern, length: int, side: int) -> None:
    pairs, starts = kept(pattern, length), torch.arange(0, length, side)
    ends = (starts + side - 1).clamp(max=length - 1)
    queries, keys = (starts[:, None], ends[:, None]), (starts[None], ends[None])
    some, every = pattern.may_keep(queries, keys, side), pattern.keeps_all(queries, keys)
    for i, row in enumerate(pairs.split(side)):
        for j, tile in enumerate(row.split(side, 1)):
            assert some[i, j] == tile.any()
            assert tile.all() or not every[i, j]
            if pattern.block % side == 0:
                assert every[i, j] == tile.all()


def test_random_blocks_are_as_many_as_said_and_spread() -> None:
    """Outside the window and the global blocks, below each block's row; other seeds draw others."""
    pattern = Pattern(window=2, n_global=1, n_random=3, seed=5)
    plain = Pattern(window=2, n_global=1)
    drawn = (kept(pattern, 400) & ~kept(plain, 400)).tril()
    assert drawn.sum(1).tolist() == [min(max(row - 2, 0), 3) for row in range(400)]
    far = (torch.arange(400)[:, None] - torch.arange(400))[drawn][-600:].float()
    assert far.mean() == pytest.approx(150, abs=15)  # of rows 200 to 400, evenly from 0 to the row
    other = Pattern(window=2, n_global=1, n_random=3, seed=6)
    assert (kept(other, 400) & drawn).sum() < 0.1 * drawn.sum()


@given(pattern=patterns())
def test_a_pattern_is_its_text(pattern: Pattern) -> None:
    assert Pattern.parse(str(pattern)) == pattern


WRONG = {
    "windows=2": r"no 'windows'; got 'windows=2'; did you mean 'window'",
    "window": r"one whole number; got 'window' in 'window'; write it as in",
    "window=2, window=3": r"one whole number; got 'window=3'",
    "window=-1": r"one whole number; got 'window=-1'",
    "window=0": r"window from 1 to 16777216; got window=0; change it",
    "window=1, dilation=2": r"dilation=2 spreads the blocks of a window, and window=1 has none to the side; raise window",
    "window=2, seed=3": r"seed=3 draws random blocks, and n_random=0; set n_random",
    "n_random=65": r"n_random from 0 to 64; got n_random=65",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=WRONG[text]):
        Pattern.parse(text)
