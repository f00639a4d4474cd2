"""Exercise top_p: nucleus sampling."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.lessons import references
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn
from clearhead.sampling.strategy import keep_top_p


def top_p(logits: Float[Tensor, "B V"], p: float) -> Float[Tensor, "B V"]:
    """Nucleus sampling (Holtzman et al. 2019): keep the fewest likeliest tokens whose probabilities sum to p or more.

    Equation: sort a row's probabilities softmax(logits) from the highest; keep tokens until their sum reaches p, the one that
    reaches it included. Returned are the logits, in their own order, with -inf for those that are dropped.

    The law: these tokens; at least one is kept for any p above 0, and p = 1 keeps all.
    """
    raise NotImplementedError("ordered, ids = logits.sort(descending=True), then the cumulative sum of probabilities")


def answer(logits: Tensor, p: float) -> Tensor:
    return keep_top_p(logits, p)


def reference(logits: Tensor, p: float) -> Tensor:
    kept = torch.tensor([references.top_p(row, p) for row in logits.double().tolist()])
    return torch.where(kept, logits, -math.inf)


def variant(*, crossing: bool = True, ascending: bool = False, back: bool = True, least: bool = True) -> Function:
    def function(logits: Tensor, p: float) -> Tensor:
        ordered, ids = logits.sort(descending=not ascending)
        probs = ordered.softmax(-1)
        total = probs.cumsum(-1)
        drop = (total - probs if crossing else total) >= p
        if least:
            drop[:, 0] = False
        if not back:
            return ordered.masked_fill(drop, -math.inf)
        return logits.masked_fill(drop.scatter(1, ids, drop), -math.inf)

    return function


def places_not_undone(logits: Tensor, p: float) -> Tensor:
    ordered = logits.sort(descending=True).values
    probs = ordered.softmax(-1)
    return logits.masked_fill(probs.cumsum(-1) - probs >= p, -math.inf)


def of_the_largest(logits: Tensor, p: float) -> Tensor:
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -math.inf)


def one_too_many(logits: Tensor, p: float) -> Tensor:
    ordered, ids = logits.sort(descending=True)
    probs = ordered.softmax(-1)
    drop = (probs.cumsum(-1) - probs >= p).roll(1, -1)
    drop[:, 0] = False
    return logits.masked_fill(drop.scatter(1, ids, drop), -math.inf)


def dropped_are_zero(logits: Tensor, p: float) -> Tensor:
    kept = answer(logits, p)
    return kept.masked_fill(kept == -math.inf, 0.0)


def share_of_tokens(logits: Tensor, p: float) -> Tensor:
    n = max(1, int(p * logits.shape[1]))
    return logits.masked_fill(logits < logits.topk(n).values[:, -1:], -math.inf)


def kept_share(function: Function) -> str:
    logits = torch.tensor([[0.5, 0.1, 0.25, 0.15]]).log()
    kept = function(logits.clone(), 0.7).isfinite()
    probs = float(logits.exp()[kept].sum()) if kept.shape == logits.shape else math.nan
    return f"of 0.5, 0.25, 0.15, 0.1 and p = 0.7 you keep {probs:.2f}; 0.75 is the least that reaches p"


def cases() -> dict[str, tuple[Tensor, float]]:
    return {
        "p = 0.6": (2 * drawn(5, 13), 0.6),
        "p = 0.95": (2 * drawn(5, 13, seed=1), 0.95),
        "one token above p": (torch.tensor([[0.0, 9.0, 1.0], [9.0, 0.0, 1.0]]), 0.3),
        "nearly all": (drawn(3, 7, seed=2), 0.99999),
    }


EXERCISE = Exercise(
    stub=top_p,
    answer=answer,
    reference=reference,
    cases=cases,
    mistakes=(
        Mistake(
            "the token that reaches p is dropped: compare the sum *before* each token with p",
            variant(crossing=False),
            kept_share,
        ),
        Mistake(
            "the token that reaches p is dropped, and a token above p alone leaves nothing: every logit is -inf",
            variant(crossing=False, least=False),
            kept_share,
        ),
        Mistake(
            "one token too many is kept: the token that reaches p is the last one. Shift the mask, or compare the sum before "
            "each token; not both",
            one_too_many,
            kept_share,
        ),
        Mistake(
            "you keep a share p of the tokens, a fixed number of them: that is top-k. Their probabilities sum to p",
            share_of_tokens,
        ),
        Mistake("these are probabilities; return the logits", lambda logits, p: answer(logits, p).softmax(-1)),
        Mistake("dropped tokens have the logit 0, which is a probability like others; -inf has none", dropped_are_zero),
        Mistake("you keep the unlikeliest tokens: sort with descending=True", variant(ascending=True)),
        Mistake(
            "the result is in sorted order: bring it back to the tokens' own places with scatter", variant(back=False)
        ),
        Mistake(
            "what is dropped was decided in sorted order, and is applied in the tokens' own order: scatter it back first",
            places_not_undone,
        ),
        Mistake("you keep tokens at least p times as likely as the likeliest: that is min-p", of_the_largest),
    ),
    hints=(
        "ordered, ids = logits.sort(descending=True): ids says where each sorted logit came from.",
        "probs = ordered.softmax(-1); before = probs.cumsum(-1) - probs is the sum of all likelier tokens. Drop where before >= p.",
        "drop.scatter(1, ids, drop) brings the decision back to the tokens' own places.",
    ),
    proves="the smallest set of tokens that reaches p, never an empty one",
    sources=(keep_top_p,),
)
