"""Exercise kv_cache: keys and values of earlier tokens are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.layers.cache import LayerCache
from clearhead.lessons import references
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn

Kept = dict[str, Tensor]


def kv_cache(
    q: Float[Tensor, "B H T E"], k: Float[Tensor, "B H T E"], v: Float[Tensor, "B H T E"], cache: dict[str, Tensor]
) -> Float[Tensor, "B H T E"]:
    """Causal attention of T new tokens over all tokens so far. q, k and v are those of the new tokens alone.

    `cache` is an empty dict at first, and the same dict at each call: keep in it what the next call needs. One dict is one text.

    Equation: S = tokens so far, the new ones included; query t is token S - T + t, and sees tokens 0 .. S - T + t

    The law: a text in pieces of any sizes gives what the whole text gives at once; two texts in turns do not disturb each other.
    """
    raise NotImplementedError(
        "torch.cat the keys of the cache and the new ones along the axis of the tokens, and keep them"
    )


def answer(q: Tensor, k: Tensor, v: Tensor, cache: Kept) -> Tensor:
    if cache:
        k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
    cache["k"], cache["v"] = k, v
    T, S = q.shape[2], k.shape[2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    later = torch.arange(S) > torch.arange(S - T, S)[:, None]
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v


def observe(
    function: Function, texts: Sequence[tuple[Tensor, Tensor, Tensor]], sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """Each text in pieces of these sizes, all texts in turns, each with a dict of its own."""
    kept: list[Kept] = [{} for _ in texts]
    pieces: list[list[Tensor]] = [[] for _ in texts]
    start = 0
    for size in sizes:
        for number, text in enumerate(texts):
            pieces[number].append(function(*(x[:, :, start : start + size] for x in text), kept[number]))
        start += size
    return tuple(torch.cat(each, 2) for each in pieces)


def reference(texts: Sequence[tuple[Tensor, Tensor, Tensor]], sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The whole text at once."""
    whole = [[x[:, :, : sum(sizes)].double() for x in text] for text in texts]
    return tuple(references.attend(q, k, v, lambda b, i, j: j <= i) for q, k, v in whole)


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return (scores if hidden is None else scores.masked_fill(hidden, -math.inf)).softmax(-1) @ v


def later(T: int, S: int) -> Tensor:
    return torch.arange(S) > torch.arange(S - T, S)[:, None]


def variant(hidden: Callable[[int, int], Tensor | None] = later, *, keep: str = "all") -> Function:
    def function(q: Tensor, k: Tensor, v: Tensor, cache: Kept) -> Tensor:
        new = {"k": k, "v": v}
        if cache and keep != "nothing":
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        cache.update(new if keep == "last" else {"k": k, "v": v})
        return attend(q, k, v, hidden(q.shape[2], k.shape[2]))

    return function


def new_ones_first(q: Tensor, k: Tensor, v: Tensor, cache: Kept) -> Tensor:
    if cache:
        k, v = torch.cat([k, cache["k"]], 2), torch.cat([v, cache["v"]], 2)
    cache["k"], cache["v"] = k, v
    return attend(q, k, v, later(q.shape[2], k.shape[2]))


def unscaled(q: Tensor, k: Tensor, v: Tensor, cache: Kept) -> Tensor:
    return answer(q * math.sqrt(q.shape[-1]), k, v, cache)


def one_later(T: int, S: int) -> Tensor:
    return torch.arange(S) > torch.arange(S - T, S)[:, None] + 1


def not_itself(T: int, S: int) -> Tensor:
    return torch.arange(S) >= torch.arange(S - T, S)[:, None]  # the first of all tokens gets NaN


def starts_anew(function: Function) -> str | None:
    """A text of four values 0, then another text, with its own dict, of one value 1. All keys are equal."""
    zeros = torch.zeros(2, 3, 4, 5)
    function(zeros, zeros, zeros, {})
    out = float(function(zeros[:, :, :1], zeros[:, :, :1], torch.ones(2, 3, 1, 5), {}).mean())
    if abs(out - 1) > 1e-4:
        return (
            f"two texts share a cache: with an empty dict, only {out:.2f} of the first token's weight is on itself. "
            "Keep everything in the dict that is given, nothing outside"
        )
    return None


def values_not_kept(q: Tensor, k: Tensor, v: Tensor, cache: Kept) -> Tensor:
    """The values of the cache are those of the newest tokens, repeated to the length of the keys."""
    old = cache.get("k", k[:, :, :0])
    k = torch.cat([old, k], 2)
    cache["k"] = k
    times = -(-k.shape[2] // v.shape[2])
    return attend(q, k, v.repeat(1, 1, times, 1)[:, :, -k.shape[2] :], later(q.shape[2], k.shape[2]))


def cases() -> dict[str, tuple[list[tuple[Tensor, Tensor, Tensor]], list[int]]]:
    def text(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (drawn(2, 3, 11, 5, seed=3 * seed + each) for each in range(3))
        return q, k, v

    return {
        "a whole text at once": ([text(0)], [11]),
        "a prompt, then token by token": ([text(1)], [5, 1, 1, 1, 1, 1, 1]),
        "pieces of any sizes": ([text(2)], [4, 1, 3, 3]),
        "two texts in turns": ([text(3), text(4)], [3, 1, 1, 2]),
    }


def top_left(T: int, S: int) -> Tensor:
    return torch.arange(S) > torch.arange(T)[:, None]


def seen_keys(function: Function) -> str:
    """How much weight the newest of five tokens puts on the four before it, if all keys are equal: 0.8."""
    cache, zeros = {}, torch.zeros(1, 1, 4, 5)
    function(zeros, zeros, torch.ones(1, 1, 4, 5), cache)
    out = function(zeros[:, :, :1], zeros[:, :, :1], torch.zeros(1, 1, 1, 5), cache)
    return f"of five equal keys the four in the cache get {float(out.mean()):.2f} of the fifth token's weight, expected 0.80"


EXERCISE = Exercise(
    stub=kv_cache,
    answer=answer,
    reference=reference,
    observe=observe,
    cases=cases,
    laws={"an empty dict is a new text": starts_anew},
    mistakes=(
        Mistake(
            "the causal mask starts at the first key: new query 0 sees key 0 alone (is_causal=True of torch does this, too). "
            "Query t is token S - T + t",
            variant(top_left),
            seen_keys,
        ),
        Mistake("there is no mask: in a piece of several tokens each sees those after it", variant(lambda T, S: None)),
        Mistake("each token sees the one after it: hide s > S - T + t, that one included", variant(one_later)),
        Mistake("a token does not see itself: hide s > S - T + t, not s >= S - T + t", variant(not_itself)),
        Mistake("the scores are not scaled: divide them by sqrt(E)", unscaled),
        Mistake("new keys are put before those of the cache; they come after them", new_ones_first),
        Mistake(
            "the cache keeps only the newest piece: earlier tokens are forgotten after one call", variant(keep="last")
        ),
        Mistake("the cache is not used: new tokens see only each other", variant(keep="nothing"), seen_keys),
        Mistake("keys are kept, but not the values that belong to them", values_not_kept),
    ),
    hints=(
        "k = torch.cat([cache['k'], k], 2) if there is something in the cache; then cache['k'] = k. The same for v.",
        "T = q.shape[2] new tokens, S = k.shape[2] in all: the places of the queries are S - T .. S - 1.",
        "hidden = torch.arange(S) > torch.arange(S - T, S)[:, None]; fill the scores with -inf there.",
    ),
    proves="pieces of any sizes give what the whole text gives, and texts do not disturb each other",
    sources=(LayerCache,),
)
