"""The blocks of the score matrix that the flex kernel visits: none too few, and for plain masks none too many."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from clearhead.kernels import tiles
from clearhead.layers import block_sparse

from . import drawn
from .reference import B, Facts

CPU = torch.device("cpu")
SIDE, S = 3, 11  # blocks of 3 x 3 in place of 128 x 128: four a row, the last of them sticking out


def block_mask(facts: Facts, T: int) -> BlockMask:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "BLOCK", SIDE)
        return block_sparse.block_mask(facts.mask(), T, S, CPU)


def visited(numbers: Tensor | None, indices: Tensor | None) -> Tensor:
    """The blocks a list of block numbers names, as booleans (B, queries / SIDE, keys / SIDE)."""
    assert numbers is not None
    assert indices is not None
    chosen = torch.zeros(indices.shape).bool()
    for at in torch.cartesian_prod(*(torch.arange(n) for n in numbers.shape)).tolist():
        row = tuple(at)
        chosen[row][indices[row][: numbers[row]].long()] = True
    return chosen[:, 0].expand(B, -1, -1)


def by_pair(blocks: Tensor, T: int) -> Tensor:
    return blocks.repeat_interleave(SIDE, 1).repeat_interleave(SIDE, 2)[:, :T, :S]


@given(facts=drawn.facts(B, S), T=st.integers(1, S))
@example(facts=Facts(causal=True, window=2), T=S)
@example(facts=Facts(documents=[[[0] * 6 + [1] * 5, [0] * 5 + [1] * 6]]), T=S)  # ends at a block's edge, and within one
def test_no_allowed_pair_is_skipped(facts: Facts, T: int) -> None:
    mask = block_mask(facts, T)
    pairs = facts.pairs(B, T, S)
    partial = visited(mask.kv_num_blocks, mask.kv_indices)
    full = visited(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partial & full).any()
    assert (by_pair(partial | full, T) >= pairs).all()
    # in a full block the kernel does not ask again
    assert (by_pair(full, T) <= pairs).all()
    whole = torch.arange(1, T // SIDE + 2)[:, None] * SIDE <= T
    sticks_out = ~(whole[: full.shape[1]] & (torch.arange(1, full.shape[2] + 1) * SIDE <= S))
    assert not (full & sticks_out).any()


@given(causal=st.booleans(), window=st.integers(0, S), T=st.integers(1, S))
def test_plain_masks_visit_nothing_in_vain(causal: bool, window: int, T: int) -> None:
    facts = Facts(causal=causal, window=window)
    mask = block_mask(facts, T)
    pairs = facts.pairs(B, T, S)
    edges = [range(0, T, SIDE), range(0, S, SIDE)]
    blocks = [[pairs[:, i : i + SIDE, j : j + SIDE] for j in edges[1]] for i in edges[0]]
    kept = visited(mask.kv_num_blocks, mask.kv_indices) | visited(mask.full_kv_num_blocks, mask.full_kv_indices)
    full = visited(mask.full_kv_num_blocks, mask.full_kv_indices)
    for i, row in enumerate(blocks):
        for j, block in enumerate(row):
            assert kept[0, i, j] == block.any()
            assert full[0, i, j] == (block.all() and block.shape == (B, SIDE, SIDE))


@given(facts=drawn.facts(B, S), T=st.integers(1, S))
def test_each_pair_is_answered(facts: Facts, T: int) -> None:
    b, i, j = torch.meshgrid(torch.arange(B), torch.arange(T), torch.arange(S), indexing="ij")
    mask_mod = block_sparse.block_mask(facts.mask(), T, S, CPU).mask_mod
    answers = mask_mod(b, torch.zeros_like(b), i, j)
    assert torch.equal(answers.expand(B, T, S), facts.pairs(B, T, S))
