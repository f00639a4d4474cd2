"""Neighbours of tokens in an embedding made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from models.tiny import tiny
from torch import Tensor

import clearhead as ch
from clearhead.inside import (
    neighbours,
)


def test_neighbours_by_hand() -> None:
    model = tiny("bert")
    table = model.tokens.weight.detach()

    def cosine(a: Tensor, b: Tensor) -> float:
        return float(a @ b / math.sqrt(float(a @ a) * float(b @ b)))

    expected = sorted(((cosine(table[7], table[id]), id) for id in range(53) if id != 7), reverse=True)[:5]
    found = neighbours(model, [7], n=5)
    assert [id for id, _ in found] == [id for _, id in expected]
    assert [value for _, value in found] == pytest.approx([value for value, _ in expected], abs=1e-6)


def test_king_minus_man_plus_woman() -> None:
    royal, male, female, noise = torch.eye(6)[0], torch.eye(6)[1], torch.eye(6)[2], torch.eye(6)[3:]
    words = ["king", "queen", "man", "woman", "apple", "river"]
    table = torch.stack([royal + male, royal + female, male, female, noise[0], noise[1]])
    king, man, woman = (words.index(word) for word in ("king", "man", "woman"))
    assert words[neighbours(table, [king, woman], [man], n=1)[0][0]] == "queen"
    assert len(neighbours(table, [king], n=99)) == 5


def test_neighbours_mistakes_are_told() -> None:
    with pytest.raises(ch.InputError, match=r"each from 0 to 52; got \[53\]"):
        neighbours(tiny("gpt2"), [53])
    with pytest.raises(ch.InputError, match="reads pictures"):
        neighbours(tiny("vit"), [1])
