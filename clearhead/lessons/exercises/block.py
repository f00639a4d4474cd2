"""Exercise block: the residual stream, with the norms before or after."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.layers.block import Block
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn

Part = Callable[[Tensor], Tensor]


def block(
    x: Float[Tensor, "B T D"],
    attention: Callable[[Tensor], Tensor],
    feed_forward: Callable[[Tensor], Tensor],
    norm_1: Callable[[Tensor], Tensor],
    norm_2: Callable[[Tensor], Tensor],
    norm_first: bool,
) -> Float[Tensor, "B T D"]:
    """One block of a Transformer (section 3.1 of the paper): attention, then feed-forward, each added to the residual stream.

    Equation, norm_first=False (post-norm, the paper): x = norm_1(x + attention(x)), then x = norm_2(x + feed_forward(x))
    Equation, norm_first=True (pre-norm, most models since): x = x + attention(norm_1(x)), then x = x + feed_forward(norm_2(x))

    The law: these numbers. With pre-norm, parts that return zeros leave x as it is: the stream passes through.
    """
    raise NotImplementedError("write the two lines for norm_first=True, then the two for norm_first=False")


class Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Part) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def answer(x: Tensor, attention: Part, feed_forward: Part, norm_1: Part, norm_2: Part, norm_first: bool) -> Tensor:
    block: Any = SimpleNamespace(
        norm_first=norm_first, dropout=0.0, training=False
    )  # all that a step needs of its block
    x = Block.step(block, x, Called(norm_1), attention)
    return Block.step(block, x, Called(norm_2), feed_forward)


def reference(x: Tensor, attention: Part, feed_forward: Part, norm_1: Part, norm_2: Part, norm_first: bool) -> Tensor:
    for part, norm in ((attention, norm_1), (feed_forward, norm_2)):
        added = part(norm(x)) if norm_first else part(x)
        x = torch.add(x, added)
        x = x if norm_first else norm(x)
    return x


def by_step(step: Callable[[Tensor, Part, Part, bool], Tensor]) -> Function:
    """Both steps are `step(x, part, norm, norm_first)`."""

    def function(
        x: Tensor, attention: Part, feed_forward: Part, norm_1: Part, norm_2: Part, norm_first: bool
    ) -> Tensor:
        return step(step(x, attention, norm_1, norm_first), feed_forward, norm_2, norm_first)

    return function


def normed_stream(x: Tensor, part: Part, norm: Part, norm_first: bool) -> Tensor:
    if norm_first:
        x = norm(x)
        return x + part(x)
    return norm(x + part(x))


def no_residual(x: Tensor, part: Part, norm: Part, norm_first: bool) -> Tensor:
    return part(norm(x)) if norm_first else norm(part(x))


def norm_of_part(x: Tensor, part: Part, norm: Part, norm_first: bool) -> Tensor:
    return x + part(norm(x)) if norm_first else x + norm(part(x))


def one_norm(x: Tensor, attention: Part, feed_forward: Part, norm_1: Part, norm_2: Part, norm_first: bool) -> Tensor:
    return reference(x, attention, feed_forward, norm_1, norm_1, norm_first)


def parallel(x: Tensor, attention: Part, feed_forward: Part, norm_1: Part, norm_2: Part, norm_first: bool) -> Tensor:
    if norm_first:
        return x + attention(norm_1(x)) + feed_forward(norm_2(x))
    return norm_2(norm_1(x + attention(x)) + feed_forward(x))


def swapped(x: Tensor, attention: Part, feed_forward: Part, norm_1: Part, norm_2: Part, norm_first: bool) -> Tensor:
    return reference(x, attention, feed_forward, norm_1, norm_2, not norm_first)


def second_not_added(
    x: Tensor, attention: Part, feed_forward: Part, norm_1: Part, norm_2: Part, norm_first: bool
) -> Tensor:
    if norm_first:
        return feed_forward(norm_2(x + attention(norm_1(x))))
    return norm_2(feed_forward(norm_1(x + attention(x))))


def turned_round(
    x: Tensor, attention: Part, feed_forward: Part, norm_1: Part, norm_2: Part, norm_first: bool
) -> Tensor:
    return reference(x, feed_forward, attention, norm_2, norm_1, norm_first)


def size_of_stream(function: Function) -> str:
    """What passes through a pre-norm block whose parts add nothing."""
    x, zero = 3 * drawn(1, 2, 7), torch.zeros_like

    def norm(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    out = function(x, zero, zero, norm, norm, True)
    return f"with parts that add nothing, a stream of length {float(x.norm()):.2f} leaves with length {float(out.norm()):.2f}"


def cases() -> dict[str, tuple[Tensor, Part, Part, Part, Part, bool]]:
    mix, inner, first, second = (drawn(7, 7, seed=seed) / 7**0.5 for seed in range(1, 5))
    parts: tuple[Part, Part, Part, Part] = (
        lambda x: torch.tanh(x.mean(1, keepdim=True) + x @ mix),
        lambda x: torch.relu(x @ inner),
        lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * first[0],
        lambda x: x / x.norm(dim=-1, keepdim=True) * second[0],
    )
    x = 2 * drawn(2, 5, 7)
    return {"pre-norm": (x, *parts, True), "post-norm": (x, *parts, False)}


EXERCISE = Exercise(
    stub=block,
    answer=answer,
    reference=reference,
    cases=cases,
    mistakes=(
        Mistake("pre-norm and post-norm are swapped: norm_first=True norms what each part reads", swapped),
        Mistake(
            "in pre-norm, what is normed stays in the stream: x = norm(x) before adding. Only what the part reads is normed",
            by_step(normed_stream),
            size_of_stream,
        ),
        Mistake(
            "the residual connection is missing: what each part returns is added to x",
            by_step(no_residual),
            size_of_stream,
        ),
        Mistake("what feed_forward returns is not added to x: both parts have a residual connection", second_not_added),
        Mistake("in post-norm you norm what is added; the sum is normed: norm(x + part(x))", by_step(norm_of_part)),
        Mistake("norm_1 is used twice; the feed-forward layer has norm_2", one_norm),
        Mistake("the feed-forward layer reads what came in; it reads what attention has made of it", parallel),
        Mistake("the feed-forward layer comes first; attention does", turned_round),
    ),
    hints=(
        "Pre-norm in two lines: x = x + attention(norm_1(x)); x = x + feed_forward(norm_2(x)).",
        "Post-norm in two lines: x = norm_1(x + attention(x)); x = norm_2(x + feed_forward(x)).",
        "Do not write x = norm_1(x) on a line of its own: the stream itself stays as it is in pre-norm.",
    ),
    proves="both kinds of block, with a stream that passes through",
    sources=(Block,),
)
