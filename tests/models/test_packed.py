"""Pairs packed into one row of sources and one of targets: the same states and gradients as padded pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clearhead.errors import InputError
from clearhead.kernels import tiles
from clearhead.layers import block_sparse
from clearhead.layers.masks import Mask, padding
from clearhead.layers.packing import across, packed, packed_at
from clearhead.models import EncoderDecoder
from clearhead.models.encoder_decoder import source_mask

from .tiny import assert_same, tiny

SOURCES, TARGETS = [7, 1, 11, 3], [2, 5, 13, 1]


def pair_model(name: str, kernel: str) -> EncoderDecoder:
    model = tiny(name, kernel=kernel)
    assert isinstance(model, EncoderDecoder)
    return model


def rows(lengths: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """Random ids of these lengths, padded, and which are real."""
    tokens = torch.randint(0, 53, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    return tokens, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def by_rows(model: EncoderDecoder) -> Tensor:
    """The states of the targets' real tokens, pairs padded."""
    (source, real_source), (target, real) = rows(SOURCES, 1), rows(TARGETS, 2)
    memory = model.encode(source, real_source)
    return model.states(target, memory, source_mask(real_source), mask=real)[real]


def in_one_row(model: EncoderDecoder, empty: int = 0) -> Tensor:
    """The same, packed; with texts of no token at the end, as batches of one shape have them."""
    (source, real_source), (target, real) = rows(SOURCES, 1), rows(TARGETS, 2)
    made: list[tuple[Mask, Tensor]] = []
    for lengths in (SOURCES, TARGETS):
        starts = torch.tensor([0, *lengths, *[0] * empty]).cumsum(0).int()
        made.append(packed_at(starts, sum(lengths), 2 * max(lengths)) if empty else packed(lengths))
    (source_seen, source_places), (target_seen, target_places) = made
    memory = model.encode(source[real_source][None], source_seen, positions=source_places)
    seen = across(target_seen, source_seen)
    return model.states(target[real][None], memory, seen, mask=target_seen, positions=target_places)[0]


@pytest.mark.parametrize("kernel", ["explicit", "fused"])
@pytest.mark.parametrize("name", ["original", "marian", "t5"])
def test_packed_pairs_are_padded_pairs(name: str, kernel: str) -> None:
    model = pair_model(name, kernel)
    weights = [weight for name, weight in model.named_parameters() if not name.startswith("head.")]
    for empty in (0, 3):
        found, wanted = in_one_row(model, empty), by_rows(model)
        assert_same(found, wanted)
        toward = torch.randn(wanted.shape, dtype=wanted.dtype, generator=torch.Generator().manual_seed(3))
        ours, theirs = (torch.autograd.grad((states * toward).sum(), weights) for states in (found, wanted))
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)


LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4)


@given(pairs=LENGTHS)
@settings(max_examples=30)
def test_each_text_sees_its_own_number(pairs: list[tuple[int, int]]) -> None:
    one, other = ([pair[side] for pair in pairs] for side in (0, 1))
    mask = across(packed(one)[0], packed(other)[0])
    wanted = torch.block_diag(*(torch.ones(a, b) for a, b in pairs)).bool()
    T, S = wanted.shape
    mask.check(1, T, S)
    allowed = mask.allowed(T, S, slice(None), slice(None), torch.device("cpu"))
    assert allowed is not None
    assert torch.equal(allowed[0, 0], wanted)
    i, j = torch.meshgrid(torch.arange(T), torch.arange(S), indexing="ij")
    zero = torch.zeros_like(i)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "BLOCK", 3)
        blocks = block_sparse.block_mask(mask, T, S, torch.device("cpu"))
    assert torch.equal(blocks.mask_mod(zero, zero, i, j), wanted)
    places = packed(one)[1]
    assert places.tolist() == [place for n in one for place in range(n)]


def test_what_does_not_fit_is_refused() -> None:
    one, other = packed([2, 3])[0], packed([4])[0]
    with pytest.raises(InputError, match=r"two masks from packed\(\)"):
        across(one, other)
    with pytest.raises(InputError, match=r"two masks from packed\(\)"):
        across(one, padding(torch.ones(1, 5).bool()))
    with pytest.raises(InputError, match="does not combine"):
        _ = across(one, one) & Mask(causal=True)
    with pytest.raises(InputError, match="across"):
        source_mask(one)
    with pytest.raises(InputError, match="queries"):
        across(one, one).check(1, 4, 5)
