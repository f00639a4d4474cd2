"""Exercise feed_forward: the gated feed-forward layer of LLaMA."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.layers.block import FeedForward
from clearhead.lessons import references
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn


def feed_forward(
    x: Float[Tensor, "B T D"], gate: Float[Tensor, "F D"], up: Float[Tensor, "F D"], down: Float[Tensor, "D F"]
) -> Float[Tensor, "B T D"]:
    """The gated feed-forward layer, SwiGLU (Shazeer 2020), as in LLaMA. Weights are laid out (out, in), without biases.

    Equation: (silu(x gate^T) * (x up^T)) down^T,  silu(z) = z / (1 + exp(-z)); * is number by number.

    The law: these numbers; each token alone: another token changes nothing.
    """
    raise NotImplementedError("x @ gate.T has shape (B, T, F)")


def answer(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    layer = FeedForward(d_model=x.shape[-1], d_ff=len(up), activation="silu", gated=True, bias=False)
    layer.load_state_dict({"gate.weight": gate, "up.weight": up, "down.weight": down})
    return layer(x).detach()


def reference(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    x, gate, up, down = x.double(), gate.double(), up.double(), down.double()
    return (references.activate(references.ACTIVATIONS["silu"], x @ gate.T) * (x @ up.T)) @ down.T


def variant(inner: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """`inner(x gate^T, x up^T)`."""

    def function(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return inner(x @ gate.T, x @ up.T) @ down.T

    return function


def cases() -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    def case(batch: int, length: int, width: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gate, up, down = (
            drawn(*shape, seed=seed) / math.sqrt(shape[1])
            for seed, shape in enumerate(((hidden, width), (hidden, width), (width, hidden)))
        )
        return drawn(batch, length, width, seed=3), gate, up, down

    return {"a wider inside": case(2, 3, 7, 13), "one token": case(1, 1, 5, 3)}


EXERCISE = Exercise(
    stub=feed_forward,
    answer=answer,
    reference=reference,
    cases=cases,
    mistakes=(
        Mistake("silu falls on `up`; it falls on the gate", variant(lambda g, u: g * F.silu(u))),
        Mistake("silu falls on the product; it falls on the gate alone", variant(lambda g, u: F.silu(g * u))),
        Mistake("silu falls on both; it falls on the gate alone", variant(lambda g, u: F.silu(g) * F.silu(u))),
        Mistake(
            "the gate has a sigmoid (that is GLU); silu(z) is z times sigmoid(z)", variant(lambda g, u: g.sigmoid() * u)
        ),
        Mistake("the sign is wrong in silu: z / (1 + exp(-z))", variant(lambda g, u: g / (1 + g.exp()) * u)),
        Mistake("the gate has a GELU (that is GEGLU), not silu", variant(lambda g, u: F.gelu(g) * u)),
        Mistake("the gate has a ReLU (that is ReGLU), not silu", variant(lambda g, u: F.relu(g) * u)),
        Mistake("gate and up are added; they are multiplied", variant(lambda g, u: F.silu(g) + u)),
        Mistake(
            "`up` is not used: this is a plain feed-forward layer, without a gate", variant(lambda g, u: F.silu(g))
        ),
    ),
    hints=(
        "Two products of the same input: x @ gate.T and x @ up.T, both (B, T, F).",
        "torch.nn.functional.silu(z) is z * sigmoid(z); it falls on the gate's product alone.",
        "Multiply number by number, then @ down.T brings it back to (B, T, D).",
    ),
    proves="the feed-forward layer of LLaMA: a gate that opens and closes what the other product brings",
    sources=(FeedForward,),
)
