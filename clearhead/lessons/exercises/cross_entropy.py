"""Exercise cross_entropy: the loss of a language model, on a batch with padding."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.kernels.cross_entropy import cross_entropy as chunked
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn, drawn_ids
from clearhead.training.tasks.task import token_losses


def cross_entropy(
    logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"], real: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """The loss of a language model: the mean of -log p(target) over the real tokens. Do not call torch's own cross_entropy.

    Equation: -log p(target) = log(sum over v of exp(logits_v)) - logits_target, for each token; then the mean over all tokens
    whose `real` is True, of all rows together.

    The law: these numbers, for logits of any size; what stands in the padding changes nothing.
    """
    raise NotImplementedError("start with the loss of each token, (B, T): torch.logsumexp and logits.gather")


def answer(logits: Tensor, targets: Tensor, real: Tensor) -> Tensor:
    losses = logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]
    return losses[real].mean()


def reference(logits: Tensor, targets: Tensor, real: Tensor) -> float:
    losses: list[float] = []
    for row, goals, flags in zip(logits.tolist(), targets.tolist(), real.tolist(), strict=True):
        for scores, goal, is_real in zip(row, goals, flags, strict=True):
            if is_real:
                top = max(scores)
                losses.append(math.log(sum(math.exp(score - top) for score in scores)) + top - scores[goal])
    return math.fsum(losses) / len(losses)


def variant(reduce: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """`reduce(losses (B, T), real as numbers)`."""

    def function(logits: Tensor, targets: Tensor, real: Tensor) -> Tensor:
        return reduce(-logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0], real.float())

    return function


def unstable(logits: Tensor, targets: Tensor, real: Tensor) -> Tensor:
    probs = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return -probs.gather(-1, targets[..., None])[..., 0].log()[real].mean()


def without_log(logits: Tensor, targets: Tensor, real: Tensor) -> Tensor:
    return -logits.softmax(-1).gather(-1, targets[..., None])[..., 0][real].mean()


def padding_changes_nothing(function: Function) -> str | None:
    logits, targets, real = cases()["rows of different lengths"]
    other = torch.where(real[..., None], logits, logits + drawn(*logits.shape, seed=7))
    change = abs(float(function(other, targets.clone(), real.clone())) - float(function(logits.clone(), targets, real)))
    return f"other logits in the padding change the loss by {change:.3g}" if change > 1e-4 else None


def guess_of_all(function: Function) -> str | None:
    loss = float(function(torch.zeros(2, 3, 17), torch.zeros(2, 3).long(), torch.ones(2, 3).bool()))
    if abs(loss - math.log(17)) > 1e-4:
        return f"with 17 equal logits the loss is {loss:.4f}; log 17 = {math.log(17):.4f}"
    return None


def cases() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    logits, targets = 2 * drawn(3, 5, 11), drawn_ids(3, 5, below=11)
    uneven = torch.arange(5) < torch.tensor([[5], [2], [3]])
    return {
        "no padding": (logits, targets, torch.ones(3, 5).bool()),
        "rows of different lengths": (logits, targets, uneven),
        "logits of 1,000": (logits + 1000, targets, uneven),
    }


EXERCISE = Exercise(
    stub=cross_entropy,
    answer=answer,
    reference=reference,
    cases=cases,
    laws={
        "what stands in the padding changes nothing": padding_changes_nothing,
        "equal logits cost log V": guess_of_all,
    },
    mistakes=(
        Mistake("padding is counted: the mean runs over all tokens", variant(lambda losses, real: losses.mean())),
        Mistake(
            "losses of padding are set to 0 but still counted: divide by the number of real tokens, not by B T",
            variant(lambda losses, real: (losses * real).mean()),
        ),
        Mistake(
            "this is the mean of each row's mean: a token of a short row weighs more. Take the mean over all real tokens",
            variant(lambda losses, real: ((losses * real).sum(-1) / real.sum(-1)).mean()),
        ),
        Mistake(
            "the targets are shifted by one; they are the next tokens already",
            lambda logits, targets, real: answer(logits[:, :-1], targets[:, 1:], real[:, 1:]),
        ),
        Mistake("the losses are summed, not averaged", variant(lambda losses, real: (losses * real).sum())),
        Mistake(
            "the sum is divided by the number of rows", variant(lambda losses, real: (losses * real).sum() / len(real))
        ),
        Mistake(
            "the sign is wrong: the loss is minus the log-probability",
            variant(lambda losses, real: -(losses * real).sum() / real.sum()),
        ),
        Mistake("exp overflows for large logits: use torch.logsumexp, or subtract the largest logit first", unstable),
        Mistake("the logarithm is missing: this is minus the probability", without_log),
    ),
    hints=(
        "logits.logsumexp(-1) is log(sum exp), without overflow: (B, T).",
        "logits.gather(-1, targets[..., None])[..., 0] picks the target's logit of each token: (B, T).",
        "losses[real] keeps the real tokens of all rows; .mean() of those.",
    ),
    proves="the mean log-loss over real tokens, for logits of any size",
    sources=(token_losses, chunked),
)
