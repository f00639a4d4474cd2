"""Exercise lstm_step: the recurrent network that the Transformer replaced."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn


def lstm_step(
    x: Float[Tensor, "B D"],
    h: Float[Tensor, "B D"],
    c: Float[Tensor, "B D"],
    w_x: Float[Tensor, "4*D D"],
    w_h: Float[Tensor, "4*D D"],
    bias: Float[Tensor, " 4*D"],
) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B D"]]:
    """One step of an LSTM (Hochreiter and Schmidhuber 1997): the next h and c. Do not call torch's own LSTM.

    Equation: i, f, g, o = x w_x^T + h w_h^T + bias, split into four in this order (torch's);
    c' = sigmoid(f) c + sigmoid(i) tanh(g); h' = sigmoid(o) tanh(c').

    The law: these numbers; with the forget gate open and the input gate closed, c stays as it is.
    """
    raise NotImplementedError("one sum of two products gives all four gates: (B, 4 D); chunk(4, -1) splits it")


def answer(x: Tensor, h: Tensor, c: Tensor, w_x: Tensor, w_h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.lstm_cell(x, (h, c), w_x, w_h, bias, torch.zeros_like(bias))


def reference(*given: Tensor) -> tuple[Tensor, Tensor]:
    """Number by number."""
    x, h, c, w_x, w_h, bias = (each.double() for each in given)
    B, D = x.shape
    new_h, new_c = torch.zeros(B, D, dtype=torch.float64), torch.zeros(B, D, dtype=torch.float64)

    def sigmoid(z: float) -> float:
        return 1 / (1 + math.exp(-z))

    for b in range(B):
        for d in range(D):
            i, f, g, o = (
                sum(float(w_x[r, e] * x[b, e] + w_h[r, e] * h[b, e]) for e in range(D)) + float(bias[r])
                for r in (d, D + d, 2 * D + d, 3 * D + d)
            )
            cell = sigmoid(f) * float(c[b, d]) + sigmoid(i) * math.tanh(g)
            new_c[b, d], new_h[b, d] = cell, sigmoid(o) * math.tanh(cell)
    return new_h, new_c


def variant(
    *,
    order: tuple[int, int, int, int] = (0, 1, 2, 3),
    keep: Callable[[Tensor], Tensor] = torch.sigmoid,
    candidate: Callable[[Tensor], Tensor] = torch.tanh,
    squash: Callable[[Tensor], Tensor] = torch.tanh,
    gated: bool = True,
    recurrent: bool = True,
    swapped: bool = False,
) -> Function:
    def function(x: Tensor, h: Tensor, c: Tensor, w_x: Tensor, w_h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        parts = (x @ w_x.T + (h @ w_h.T if recurrent else 0) + bias).chunk(4, -1)
        i, f, g, o = (parts[place] for place in order)
        cell = keep(f) * c + (torch.sigmoid(i) if gated else 1) * candidate(g)
        new = torch.sigmoid(o) * squash(cell)
        return (cell, new) if swapped else (new, cell)

    return function


def keeps(function: Function) -> str | None:
    c, nothing = drawn(2, 3, seed=5), torch.zeros(12, 3)
    bias = torch.tensor([-30.0] * 3 + [30.0] * 3 + [0.0] * 6)  # the input gate closed, the forget gate open
    change = float((function(drawn(2, 3), drawn(2, 3, seed=1), c.clone(), nothing, nothing, bias)[1] - c).abs().max())
    return (
        f"with the forget gate open and the input gate closed, c changes by up to {change:.3g}"
        if change > 1e-4
        else None
    )


def cases() -> dict[str, tuple[Tensor, ...]]:
    def case(B: int, D: int, seed: int) -> tuple[Tensor, ...]:
        shapes = ((B, D), (B, D), (B, D), (4 * D, D), (4 * D, D), (4 * D,))
        return tuple(drawn(*shape, seed=seed + n) for n, shape in enumerate(shapes))

    first = case(2, 5, 20)
    return {
        "a step": case(3, 7, 0),
        "the first step: h and c are zeros": (first[0], torch.zeros(2, 5), torch.zeros(2, 5), *first[3:]),
        "a large c": (*case(2, 5, 30)[:2], 5 * drawn(2, 5, seed=40), *case(2, 5, 30)[3:]),
    }


EXERCISE = Exercise(
    stub=lstm_step,
    answer=answer,
    reference=reference,
    cases=cases,
    laws={"what is remembered stays": keeps},
    mistakes=(
        Mistake(
            "the gates are split in the order i, f, o, g; here it is torch's: i, f, g, o", variant(order=(0, 1, 3, 2))
        ),
        Mistake("the input and the forget gate are swapped: the order is i, f, g, o", variant(order=(1, 0, 2, 3))),
        Mistake("the forget gate has no sigmoid", variant(keep=lambda z: z)),
        Mistake(
            "the forget gate is turned round: sigmoid(f) is what is kept", variant(keep=lambda z: torch.sigmoid(-z))
        ),
        Mistake("g has a sigmoid; it has a tanh, so that c can also fall", variant(candidate=torch.sigmoid)),
        Mistake("the input gate is not used: all of tanh(g) is added", variant(gated=False)),
        Mistake("h' is sigmoid(o) c'; a tanh of c' is missing", variant(squash=lambda z: z)),
        Mistake("the old h is not used: the step sees x alone", variant(recurrent=False)),
        Mistake("c and h are returned in the wrong order: h first", variant(swapped=True)),
    ),
    hints=(
        "gates = x @ w_x.T + h @ w_h.T + bias has shape (B, 4 D).",
        "i, f, g, o = gates.chunk(4, -1); three of them go through a sigmoid, g through a tanh.",
        "c = f * c + i * g; h = o * torch.tanh(c), with the gates after their sigmoid or tanh.",
    ),
    proves="all that an LSTM knows of the past is h and c, of one size at any length",
)
