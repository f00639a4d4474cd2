"""Activation patching against one patch at a time, and units of a site against weights set to zero."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.errors import InputError
from clearhead.inside import intervene, patch, patch_grid, probe, zero
from clearhead.inside.patching import PLACES

CLOSE = 1e-5  # fp32; only the order of summation differs


@pytest.fixture(scope="module")
def model() -> Any:
    return ch.build(
        ch.preset("gpt2", n_layers=3, d_model=28, n_heads=4, d_ff=37, vocab_size=41, max_len=17), seed=2
    ).eval()


TEXT, OTHER = torch.tensor([[1, 5, 9, 2, 7]]), torch.tensor([[1, 6, 9, 3, 7]])


@pytest.mark.parametrize("place", list(PLACES))
@torch.no_grad()
def test_each_patch_is_one_of_intervene(model: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.inside.patching.ROWS", 11)  # two rows at a time
    grid = patch_grid(model, TEXT, OTHER, token=4, against=8, place=place)
    for layer in range(3):
        site = f"blocks.{layer}.{PLACES[place]}"
        with probe(model, site) as seen:
            logits = model(OTHER)[0, -1]
        assert grid.other == pytest.approx(float(logits[4] - logits[8]), abs=CLOSE)
        for position in range(5):
            with intervene(model, patch(site, seen[site], positions=position)):
                logits = model(TEXT)[0, -1]
            assert float(grid.patched[layer, position]) == pytest.approx(float(logits[4] - logits[8]), abs=CLOSE)


def test_what_must_be_so(model: Any) -> None:
    """The last state decides all; a state that is the same in both texts brings nothing; and layers can be asked for alone."""
    share = patch_grid(model, TEXT, OTHER, token=4, against=8).share
    torch.testing.assert_close(share[2], torch.tensor([0.0, 0, 0, 0, 1]), rtol=0, atol=1e-4)
    assert float(share[0, 0].abs()) < 1e-4
    alone = patch_grid(model, TEXT, OTHER, token=4, against=8, layers=range(1, 2)).share
    torch.testing.assert_close(alone, share[1:2], rtol=0, atol=1e-4)


def test_wrong_questions(model: Any) -> None:
    with pytest.raises(InputError, match="as many tokens"):
        patch_grid(model, TEXT, OTHER[:, :4], token=4, against=8)
    with pytest.raises(InputError, match="two ids"):
        patch_grid(model, TEXT, OTHER, token=4, against=4)
    with pytest.raises(InputError, match="residual"):
        patch_grid(model, TEXT, OTHER, token=4, against=8, place="residul")


@torch.no_grad()
def test_a_unit_is_a_column_of_the_next_weight(model: Any) -> None:
    without = copy.deepcopy(model)
    without.blocks[1].feedforward.down.weight[:, [3, 36]] = 0
    with intervene(model, zero("blocks.1.feedforward.hidden", unit=[3, 36])):
        torch.testing.assert_close(model(TEXT), without(TEXT), rtol=0, atol=CLOSE)
    with (
        pytest.raises(InputError, match=r"units 0 \.\. 36"),
        intervene(model, zero("blocks.1.feedforward.hidden", unit=37)),
    ):
        model(TEXT)
