"""Exercise angles: how far a table of embeddings is from orthogonal."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.costs.geometry import embedding_angles
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn


def angles(table: Float[Tensor, "V D"]) -> Float[Tensor, " pairs"]:
    """The angles between all pairs of rows, in degrees: V (V - 1) / 2 of them, each pair once, in the order (0, 1), (0, 2), ...

    Equation: arccos of the cosine of two rows, a b / (|a| |b|).

    The law: these numbers; rows that are made longer or shorter have the same angles.
    """
    raise NotImplementedError("bring all rows to length 1; then one product has all cosines")


def answer(table: Tensor) -> Tensor:
    unit = F.normalize(table, dim=-1)
    first, second = torch.triu_indices(len(table), len(table), 1)
    return torch.rad2deg((unit @ unit.T)[first, second].clamp(-1, 1).acos())


def reference(table: Tensor) -> Tensor:
    """Pair by pair."""
    rows = table.double().tolist()

    def length(row: list[float]) -> float:
        return math.sqrt(sum(number * number for number in row))

    found: list[float] = []
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            cosine = sum(x * y for x, y in zip(a, b, strict=True)) / length(a) / length(b)
            found.append(math.degrees(math.acos(max(-1.0, min(1.0, cosine)))))
    return torch.tensor(found, dtype=torch.float64)


def cosines(table: Tensor, offset: int = 1) -> Tensor:
    unit = F.normalize(table, dim=-1)
    first, second = torch.triu_indices(len(table), len(table), offset)
    return (unit @ unit.T)[first, second].clamp(-1, 1)


def unscaled(table: Tensor) -> Tensor:
    first, second = torch.triu_indices(len(table), len(table), 1)
    return torch.rad2deg((table @ table.T)[first, second].clamp(-1, 1).acos())


def column_by_column(table: Tensor) -> Tensor:
    second, first = torch.tril_indices(len(table), len(table), -1)
    unit = F.normalize(table, dim=-1)
    return torch.rad2deg((unit @ unit.T)[first, second].clamp(-1, 1).acos())


def every_pair_twice(table: Tensor) -> Tensor:
    unit = F.normalize(table, dim=-1)
    return torch.rad2deg((unit @ unit.T)[~torch.eye(len(table), dtype=torch.bool)].clamp(-1, 1).acos())


def by_length(function: Function) -> str | None:
    table = drawn(5, 11)
    change = (function(table * torch.logspace(-1, 1, 5)[:, None]) - function(table.clone())).abs().max()
    return f"rows of other lengths have other angles: by up to {float(change):.3g} degrees" if change > 0.1 else None


def of_parallel_rows(function: Function) -> str | None:
    """In float32 the cosine of a row and its double is 1, more or less: above 1 its arccos is NaN."""
    rows = drawn(19, 7, seed=3)
    wrong = [float(found) for row in rows if not (found := function(torch.stack([row, 2 * row]))[0]) < 0.1]
    return (
        f"a row and its double have the angle {wrong[0]:.3g}, expected 0: rounding gives a cosine above 1; clamp it"
        if wrong
        else None
    )


def cases() -> dict[str, tuple[Tensor]]:
    return {
        "random rows": (drawn(7, 13),),
        "angles above and below 90 degrees": (torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 0.5], [0.0, -2.0]]),),
        "rows of very different lengths": (drawn(5, 3, seed=2) * torch.logspace(-2, 2, 5)[:, None],),
    }


EXERCISE = Exercise(
    stub=angles,
    answer=answer,
    reference=reference,
    cases=cases,
    laws={"lengths do not matter": by_length, "parallel rows have the angle 0": of_parallel_rows},
    mistakes=(
        Mistake("the rows are not brought to length 1 first: products are no cosines", unscaled),
        Mistake("these are radians; multiply by 180 / pi", lambda table: cosines(table).acos()),
        Mistake("these are cosines; their arccos is the angle", cosines),
        Mistake(
            "the sign is lost: 120 degrees come out as 60. Do not take the absolute value",
            lambda table: torch.rad2deg(cosines(table).abs().acos()),
        ),
        Mistake(
            "each row is paired with itself, too: leave the diagonal out",
            lambda table: torch.rad2deg(cosines(table, 0).acos()),
        ),
        Mistake(
            "the pairs are in another order: (0, 1), (0, 2), (0, 3) ... come first, not (0, 1), (0, 2), (1, 2)",
            column_by_column,
        ),
        Mistake("each pair is there twice: take the places above the diagonal alone", every_pair_twice),
    ),
    hints=(
        "unit = table / table.norm(dim=-1, keepdim=True); cosines = unit @ unit.T has shape (V, V).",
        "torch.triu_indices(V, V, 1) has the rows and columns above the diagonal, in the right order.",
        "torch.rad2deg(cosines[first, second].clamp(-1, 1).acos()): rounding can give a cosine above 1.",
    ),
    proves="you measure for yourself whether directions are almost orthogonal",
    sources=(embedding_angles,),
)
