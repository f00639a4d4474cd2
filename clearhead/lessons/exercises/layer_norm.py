"""Exercise layer_norm: mean 0 and variance 1 for each token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.layers.linear import LayerNorm, make_norm
from clearhead.lessons import references
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn


def layer_norm(
    x: Float[Tensor, "B T D"], weight: Float[Tensor, " D"], bias: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "B T D"]:
    """Layer norm (Ba et al. 2016). Do not call torch's own layer_norm.

    Equation: (x - mean) / sqrt(variance + eps) * weight + bias, where mean and variance are those of each token, over D.
              The variance is the mean of the squares of (x - mean).

    The law: these numbers; a constant added to x changes nothing.
    """
    raise NotImplementedError("mean = x.mean(-1, keepdim=True): one number for each token")


def answer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / (variance + eps).sqrt() * weight + bias


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return references.layer_norm(x.double(), weight.double(), bias.double(), eps)


def variant(
    over: int | tuple[int, ...] = -1,
    *,
    centred: bool = True,
    unbiased: bool = False,
    divide: Callable[[Tensor, float], Tensor] = lambda variance, eps: (variance + eps).sqrt(),
    scaled: bool = True,
) -> Function:
    def function(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        mean = x.mean(over, keepdim=True)
        variance = x.var(over, keepdim=True, unbiased=unbiased)
        normed = (x - mean if centred else x) / divide(variance, eps)
        return normed * weight + bias if scaled else normed

    return function


def ignores_a_constant(function: Function) -> str | None:
    x, weight, bias = drawn(2, 3, 7), drawn(7, seed=1), drawn(7, seed=2)
    change = float((function(x + 5, weight, bias, 1e-5) - function(x.clone(), weight, bias, 1e-5)).abs().max())
    return f"5 added to every number changes the result by {change:.3g}" if change > 1e-3 else None


def cases() -> dict[str, tuple[Tensor, Tensor, Tensor, float]]:
    weight, bias = drawn(7, seed=1), drawn(7, seed=2)
    return {
        "tokens of mean 3": (drawn(2, 5, 7) + 3, weight, bias, 1e-5),
        "a large eps": (drawn(2, 5, 7, seed=3), weight, bias, 0.5),
        "tokens of very different size": (
            drawn(2, 5, 7, seed=4) * torch.logspace(-1, 2, 5)[:, None],
            weight,
            bias,
            1e-5,
        ),
    }


EXERCISE = Exercise(
    stub=layer_norm,
    answer=answer,
    reference=reference,
    cases=cases,
    laws={"a constant added to x changes nothing": ignores_a_constant},
    mistakes=(
        Mistake(
            "the variance is divided by D - 1, as torch.var and torch.std do unless told: unbiased=False",
            variant(unbiased=True),
        ),
        Mistake(
            "eps is added to the standard deviation; it belongs under the root, to the variance",
            variant(divide=lambda variance, eps: variance.sqrt() + eps),
        ),
        Mistake(
            "both: eps is added to the standard deviation, and the variance is divided by D - 1",
            variant(unbiased=True, divide=lambda variance, eps: variance.sqrt() + eps),
        ),
        Mistake("you divide by the variance, not by its root", variant(divide=lambda variance, eps: variance + eps)),
        Mistake("eps does nothing", variant(divide=lambda variance, eps: variance.sqrt())),
        Mistake("the mean is not subtracted: that is nearer to RMS norm", variant(centred=False)),
        Mistake("mean and variance are taken over the tokens (T); each token has its own, over D", variant(1)),
        Mistake(
            "mean and variance are taken over tokens and columns together; each token has its own", variant((1, 2))
        ),
        Mistake("the bias is not added", lambda x, weight, bias, eps: variant()(x, weight, 0 * bias, eps)),
        Mistake("weight and bias are not applied", variant(scaled=False)),
    ),
    hints=(
        "x.mean(-1, keepdim=True) has shape (B, T, 1) and broadcasts over D.",
        "variance = (x - mean).square().mean(-1, keepdim=True); torch.var divides by D - 1 unless told unbiased=False.",
        "(x - mean) / torch.sqrt(variance + eps) * weight + bias",
    ),
    proves="each token is brought to mean 0 and variance 1, with eps in its place",
    sources=(make_norm, LayerNorm),
)
