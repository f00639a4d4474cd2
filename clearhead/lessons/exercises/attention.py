"""Exercise attention: equation 1 of the paper, with a mask."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.layers.attention import attention_scores, masked_softmax
from clearhead.lessons import references
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn

B, H, T, S, E = 2, 3, 7, 11, 5


def attention(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B H S E"],
    v: Float[Tensor, "B H S E"],
    allowed: Bool[Tensor, "B 1 T S"] | None = None,
) -> Float[Tensor, "B H T E"]:
    """Scaled dot-product attention (section 3.2.1 of the paper).

    Equation: softmax(q k^T / sqrt(E)) v, over the keys that are allowed. True = may attend.

    The law: these numbers; the weights of a query sum to 1 over its allowed keys; a query that may attend to nothing gets zeros,
    never NaN.
    """
    raise NotImplementedError(
        "scores = q @ k.transpose(-2, -1) have shape (B, H, T, S): scale them, mask them, softmax them"
    )


def answer(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None) -> Tensor:
    return masked_softmax(attention_scores(q, k), allowed) @ v


def reference(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None) -> Tensor:
    def may(b: int, i: int, j: int) -> bool:
        return allowed is None or bool(allowed[b, 0, i - (k.shape[2] - q.shape[2]), j])

    return references.attend(q.double(), k.double(), v.double(), may)


def variant(
    *,
    scale: Callable[[int], float] = lambda E: 1 / math.sqrt(E),
    weigh: Callable[[Tensor, Tensor | None], Tensor] = masked_softmax,
) -> Function:
    def function(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None) -> Tensor:
        return weigh(q @ k.transpose(-2, -1) * scale(q.shape[-1]), allowed) @ v

    return function


def mask_after(scores: Tensor, allowed: Tensor | None) -> Tensor:
    return scores.softmax(-1) if allowed is None else scores.softmax(-1) * allowed


def inverted(scores: Tensor, allowed: Tensor | None) -> Tensor:
    return masked_softmax(scores, None if allowed is None else ~allowed)


def over_queries(scores: Tensor, allowed: Tensor | None) -> Tensor:
    return (scores if allowed is None else scores.masked_fill(~allowed, -1e9)).softmax(-2)


def to_zero(scores: Tensor, allowed: Tensor | None) -> Tensor:
    return (scores if allowed is None else scores.masked_fill(~allowed, 0.0)).softmax(-1)


def with_nan(scores: Tensor, allowed: Tensor | None) -> Tensor:
    return (scores if allowed is None else scores.masked_fill(~allowed, -math.inf)).softmax(-1)


def uniform_where_empty(scores: Tensor, allowed: Tensor | None) -> Tensor:
    return (scores if allowed is None else scores.masked_fill(~allowed, -1e9)).softmax(-1)


def unmasked(scores: Tensor, allowed: Tensor | None) -> Tensor:
    return scores.softmax(-1)


def added(scores: Tensor, allowed: Tensor | None) -> Tensor:
    return (scores if allowed is None else scores + allowed).softmax(-1)


def over_heads(scores: Tensor, allowed: Tensor | None) -> Tensor:
    return (scores if allowed is None else scores.masked_fill(~allowed, -1e9)).softmax(1)


def scores_themselves(scores: Tensor, allowed: Tensor | None) -> Tensor:
    return scores if allowed is None else scores.masked_fill(~allowed, 0.0)


def scaled_weights(scores: Tensor, allowed: Tensor | None) -> Tensor:
    return masked_softmax(scores, allowed) / math.sqrt(E)


def weights_of(function: Function, *, causal: bool) -> Tensor:
    """A function's weights of one head: what comes out if the values are the unit vectors."""
    q, k, v = drawn(1, 1, 5, 5, seed=4), drawn(1, 1, 5, 5, seed=5), torch.eye(5)[None, None]
    return function(q, k, v, torch.ones(5, 5).tril().bool()[None, None] if causal else None)[0, 0]


def sum_of_a_row(function: Function) -> str:
    weights = weights_of(function, causal=True).sum(-1)
    row = int((weights - 1).abs().argmax())
    return f"with a causal mask the weights of row {row} sum to {float(weights[row]):.2f}"


