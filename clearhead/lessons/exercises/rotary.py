"""Exercise rotary: positions by turning queries and keys."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.layers.positions import Rotary, rotate
from clearhead.lessons import references
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn


def rotary(
    x: Float[Tensor, "B H T E"], positions: Int[Tensor, " T"], base: float = 10000.0
) -> Float[Tensor, "B H T E"]:
    """Rotary positions (Su et al. 2021), as LLaMA lays them out: pair i is (x[i], x[i + E/2]).

    Equation: pair i of the token at position p is turned by the angle a = p / base^(2i/E),
              (x, y) -> (x cos a - y sin a, y cos a + x sin a)

    The law: these numbers; lengths do not change; and the product of a turned query and a turned key depends on the distance
    of their positions alone.
    """
    raise NotImplementedError("make the angles first: positions[:, None] * frequencies, of shape (T, E/2)")


def answer(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    return rotate(x, Rotary(d_head=x.shape[-1], base=base).angles(positions))


def reference(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    return references.turn(x.double(), positions, base)


def variant(exponent: float = 2.0, *, sign: float = 1.0, counted: bool = False) -> Function:
    def function(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
        E = x.shape[-1]
        at = torch.arange(len(positions)) if counted else positions
        angles = sign * at[:, None] * base ** (-exponent * torch.arange(E // 2) / E)
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    return function


def interleaved(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    return rotate(x, Rotary(d_head=x.shape[-1], base=base, interleaved=True).angles(positions))


def keeps_lengths(function: Function) -> str | None:
    x = drawn(1, 2, 5, 14, seed=6)
    change = float((function(x.clone(), torch.arange(5) * 7).norm(dim=-1) / x.norm(dim=-1) - 1).abs().max())
    return f"a vector's length changes by {change:.1%}; a rotation keeps it" if change > 1e-3 else None


def sees_distance_alone(function: Function) -> str | None:
    q, k = drawn(1, 1, 1, 14, seed=7), drawn(1, 1, 1, 14, seed=8)

    def score(i: int, j: int) -> float:
        turned = [function(x.clone(), torch.tensor([p])) for x, p in ((q, i), (k, j))]
        return float((turned[0] * turned[1]).sum())

    near, far = score(3, 1), score(40, 38)
    if abs(near - far) > 1e-3:
        return f"positions 3 and 1 give the score {near:.4f}, 40 and 38 give {far:.4f}; the distance is 2 in both"
    return None


def cases() -> dict[str, tuple[Tensor, Tensor, float]]:
    return {
        "positions 0 to 6": (drawn(2, 3, 7, 10), torch.arange(7), 10000.0),
        "positions that start later": (drawn(1, 2, 5, 10, seed=1), torch.arange(17, 22), 10000.0),
        "another base": (drawn(1, 2, 5, 6, seed=2), torch.tensor([0, 9, 2, 31, 4]), 500.0),
    }


EXERCISE = Exercise(
    stub=rotary,
    answer=answer,
    reference=reference,
    cases=cases,
    laws={"lengths stay": keeps_lengths, "scores see the distance alone": sees_distance_alone},
    mistakes=(
        Mistake(
            "your pairs are neighbours, (x[2i], x[2i+1]), as in GPT-J; here pair i is (x[i], x[i + E/2]), as in LLaMA",
            interleaved,
        ),
        Mistake("you turn the other way: the sine has the wrong sign", variant(sign=-1.0)),
        Mistake("the exponent is doubled: 2i/E with i counting pairs, not 4i/E", variant(4.0)),
        Mistake("the exponent is halved: i/E where 2i/E is meant", variant(1.0)),
        Mistake("all pairs turn by the same angle; pair i turns by p / base^(2i/E)", variant(0.0)),
        Mistake("base is not used: it may differ from 10,000", lambda x, positions, base=10000.0: answer(x, positions)),
        Mistake(
            "positions are counted from 1: 1 is added to each",
            lambda x, positions, base=10000.0: answer(x, positions + 1, base),
        ),
        Mistake(
            "you number the tokens 0, 1, 2 ...; the positions are given, and may start later", variant(counted=True)
        ),
    ),
    hints=(
        "frequencies = base ** (-2 * torch.arange(E // 2) / E): the first pair turns fastest, by 1 a token.",
        "first, second = x.chunk(2, -1) gives the two members of every pair.",
        "torch.cat([first * cos - second * sin, second * cos + first * sin], -1); cos and sin have shape (T, E/2).",
    ),
    proves="queries and keys are turned so that their product sees distances alone",
    sources=(Rotary, rotate),
)
