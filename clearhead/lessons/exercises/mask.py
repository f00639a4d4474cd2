"""Exercise mask: which query may attend to which key."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool
from torch import Tensor

from clearhead.layers.masks import ALL, Mask, causal, padding
from clearhead.lessons.exercise import Exercise, Function, Mistake


def mask(real: Bool[Tensor, "B S"], n_queries: int) -> Bool[Tensor, "B T S"]:
    """Causal and padding masks combined. `real` is True for a token, False for padding. The queries are the last T of the S tokens.

    Equation: allowed[b, t, s] = real[b, i] and real[b, s] and s <= i,  where i = t + S - T is the place of query t among the keys

    The law: True = may attend. A token sees itself and what came before it. Nobody sees padding, and padding sees nobody.
    """
    raise NotImplementedError("make two grids of places: queries (T, 1) and keys (1, S), and compare them")


def answer(real: Tensor, n_queries: int) -> Tensor:
    B, S = real.shape
    allowed = (causal() & padding(real)).allowed(n_queries, S, ALL, ALL, real.device)
    assert allowed is not None
    return allowed[:, 0].expand(B, n_queries, S)


def reference(real: Tensor, n_queries: int) -> Tensor:
    rows, S = real.tolist(), real.shape[1]
    places = range(S - n_queries, S)
    return torch.tensor([[[row[i] and row[s] and s <= i for s in range(S)] for i in places] for row in rows])


Combine = Callable[[Tensor, Tensor, Tensor], Tensor]


def variant(
    combine: Combine, *, order: Callable[[Tensor, Tensor], Tensor] = torch.le, shifted: bool = True
) -> Function:
    """`combine(is the query real, is the key real, is the key not later)`."""

    def function(real: Tensor, n_queries: int) -> Tensor:
        S = real.shape[1]
        keys, queries = torch.arange(S), torch.arange(n_queries) + (S - n_queries if shifted else 0)
        before = order(keys[None, None, :], queries[None, :, None])
        return combine(real[:, S - n_queries :, None], real[:, None, :], before).expand(len(real), n_queries, S)

    return function


def both(query: Tensor, key: Tensor, before: Tensor) -> Tensor:
    return query & key & before


def first_rows(real: Tensor, n_queries: int) -> Tensor:
    S = real.shape[1]
    return (torch.ones(n_queries, S).tril(S - n_queries).bool() & real[:, None]) & real[:, :n_queries, None]


def cases() -> dict[str, tuple[Tensor, int]]:
    whole = torch.ones(2, 5).bool()
    left, right = whole.clone(), whole.clone()
    left[0, :2] = right[1, 3:] = False
    return {
        "no padding": (whole, 5),
        "padding on the left": (left, 5),
        "padding on the right": (right, 5),
        "three queries, five keys": (whole, 3),
        "one query, as in decoding": (left, 1),
    }


EXERCISE = Exercise(
    stub=mask,
    answer=answer,
    reference=reference,
    cases=cases,
    mistakes=(
        Mistake("a token does not see itself: s < i where s <= i is meant", variant(both, order=torch.lt)),
        Mistake(
            "a token sees the one after it, which it has to predict: s <= i, not s <= i + 1",
            variant(both, order=lambda keys, queries: keys <= queries + 1),
        ),
        Mistake("your mask is inverted: True = may attend", variant(lambda q, k, c: ~(q & k & c))),
        Mistake("tokens see what comes after them, not before", variant(both, order=torch.ge)),
        Mistake(
            "query 0 stands at key 0; with fewer queries than keys they are the last ones: add S - T to their places",
            variant(both, shifted=False),
        ),
        Mistake(
            "padding is hidden by its rows, as a query, but is still seen as a key: hide its columns, too",
            variant(lambda q, k, c: q & c),
        ),
        Mistake("padding still attends: its rows must be False, too", variant(lambda q, k, c: k & c)),
        Mistake("rows of padding are looked up at the first T places; the queries are the last T", first_rows),
        Mistake("padding is ignored: `real` does nothing", variant(lambda q, k, c: c)),
        Mistake(
            "the masks are combined by `or`; both must allow, so `and` is meant", variant(lambda q, k, c: q & k | c)
        ),
    ),
    hints=(
        "keys = torch.arange(S), queries = torch.arange(T) + S - T: both are places among the keys.",
        "keys[None, :] <= queries[:, None] is the causal mask, (T, S).",
        "real[:, None, :] hides columns, real[:, S - T :, None] hides rows; combine all three with &.",
    ),
    proves="causal and padding masks, on either side, for a whole text and for the last tokens of one",
    sources=(causal, padding, Mask.allowed),
)
