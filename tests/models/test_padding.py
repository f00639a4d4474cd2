"""Padding changes nothing, wherever it stands; nor does company in the batch, nor a neighbouring document."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import clearhead as ch
from clearhead.layers.masks import documents, padding
from clearhead.models import Model

from .drawn import Fields, fields
from .tiny import EVERY, assert_same, built, inputs, run, tiny

OVER_TOKENS = [name for name in EVERY if name not in ("vit", "whisper")]


def masks(batch: int, length: int) -> st.SearchStrategy[Tensor]:
    """Padding left, right, on both sides, in holes: any row with at least one real token."""
    row = st.lists(st.booleans(), min_size=length, max_size=length).filter(any)
    return st.lists(row, min_size=batch, max_size=batch).map(torch.tensor)


def answer(model: Model, *args: Tensor, mask: Tensor | None = None, target_mask: Tensor | None = None) -> Tensor:
    if model.config.shape == "encoder-decoder":
        return run(model, *args, mask=mask, target_mask=target_mask)
    return run(model, *args, mask=mask)


def rows_alone(model: Model, tokens: tuple[Tensor, ...], reals: tuple[Tensor, ...]) -> list[Tensor]:
    """Each row by itself, its padding cut out."""
    batch = len(tokens[0])
    return [
        answer(model, *(x[b : b + 1, real[b]] for x, real in zip(tokens, reals, strict=True))) for b in range(batch)
    ]


def assert_padding_changes_nothing(model: Model, reals: tuple[Tensor, ...]) -> None:
    sizes = dict(batch=len(reals[0]), length=reals[-1].shape[1], source=reals[0].shape[1])
    tokens = inputs(model.config, **sizes)
    padded = answer(model, *tokens, mask=reals[0], target_mask=reals[-1])
    assert padded.isfinite().all()  # at padding too: a NaN there would reach every gradient
    for b, alone in enumerate(rows_alone(model, tokens, reals)):
        ours = padded[b] if model.config.head == "classes" else padded[b, reals[-1][b]]
        assert_same(ours, alone[0])


@pytest.mark.slow
@given(drawn=fields(only_tokens=True), real=masks(3, 11), source_real=masks(3, 7))
@settings(max_examples=40)
def test_padding_changes_nothing(drawn: Fields, real: Tensor, source_real: Tensor) -> None:
    config = ch.Config(**drawn)
    reals = (source_real, real) if config.shape == "encoder-decoder" else (real,)
    assert_padding_changes_nothing(built(config), reals)


@pytest.mark.slow
@pytest.mark.parametrize("name", OVER_TOKENS)
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_ragged_rows_are_each_row_alone(name: str, side: str) -> None:
    lengths, at = torch.tensor([[5], [11], [2]]), torch.arange(11)
    real = {"left": at >= 11 - lengths, "right": at < lengths, "holes": (at * 7 + 3) % 11 < lengths}[side]
    reals = (real.flip(0), real) if tiny(name).config.shape == "encoder-decoder" else (real,)
    assert_padding_changes_nothing(tiny(name), reals)


@pytest.mark.parametrize("name", OVER_TOKENS)
def test_what_stands_in_the_padding_does_not_matter_at_all(name: str) -> None:
    model = tiny(name)
    *first, last = inputs(model.config)
    real = torch.arange(11) < torch.tensor([[5], [11], [2]])
    other = torch.where(real, last, (last + 1) % model.config.vocab_size)
    before = answer(model, *first, last, **where_last(model, real))
    after = answer(model, *first, other, **where_last(model, real))
    if model.config.head == "classes":
        assert torch.equal(before, after)
    else:
        assert torch.equal(before[real], after[real])  # bit for bit: a forbidden weight is 0, not small


def where_last(model: Model, real: Tensor) -> dict[str, Tensor]:
    return {"target_mask" if model.config.shape == "encoder-decoder" else "mask": real}


@pytest.mark.parametrize("name", ["original", "gpt2", "llama", "bert", "t5"])
def test_padding_changes_no_gradient(name: str) -> None:
    real = torch.arange(11) < torch.tensor([[5], [11], [2]])
    padded, alone = tiny(name), tiny(name)
    reals = (real, real.flip(0)) if padded.config.shape == "encoder-decoder" else (real,)
    tokens = inputs(padded.config, source=11)
    answer(padded, *tokens, mask=reals[0], target_mask=reals[-1])[reals[-1]].square().sum().backward()
    sum(row.square().sum() for row in rows_alone(alone, tokens, reals)).backward()
    for (site, ours), theirs in zip(padded.named_parameters(), alone.parameters(), strict=True):
        if theirs.grad is not None:  # BERT's pooler is not used here
            assert ours.grad is not None, site
            assert_same(ours.grad, theirs.grad)


def test_sound_that_the_mask_hides_does_not_matter() -> None:
    """The mask is over what the convolutions make of the frames; each of these sees frames up to 3 places away."""
    model = tiny("whisper")
    sound, target = inputs(model.config, source=13)
    real = (torch.arange(13) < 7).expand(3, 13)  # made of frames 0 .. 15
    other = sound.clone()
    other[:, :, 16:] += 1.0
    before, after = run(model, sound, target, mask=real), run(model, other, target, mask=real)
    assert torch.equal(before, after)
    assert not torch.allclose(run(model, sound, target), run(model, other, target))


def test_patches_can_be_masked_too() -> None:
    model = tiny("vit")
    (pictures,) = inputs(model.config)
    real = torch.ones(3, 10, dtype=torch.bool)
    real[:, 9] = False  # the last patch: pixels 10 .. 14 both ways
    other = pictures.clone()
    other[:, :, 10:, 10:] += 1.0
    assert torch.equal(run(model, pictures, mask=real), run(model, other, mask=real))
    assert not torch.allclose(run(model, pictures), run(model, other))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_a_row_does_not_know_its_neighbours(name: str) -> None:
    model = tiny(name)
    batch = inputs(model.config)
    together = run(model, *batch)
    for b in range(3):
        assert_same(run(model, *(x[b : b + 1] for x in batch)), together[b : b + 1])


@pytest.mark.slow
@given(
    drawn=fields(shapes=("decoder", "encoder"), only_tokens=True, head="auto", dropped_token=-1),
    cuts=st.sets(st.integers(1, 12), max_size=3),
)
@settings(max_examples=30)
def test_packed_documents_are_separate_sequences(drawn: Fields, cuts: set[int]) -> None:
    config = ch.Config(**drawn)
    model = built(config)
    (tokens,) = inputs(config, batch=2, length=13)
    bounds = [0, *sorted(cuts), 13]
    spans = [slice(a, b) for a, b in pairwise(bounds)]
    ids = torch.cat([torch.full((span.stop - span.start,), n) for n, span in enumerate(spans)]).expand(2, 13)
    anew = torch.cat([torch.arange(span.stop - span.start) for span in spans])
    packed = model(tokens, documents(ids), positions=anew)
    assert_same(packed, torch.cat([model(tokens[:, span]) for span in spans], 1))


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "bert", "alibi"])
def test_packed_documents_with_padding(name: str) -> None:
    model = tiny(name)
    (tokens,) = inputs(model.config, batch=1, length=11)
    real = torch.arange(11)[None] < 9
    ids = torch.tensor([[0] * 5 + [1] * 6])
    anew = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0]])
    packed = model(tokens, documents(ids) & padding(real), positions=anew)
    assert_same(packed[:, :9], torch.cat([model(tokens[:, :5]), model(tokens[:, 5:9])], 1))


def test_packed_sources_of_relative_positions_need_no_others() -> None:
    """T5 knows only distances, so that documents packed into one source need no positions of their own."""
    model = tiny("t5")
    source, _ = inputs(model.config, source=11)
    packed = model.encode(source, documents(torch.tensor([[0] * 5 + [1] * 6]).expand(3, 11)))
    assert_same(packed, torch.cat([model.encode(source[:, :5]), model.encode(source[:, 5:])], 1))
