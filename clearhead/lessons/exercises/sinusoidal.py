"""Exercise sinusoidal: the positions of the paper."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.layers.positions import Sinusoidal
from clearhead.lessons import references
from clearhead.lessons.exercise import Exercise, Function, Mistake


def sinusoidal(positions: Int[Tensor, " T"], d_model: int) -> Float[Tensor, "T D"]:
    """The table that is added to the embeddings (section 3.5 of the paper); d_model is D, an even number.

    Equation: PE(pos, 2i) = sin(pos / 10000^(2i/D)),  PE(pos, 2i+1) = cos(pos / 10000^(2i/D)),  i = 0 .. D/2 - 1
    i counts pairs of columns: a sine and a cosine share their angle.

    The law: these numbers; and PE(pos + k) is PE(pos) turned by an angle that depends on k alone.
    """
    raise NotImplementedError("make the D/2 frequencies first: 10000 ** (-2 i / D) for i = 0 .. D/2 - 1")


def answer(positions: Tensor, d_model: int) -> Tensor:
    return Sinusoidal(d_model=d_model).table(positions)


def reference(positions: Tensor, d_model: int) -> Tensor:
    return torch.tensor([references.sinusoid(position, d_model) for position in positions.tolist()])


def columns(angle: Callable[[int, int], float], *, first: str = "sin") -> Function:
    """A table whose column c has the angle `angle(c, D)` for each position; sines and cosines in turns."""

    def function(positions: Tensor, d_model: int) -> Tensor:
        table = torch.zeros(len(positions), d_model)
        for c in range(d_model):
            angles = positions.double() * angle(c, d_model)
            table[:, c] = angles.sin() if (c % 2 == 0) == (first == "sin") else angles.cos()
        return table

    return function


def halves(positions: Tensor, d_model: int) -> Tensor:
    return Sinusoidal(d_model=d_model, halves=True).table(positions)


def second_pair(function: Function) -> str:
    """By how much the second pair turns from one token to the next: the angle whose sine is the student's number."""
    angle = math.asin(float(function(torch.tensor([0, 1]), 14)[1, 2]))
    return f"with D = 14, the second pair turns by {angle:.4f} a token, expected {10000 ** (-2 / 14):.4f}"


def turns_alike(function: Function) -> str | None:
    """PE(pos) . PE(pos + k) is the sum of cos(k w_i): the same for every pos."""
    table = function(torch.arange(53), 14).double()
    dots = (table[11:] * table[:-11]).sum(-1)
    spread = float(dots.max() - dots.min())
    return f"PE(pos) . PE(pos + 11) varies by {spread:.3g} with pos" if spread > 1e-3 else None


def cases() -> dict[str, tuple[Tensor, int]]:
    return {
        "thirteen positions, D = 14": (torch.arange(13), 14),
        "positions in any order": (torch.tensor([97, 0, 3, 3]), 6),
        "one pair": (torch.arange(5), 2),
    }


FAMOUS = (
    "the exponent is doubled: i already steps by 2 there, and is multiplied by 2 again. A widespread snippet does this"
)

EXERCISE = Exercise(
    stub=sinusoidal,
    answer=answer,
    reference=reference,
    cases=cases,
    laws={"the same distance turns every position alike": turns_alike},
    mistakes=(
        Mistake(FAMOUS, columns(lambda c, D: 10000 ** (-2 * (c - c % 2) / D)), second_pair),
        Mistake(
            f"{FAMOUS}; and its cosines have another frequency than their sines",
            columns(lambda c, D: 10000 ** (-2 * c / D)),
            second_pair,
        ),
        Mistake(
            "the cosine has an angle of its own: 2i + 1 in the exponent; a sine and its cosine share 2i",
            columns(lambda c, D: 10000 ** (-c / D)),
        ),
        Mistake(
            "the exponent is halved: i / D where 2 i / D is meant",
            columns(lambda c, D: 10000 ** (-(c // 2) / D)),
            second_pair,
        ),
        Mistake(
            "the angles grow from pair to pair: divide by 10000^(2i/D), do not multiply",
            columns(lambda c, D: 10000 ** ((c - c % 2) / D)),
        ),
        Mistake(
            "you number the tokens 0, 1, 2 ...; the positions are given, in any order",
            lambda positions, d_model: answer(torch.arange(len(positions)), d_model),
        ),
        Mistake(
            "positions are counted from 1: 1 is added to each",
            lambda positions, d_model: answer(positions + 1, d_model),
        ),
        Mistake("all sines stand before all cosines; they alternate, column by column", halves),
        Mistake(
            "cosines are in the even columns; sines belong there",
            columns(lambda c, D: 10000 ** (-(c - c % 2) / D), first="cos"),
        ),
    ),
    hints=(
        "torch.arange(d_model // 2) is i, once for each pair of columns.",
        "angles = positions[:, None] * frequencies has shape (T, D/2): one angle for each position and pair.",
        "torch.stack([angles.sin(), angles.cos()], -1) has shape (T, D/2, 2); .flatten(-2) lays the pairs side by side.",
    ),
    proves="the table of the paper, at any position and width, with the right frequencies",
    sources=(Sinusoidal,),
)