def share_of_hidden(function: Function) -> str:
    weights = weights_of(function, causal=True)
    hidden = float(weights.triu(1).sum() / weights.sum())
    return f"with a causal mask {hidden:.0%} of all weight is on keys that are hidden"


def sum_of_a_column(function: Function) -> str:
    weights = weights_of(function, causal=False)
    return f"row 0 sums to {float(weights[0].sum()):.2f}, column 0 to {float(weights[:, 0].sum()):.2f}"


def cases() -> dict[str, tuple[Tensor, ...]]:
    q, k, v = (drawn(B, H, n, E, seed=seed) for seed, n in enumerate((T, S, S)))
    causal = torch.ones(T, S).tril(S - T).bool().expand(B, 1, T, S)
    empty = torch.rand(B, 1, T, S, generator=torch.Generator().manual_seed(9)) < 0.5
    empty[0, 0, 2] = empty[1, 0, 0] = False
    return {
        "no mask": (q, k, v),
        "large scores": (20 * q, k, v),
        "a causal mask": (q, k, v, causal),
        "queries that may attend to nothing": (q, k, v, empty),
    }


EXERCISE = Exercise(
    stub=attention,
    answer=answer,
    reference=reference,
    cases=cases,
    mistakes=(
        Mistake("the scores are not scaled: divide them by sqrt(E)", variant(scale=lambda E: 1.0)),
        Mistake("the scores are divided by E, not by sqrt(E)", variant(scale=lambda E: 1 / E)),
        Mistake("the scores are multiplied by sqrt(E); divide by it", variant(scale=math.sqrt)),
        Mistake(
            "the scores are divided by sqrt(H E), the width of the model; E is the width of one head",
            variant(scale=lambda E: 1 / math.sqrt(H * E)),
        ),
        Mistake(
            "the scores are divided by sqrt(S), the number of keys; E is the width of a key",
            variant(scale=lambda E: 1 / math.sqrt(S)),
        ),
        Mistake(
            "the weights are divided by sqrt(E), after the softmax; the scores are, before it",
            variant(scale=lambda E: 1.0, weigh=scaled_weights),
        ),
        Mistake("your mask is applied after the softmax", variant(weigh=mask_after), sum_of_a_row),
        Mistake("the mask does nothing: `allowed` is not used", variant(weigh=unmasked), share_of_hidden),
        Mistake(
            "the mask is added as 1 and 0, and forbids nothing: True and False are numbers in a sum. Use masked_fill",
            variant(weigh=added),
            share_of_hidden,
        ),
        Mistake("your mask is inverted: True = may attend", variant(weigh=inverted), share_of_hidden),
        Mistake(
            "masked scores are set to 0; exp(0) is 1, so they keep weight. Set them to a very negative number",
            variant(weigh=to_zero),
            share_of_hidden,
        ),
        Mistake(
            "the softmax runs over the queries (T); it runs over the keys (S)",
            variant(weigh=over_queries),
            sum_of_a_column,
        ),
        Mistake(
            "the softmax runs over the heads (H); it runs over the keys (S, the last axis)", variant(weigh=over_heads)
        ),
        Mistake("the softmax is missing: scores are no weights", variant(weigh=scores_themselves)),
        Mistake(
            "a query that may attend to nothing gives NaN: all its scores are -inf. Such a row gets zeros",
            variant(weigh=with_nan),
        ),
        Mistake(
            "a query that may attend to nothing gets the mean of all values: all its scores are equal. Such a row gets zeros",
            variant(weigh=uniform_where_empty),
        ),
    ),
    hints=(
        "scores = q @ k.transpose(-2, -1) / math.sqrt(E): (B, H, T, E) times (B, H, E, S) gives (B, H, T, S).",
        "scores.masked_fill(~allowed, torch.finfo(scores.dtype).min) before the softmax; the lowest finite number, not -inf.",
        "A row without an allowed key is uniform then: weights.masked_fill(~allowed, 0) makes it zeros, and changes no other row.",
    ),
    proves="the equation of the paper, with any mask, and zeros where there is nothing to attend to",
    sources=(attention_scores, masked_softmax),
)
