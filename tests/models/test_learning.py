"""Each shape learns one batch by heart: every part of the path from loss to weights works."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from clearhead.models import Model

from .tiny import inputs, tiny_config


def overfit(model: Model, batch: tuple[Tensor, ...], targets: Tensor, *, steps: int, lr: float) -> float:
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        logits = model(*batch)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


# Random guessing costs log(53) = 3.97 (log 7 = 1.95 for classes); at 0.02 every answer is given more than 98 %.
LEARNT = 0.02


@pytest.mark.slow
def test_a_decoder_learns_a_batch() -> None:
    for name in ("gpt2", "llama"):
        model = ch.build(tiny_config(name, n_layers=2, d_model=34, d_ff=67))
        (tokens,) = inputs(model.config, length=12)
        assert overfit(model, (tokens[:, :-1],), tokens[:, 1:], steps=80, lr=1e-2) < LEARNT


def test_an_encoder_learns_pictures() -> None:
    model = ch.build(tiny_config("vit"))
    pictures = torch.randn(7, 3, 15, 15)
    assert overfit(model, (pictures,), torch.arange(7), steps=60, lr=1e-2) < LEARNT


@pytest.mark.slow
def test_an_encoder_learns_the_words_under_a_mask() -> None:
    model = ch.build(tiny_config("bert-mlm"))
    (tokens,) = inputs(model.config)
    hidden = tokens.clone()
    hidden[:, 3::5] = 0
    assert overfit(model, (hidden,), tokens, steps=80, lr=1e-2) < LEARNT


@pytest.mark.slow
def test_an_encoder_decoder_learns_pairs() -> None:
    for name in ("original", "t5"):
        model = ch.build(tiny_config(name))
        source, target = inputs(model.config, length=12)
        assert overfit(model, (source, target[:, :-1]), target[:, 1:], steps=120, lr=1e-2) < LEARNT


@pytest.mark.slow
def test_an_encoder_decoder_needs_its_source() -> None:
    """The same first token, another source, another answer: only cross-attention can tell them apart."""
    model = ch.build(tiny_config("original"))
    source, _ = inputs(model.config)
    first = torch.zeros(3, 1, dtype=torch.long)
    assert overfit(model, (source, first), torch.tensor([[5], [17], [29]]), steps=60, lr=1e-2) < LEARNT
