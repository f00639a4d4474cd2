"""Exercise rms_norm: layer norm without a mean, as in LLaMA."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.layers.linear import RMSNorm, make_norm
from clearhead.lessons import references
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn


def rms_norm(x: Float[Tensor, "B T D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "B T D"]:
    """RMS norm (Zhang and Sennrich 2019), as in LLaMA. Do not call torch's own rms_norm.

    Equation: x / sqrt(mean of x^2 over D + eps) * weight

    The law: these numbers; with a tiny eps, 10 x gives what x gives.
    """
    raise NotImplementedError("square, mean over the last axis, add eps, root: one number for each token")


def answer(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return references.rms_norm(x.double(), weight.double(), eps)


def variant(divisor: Callable[[Tensor, float], Tensor], *, centred: bool = False, scaled: bool = True) -> Function:
    def function(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if centred else x
        normed = x / divisor(x, eps)
        return normed * weight if scaled else normed

    return function


def root(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).sqrt()


def ignores_size(function: Function) -> str | None:
    x, weight = drawn(2, 3, 7), drawn(7, seed=1)
    change = float((function(10 * x, weight, 1e-12) - function(x.clone(), weight, 1e-12)).abs().max())
    return f"10 x gives other numbers than x: the largest difference is {change:.3g}" if change > 1e-3 else None


def cases() -> dict[str, tuple[Tensor, Tensor, float]]:
    weight = drawn(7, seed=1)
    return {
        "tokens of mean 3": (drawn(2, 5, 7) + 3, weight, 1e-6),
        "a large eps": (drawn(2, 5, 7, seed=3), weight, 0.5),
        "tokens of very different size": (drawn(2, 5, 7, seed=4) * torch.logspace(-1, 2, 5)[:, None], weight, 1e-6),
    }


EXERCISE = Exercise(
    stub=rms_norm,
    answer=answer,
    reference=reference,
    cases=cases,
    laws={"the size of x does not matter": ignores_size},
    mistakes=(
        Mistake("the mean is subtracted: that is layer norm", variant(root, centred=True)),
        Mistake(
            "squares are summed, not averaged: divide by D (this is the L2 norm)",
            variant(lambda x, eps: (x.square().sum(-1, keepdim=True) + eps).sqrt()),
        ),
        Mistake(
            "eps is added to the root; it belongs under it",
            variant(lambda x, eps: x.square().mean(-1, keepdim=True).sqrt() + eps),
        ),
        Mistake(
            "the root is missing: you divide by the mean of the squares", variant(lambda x, eps: root(x, eps).square())
        ),
        Mistake(
            "the mean runs over all tokens; each token has its own",
            variant(lambda x, eps: (x.square().mean() + eps).sqrt()),
        ),
        Mistake(
            "the mean runs over the tokens (T); it runs over the numbers of each token (D, the last axis)",
            variant(lambda x, eps: (x.square().mean(1, keepdim=True) + eps).sqrt()),
        ),
        Mistake(
            "you multiply by 1 + weight, as Gemma does; here by weight",
            lambda x, weight, eps: x / root(x, eps) * (1 + weight),
        ),
        Mistake("the weight is not applied", variant(root, scaled=False)),
        Mistake("eps does nothing", variant(lambda x, eps: root(x, 0.0))),
    ),
    hints=(
        "x.square().mean(-1, keepdim=True) has shape (B, T, 1).",
        "Add eps before the root: torch.sqrt(... + eps), or torch.rsqrt for one over it.",
        "No mean is subtracted, and there is no bias.",
    ),
    proves="each token is brought to a mean square of 1, and no mean is subtracted",
    sources=(make_norm, RMSNorm),
)
