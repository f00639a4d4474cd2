"""ESM-2's contacts: the same probabilities as transformers' predict_contacts, packed or alone, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import EsmConfig, EsmForMaskedLM, EsmModel

import clearhead as ch
from clearhead.checkpoint import load, save
from clearhead.inside import contacts
from clearhead.inside.contacts import contact_head, contact_maps
from clearhead.inside.pruning import prune
from tests.families.compare import saved, tiny

CLS, EOS, MASK = 0, 2, 32
SIZES: dict[str, Any] = dict(
    vocab_size=33, hidden_size=30, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37
)
SIZES |= dict(max_position_embeddings=97, position_embedding_type="rotary", token_dropout=True, mask_token_id=MASK)
SIZES |= dict(pad_token_id=1, emb_layer_norm_before=False)
# Sums of 6 maps of at most 71 x 71 weights, each rounded at 6e-8, before a sigmoid.
WITHIN = 1e-5


def make(kind: type[Any] = EsmForMaskedLM, **changes: Any) -> Any:
    model = tiny(kind, EsmConfig(**SIZES | changes))
    with torch.no_grad():  # as large as fitted ones: the probabilities differ
        (model if kind is EsmModel else model.esm).contact_head.regression.weight *= 5
    return model


def protein(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [CLS, *torch.randint(4, 24, (length,), generator=generator).tolist(), EOS]


def expected(theirs: Any, row: list[int]) -> Tensor:
    tokens = torch.tensor([row])
    esm = theirs if isinstance(theirs, EsmModel) else theirs.esm
    esm.set_attn_implementation("eager")  # the only one that gives transformers its maps
    with torch.no_grad():
        return esm.predict_contacts(tokens, torch.ones_like(tokens))[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    theirs = make()
    return theirs, load(saved(theirs, tmp_path_factory.mktemp("esm")))


@pytest.mark.parametrize("kind", [EsmForMaskedLM, EsmModel])
@pytest.mark.parametrize("dropout", [True, False])
def test_as_transformers(kind: type[Any], dropout: bool, tmp_path: Path) -> None:
    theirs = make(kind, token_dropout=dropout, mask_token_id=MASK)
    ours = load(saved(theirs, tmp_path))
    row = protein(37)
    (found,) = contact_maps(ours, [row])
    assert found.shape == (37, 37)
    assert float(found.std()) > 0.01
    torch.testing.assert_close(found, expected(theirs, row), rtol=0, atol=WITHIN)


def test_several_are_packed(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Proteins of unlike lengths in one row, and in several rows, in order; one with a mask is alone."""
    theirs, ours = pair
    rows = [protein(n, seed=n) for n in (1, 13, 71, 2, 29)]
    rows[1][5] = MASK
    for at_once in (4096, 60):
        monkeypatch.setattr(contacts, "AT_ONCE", at_once)
        for row, found in zip(rows, contact_maps(ours, rows), strict=True):
            torch.testing.assert_close(found, expected(theirs, row), rtol=0, atol=WITHIN)


def test_a_few_rows_at_a_time(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair
    (whole,) = contact_maps(ours, [protein(71)])
    monkeypatch.setattr(contacts, "WORKSPACE", 3 * 73 * 5)  # five rows
    (strips,) = contact_maps(ours, [protein(71)])
    torch.testing.assert_close(strips, whole, rtol=0, atol=WITHIN)


def test_no_map_of_a_head_is_made(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor of a call is the result: heads x T x T is never there."""
    _, ours = pair
    monkeypatch.setattr(contacts, "WORKSPACE", 1)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for one in out if isinstance(out, tuple | list) else (out,):
                largest = max(largest, one.numel() if isinstance(one, Tensor) else 0)
            return out

    with Watch():
        list(contact_maps(ours, [protein(89)]))
    assert 89 * 89 <= largest < 2 * 91 * 91  # one head fewer than the model has


@pytest.mark.parametrize("format", ["clearhead", "hf"])
def test_saved_and_loaded(pair: tuple[Any, Any], format: Any, tmp_path: Path) -> None:
    theirs, ours = pair
    again = load(save(ours, tmp_path / "one", format=format))
    third = load(save(again, tmp_path / "two", format="hf"))  # from our layout to theirs too
    for model in (again, third):
        assert torch.equal(contact_head(model).weight.flatten(), theirs.esm.contact_head.regression.weight[0])
        (found,), (before,) = contact_maps(model, [protein(19)]), contact_maps(ours, [protein(19)])
        assert torch.equal(found, before)
    back = EsmForMaskedLM.from_pretrained(tmp_path / "two")
    torch.testing.assert_close(expected(back, protein(19)), found, rtol=0, atol=WITHIN)


def test_refusals(pair: tuple[Any, Any], tmp_path: Path) -> None:
    _, ours = pair
    fresh = ch.build(ours.config)
    with pytest.raises(ch.InputError, match=r"has no contact head; take an ESM-2"):
        contact_head(fresh)
    with pytest.raises(ch.InputError, match=r"head of zeros, which was never fitted"):
        contact_head(load(save(fresh, tmp_path, format="hf")))
    with pytest.raises(ch.InputError, match=r"weighs 6 heads, .* 1 heads pruned"):
        contact_head(prune(ours, {1: [2]}))
    with pytest.raises(ch.InputError, match=r"97 at most; got 98; cut it into domains"):
        list(contact_maps(ours, [protein(96)]))
    with pytest.raises(ch.InputError, match=r"got 2; give at least one residue"):
        list(contact_maps(ours, [protein(0)]))
