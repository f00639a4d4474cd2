"""Exercise grouped_query: several query heads share a key head."""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from clearhead.layers.attention import attend, attention_scores
from clearhead.lessons import references
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn


def grouped_query(
    q: Float[Tensor, "B H T E"], k: Float[Tensor, "B K S E"], v: Float[Tensor, "B K S E"]
) -> Float[Tensor, "B H T E"]:
    """Grouped-query attention (Ainslie et al. 2023), without a mask: H query heads, K key and value heads, K divides H.

    Equation: head h attends with key head h // (H / K): the first H / K queries share key head 0, the next ones key head 1 ...

    The law: these numbers; K = H is plain attention, K = 1 is multi-query attention. The cache of keys is H / K times smaller.
    """
    raise NotImplementedError("repeat each key head H / K times, then attend as usual")


def answer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, kernel="explicit")


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return references.attend(q.double(), k.double(), v.double(), lambda b, i, j: True)


def variant(share: Callable[[Tensor, int], Tensor]) -> Function:
    """Keys and values are brought to H heads by `share`."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = share(k, q.shape[1]), share(v, q.shape[1])
        return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v

    return function


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return answer(q * math.sqrt(q.shape[-1]), k, v)


def values_tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    weights = (q @ k.repeat_interleave(group, 1).transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
    return weights @ v.repeat(1, group, 1, 1)


def cases() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    def case(n_heads: int, n_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        return drawn(2, n_heads, 5, 7), drawn(2, n_kv_heads, 11, 7, seed=1), drawn(2, n_kv_heads, 11, 7, seed=2)

    return {"six heads, two key heads": case(6, 2), "as many": case(3, 3), "one key head": case(5, 1)}


EXERCISE = Exercise(
    stub=grouped_query,
    answer=answer,
    reference=reference,
    cases=cases,
    mistakes=(
        Mistake(
            "key heads are repeated in turns, 0 1 0 1 0 1 (repeat); neighbours share one, 0 0 0 1 1 1 (repeat_interleave)",
            variant(lambda x, H: x.repeat(1, H // x.shape[1], 1, 1)),
        ),
        Mistake("keys are shared by neighbours, but values in turns: use the same order for both", values_tiled),
        Mistake("the scores are not scaled: divide them by sqrt(E)", unscaled),
        Mistake("every head attends with key head 0", variant(lambda x, H: x[:, :1].expand(-1, H, -1, -1))),
        Mistake(
            "every head attends with the mean of the key heads",
            variant(lambda x, H: x.mean(1, True).expand(-1, H, -1, -1)),
        ),
        Mistake(
            "key heads are shared in the wrong order: the last key head serves the first queries",
            variant(lambda x, H: x.flip(1).repeat_interleave(H // x.shape[1], 1)),
        ),
    ),
    hints=(
        "group = q.shape[1] // k.shape[1] queries share a key head.",
        "k.repeat_interleave(group, dim=1) gives 0 0 0 1 1 1; k.repeat gives 0 1 0 1 0 1.",
        "Without a copy: q.unflatten(1, (K, group)) has shape (B, K, group, T, E); k[:, :, None] broadcasts over the group.",
    ),
    proves="queries share key heads by neighbours, from plain attention to one key head",
    sources=(attend, attention_scores),
)
