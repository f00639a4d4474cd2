"""Exercise softmax: from scores to weights, for any size of scores."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.layers.attention import masked_softmax
from clearhead.lessons import references
from clearhead.lessons.exercise import Exercise, Mistake, drawn


def softmax(scores: Float[Tensor, "B H T S"]) -> Float[Tensor, "B H T S"]:
    """Scores to weights: positive, and each row (the last axis) sums to 1. Do not call torch's own softmax.

    Equation: weights_s = exp(scores_s) / sum over s' of exp(scores_s')

    The law: these numbers, for scores of any size: exp(1000) is infinite in float32, but softmax([1000, 999]) is not.
    A score of -inf has weight 0.
    """
    raise NotImplementedError("a constant can be subtracted from a row without a change of its softmax: which one?")


def answer(scores: Tensor) -> Tensor:
    each = (scores - scores.amax(-1, keepdim=True)).exp()
    return each / each.sum(-1, keepdim=True)


def reference(scores: Tensor) -> Tensor:
    rows = [references.softmax(row) for row in scores.flatten(0, -2).tolist()]
    return torch.tensor(rows).reshape(scores.shape)


def unshifted(scores: Tensor) -> Tensor:
    return scores.exp() / scores.exp().sum(-1, keepdim=True)


def one_maximum(scores: Tensor) -> Tensor:
    each = (scores - scores.max()).exp()
    return each / each.sum(-1, keepdim=True)


def less_the_mean(scores: Tensor) -> Tensor:
    each = (scores - scores.mean(-1, keepdim=True)).exp()
    return each / each.sum(-1, keepdim=True)


def of_everything(scores: Tensor) -> Tensor:
    return scores.flatten().softmax(0).reshape(scores.shape)


def cases() -> dict[str, tuple[Tensor]]:
    far = drawn(2, 1, 3, 5, seed=1)
    far[1] -= 1000
    hidden = drawn(1, 2, 3, 5, seed=2)
    hidden[..., 1:3] = -torch.inf
    return {
        "small scores": (drawn(2, 3, 7, 5),),
        "scores of 1,000": (drawn(2, 3, 7, 5, seed=3) + 1000,),
        "one row at 0, one at -1,000": (far,),
        "scores of -inf": (hidden,),
    }


EXERCISE = Exercise(
    stub=softmax,
    answer=answer,
    reference=reference,
    cases=cases,
    mistakes=(
        Mistake(
            "exp overflows: subtract the largest score of each row before exp; it does not change the weights",
            unshifted,
            lambda function: (
                f"exp(1000) is inf, and inf / inf is {float(function(torch.full((1, 1, 1, 2), 1000.0)).max())}"
            ),
        ),
        Mistake(
            "you subtract the largest score of the whole tensor: in a row far below it every exp is 0, and 0 / 0 is NaN. "
            "Subtract the largest of each row",
            one_maximum,
        ),
        Mistake(
            "the weights sum to 1 over the wrong axis: over the queries (T), not over the keys (S, the last)",
            lambda scores: scores.softmax(-2),
            lambda function: f"the first row sums to {float(function(drawn(1, 1, 3, 5))[0, 0, 0].sum()):.2f}",
        ),
        Mistake(
            "all weights together sum to 1; each row does",
            of_everything,
            lambda function: f"the first row sums to {float(function(drawn(1, 1, 3, 5))[0, 0, 0].sum()):.2f}",
        ),
        Mistake(
            "the weights sum to 1 over the heads (H), not over the keys (S, the last axis). Without dim, nn.Softmax takes axis 1",
            lambda scores: scores.softmax(1),
            lambda function: f"the first row sums to {float(function(drawn(1, 2, 3, 5))[0, 0, 0].sum()):.2f}",
        ),
        Mistake(
            "you subtract the mean of each row; it may be far below the largest score, or -inf. Subtract the largest",
            less_the_mean,
        ),
        Mistake("these are logarithms of the weights", lambda scores: scores.log_softmax(-1)),
    ),
    hints=(
        "softmax(scores) = softmax(scores - c) for any c: exp(-c) stands above and below the line.",
        "With c the largest score of the row no exponent is above 0: scores.amax(-1, keepdim=True).",
        "Divide by .sum(-1, keepdim=True), which has shape (B, H, T, 1).",
    ),
    proves="weights of each row sum to 1, for scores of any size",
    sources=(masked_softmax,),
)
