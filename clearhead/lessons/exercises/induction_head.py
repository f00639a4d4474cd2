"""Exercise induction_head: find the head that completes repetitions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from clearhead.inside import head_scores, probe, repeated_tokens
from clearhead.inside.head_scores import HeadScoreSums
from clearhead.lessons import references
from clearhead.lessons.exercise import Exercise, Function, Mistake
from clearhead.lessons.models import VOCAB, designed_decoder
from clearhead.models import Decoder


def induction_head(model: Decoder, tokens: Int[Tensor, "B T"]) -> tuple[int, int]:
    """Find the induction head of a model (Olsson et al. 2022): its layer and its number, both counted from 0.

    A head's weights come from a probe: (B, H, T, S), and weights[b, h, t, s] is how much query t attends to key s.

        with ch.probe(model, "blocks.*.attention.weights") as seen:
            model(tokens)
        seen["blocks.0.attention.weights"]

    An induction head attends, from a token that came before, to what followed it then: to s with tokens[s - 1] = tokens[t], s < t.
    `tokens` are random, each row repeated once: "5 2 9 5 2 9". From the second 2, it attends to the first 9.

    Equation: score of a head = mean, over all t whose token came before, of the sum of its weights on such s

    The law: the head with the highest score is found, wherever it is.
    """
    raise NotImplementedError("compute the score of each head of each layer, then take the place of the largest")


def answer(model: Decoder, tokens: Tensor) -> tuple[int, int]:
    best = max(head_scores(model, tokens), key=lambda score: score.induction or 0)
    return int(best.site.split(".")[1]), best.head


def reference(model: Decoder, tokens: Tensor) -> tuple[int, int]:
    scores: dict[tuple[int, int], float] = {}
    for layer, weights in enumerate(weights_of(model, tokens)):
        for head in range(weights.shape[1]):
            rows = zip(weights[:, head].tolist(), tokens.tolist(), strict=True)
            found = [value for row, ids in rows for value in references.induction(row, ids)]
            scores[layer, head] = sum(found) / len(found)
    return max(scores, key=scores.__getitem__)


def weights_of(model: Decoder, tokens: Tensor) -> list[Tensor]:
    with torch.no_grad(), probe(model, "blocks.*.attention.weights") as seen:
        model(tokens)
    return [seen[site] for site in seen]


def variant(
    sought: Callable[[Tensor], Tensor], place: Callable[[int, int], tuple[int, int]] = lambda layer, head: (layer, head)
) -> Function:
    """The head with the most weight on `sought(tokens)`, booleans (B, T, S)."""

    def function(model: Decoder, tokens: Tensor) -> tuple[int, int]:
        wanted = sought(tokens)[:, None]
        scores = torch.stack([(weights * wanted).sum((0, 2, 3)) for weights in weights_of(model, tokens)])
        layer, head = divmod(int(scores.argmax()), scores.shape[1])
        return place(layer, head)

    return function


def after_earlier(tokens: Tensor) -> Tensor:
    """True at s if tokens[s - 1] = tokens[t] and s < t."""
    same = tokens[:, :, None] == tokens.roll(1, 1)[:, None, :]
    return same & torch.ones(tokens.shape[1], tokens.shape[1]).tril(-1).bool()


def earlier(tokens: Tensor) -> Tensor:
    return (tokens[:, :, None] == tokens[:, None, :]).tril(-1)


def before(tokens: Tensor) -> Tensor:
    return torch.eye(tokens.shape[1]).roll(-1, 1).tril().bool().expand(len(tokens), -1, -1)


def first(tokens: Tensor) -> Tensor:
    return (torch.arange(tokens.shape[1]) == 0).expand(len(tokens), tokens.shape[1], -1)


def cases() -> dict[str, tuple[Decoder, Tensor]]:
    tokens = repeated_tokens(VOCAB, length=10, batch=3)
    orders = {
        "a model made by hand": (("previous", "first", "duplicate"), ("idle", "first", "induction")),
        "the same heads in other places": (("first", "duplicate", "previous"), ("idle", "induction", "first")),
        "and in others": (("duplicate", "previous", "first"), ("induction", "first", "idle")),
    }
    return {words: (designed_decoder(kinds), tokens) for words, kinds in orders.items()}


EXERCISE = Exercise(
    stub=induction_head,
    answer=answer,
    reference=reference,
    cases=cases,
    mistakes=(
        Mistake(
            "you found the duplicate-token head: it attends to the earlier occurrence itself. The key after it is sought, "
            "tokens[s - 1] = tokens[t]",
            variant(earlier),
        ),
        Mistake(
            "you found the previous-token head, of which the induction head is made; look for s after an earlier token",
            variant(before),
        ),
        Mistake("you found the head that attends to the first token: the place where most heads rest", variant(first)),
        Mistake(
            "head and layer are swapped: return (layer, head)",
            variant(after_earlier, lambda layer, head: (head, layer)),
        ),
        Mistake(
            "heads and layers are counted from 1; count from 0",
            variant(after_earlier, lambda layer, head: (layer + 1, head + 1)),
        ),
    ),
    hints=(
        'import clearhead as ch; a probe of "blocks.*.attention.weights" gives one tensor (B, H, T, S) for each layer.',
        "wanted[b, t, s] is True where tokens[b, s - 1] == tokens[b, t] and s < t: tokens.roll(1, 1)[:, None, :] == "
        "tokens[:, :, None], and of that the lower triangle, tril(-1).",
        "A head's score: (weights * wanted[:, None]).sum(-1), and its mean over the t whose `wanted` has a True. Then the "
        "place of the largest score, over layers and heads.",
    ),
    proves="you find the head that completes repetitions by what it does, wherever it is",
    sources=(head_scores, HeadScoreSums.add),
)
