"""Exercise multi_head: several heads side by side."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.layers.attention import MultiHeadAttention
from clearhead.lessons import references
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn

Split = Callable[[Tensor, int], Tensor]


def multi_head(
    x: Float[Tensor, "B T D"],
    w_q: Float[Tensor, "D D"],
    w_k: Float[Tensor, "D D"],
    w_v: Float[Tensor, "D D"],
    w_o: Float[Tensor, "D D"],
    n_heads: int,
) -> Float[Tensor, "B T D"]:
    """Multi-head self-attention, without a mask (section 3.2.2 of the paper). E = D / n_heads.

    Equation: q = x w_q^T, k = x w_k^T, v = x w_v^T; head h has columns h E .. (h+1) E of each;
              out = concat(attention(q_h, k_h, v_h) for each head h) w_o^T

    Weights are laid out as in nn.Linear: (out, in). You may call your own attention: from attention import attention.

    The law: these numbers; with one head it is plain attention.
    """
    raise NotImplementedError("split q, k and v into heads: (B, T, D) -> (B, T, H, E) -> (B, H, T, E)")


def answer(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, n_heads: int) -> Tensor:
    layer = MultiHeadAttention(d_model=x.shape[-1], n_heads=n_heads, bias="")
    weights = {"q_proj.weight": w_q, "k_proj.weight": w_k, "v_proj.weight": w_v, "o_proj.weight": w_o}
    layer.load_state_dict(weights)
    return layer(x).detach()


def reference(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, n_heads: int) -> Tensor:
    """Head by head, from slices of the columns."""
    x, E = x.double(), x.shape[-1] // n_heads
    q, k, v = (torch.einsum("btd,ed->bte", x, w.double())[:, None] for w in (w_q, w_k, w_v))

    def columns(start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        return q[..., start:end], k[..., start:end], v[..., start:end]

    heads = [references.attend(*columns(h * E, (h + 1) * E), lambda b, i, j: True)[:, 0] for h in range(n_heads)]
    return torch.einsum("btd,ed->bte", torch.cat(heads, -1), w_o.double())


def split(x: Tensor, n_heads: int) -> Tensor:
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def variant(
    split: Split = split,
    merge: Callable[[Tensor], Tensor] = merge,
    *,
    projected: bool = True,
    transposed: bool = False,
    width: Callable[[int, int], int] = lambda D, E: E,
) -> Function:
    def function(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, n_heads: int) -> Tensor:
        D = x.shape[-1]
        q, k, v = (split(x @ (w if transposed else w.T), n_heads) for w in (w_q, w_k, w_v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(width(D, D // n_heads))
        out = merge(scores.softmax(-1) @ v)
        return out @ (w_o if transposed else w_o.T) if projected else out

    return function


def reshape_apart(x: Tensor, n_heads: int) -> Tensor:
    return x.reshape(x.shape[0], n_heads, x.shape[1], -1)


def split_interleaved(x: Tensor, n_heads: int) -> Tensor:
    return x.unflatten(-1, (-1, n_heads)).permute(0, 3, 1, 2)


def reshape_together(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[2], -1)


def not_swapped(x: Tensor, n_heads: int) -> Tensor:
    return x.unflatten(-1, (n_heads, -1))


def as_one_head(x: Tensor, n_heads: int) -> Tensor:
    return x[:, None]


def cases() -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]]:
    def case(batch: int, length: int, width: int, n_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        w_q, w_k, w_v, w_o = (drawn(width, width, seed=seed) / math.sqrt(width) for seed in range(4))
        return drawn(batch, length, width, seed=5), w_q, w_k, w_v, w_o, n_heads

    return {
        "one head": case(2, 5, 7, 1),
        "three heads": case(2, 5, 21, 3),
        "as many heads as columns": case(1, 3, 7, 7),
    }


EXERCISE = Exercise(
    stub=multi_head,
    answer=answer,
    reference=reference,
    cases=cases,
    mistakes=(
        Mistake(
            "you reshape (B, T, D) to (B, H, T, E) directly: that mixes tokens and heads. Split the last axis to (H, E), "
            "then swap T and H",
            variant(reshape_apart),
        ),
        Mistake(
            "you reshape directly both ways, (B, T, D) to (B, H, T, E) and back: that mixes tokens and heads. Swap T and H "
            "in between",
            variant(reshape_apart, reshape_together),
        ),
        Mistake(
            "heads are merged without swapping H and T back first: tokens get mixed", variant(merge=reshape_together)
        ),
        Mistake(
            "head h takes every n_heads-th column; it has E columns side by side: split the last axis to (H, E), not (E, H)",
            variant(split_interleaved),
        ),
        Mistake(
            "T and H are not swapped: the heads of one token attend to each other. Bring (B, T, H, E) to (B, H, T, E)",
            variant(not_swapped, lambda x: x.flatten(2)),
        ),
        Mistake("the scores are not scaled: divide them by sqrt(E)", variant(width=lambda D, E: 1)),
        Mistake("the scores are divided by sqrt(D); each head has the width E", variant(width=lambda D, E: D)),
        Mistake("there is one head over all columns; n_heads does nothing", variant(as_one_head, lambda x: x[:, 0])),
        Mistake("the output projection w_o is missing", variant(projected=False)),
        Mistake("weights are used as x W; they are laid out (out, in), so x W^T is meant", variant(transposed=True)),
    ),
    hints=(
        "x @ w_q.T has shape (B, T, D). .unflatten(-1, (n_heads, -1)) splits it to (B, T, H, E).",
        ".transpose(1, 2) brings the heads before the tokens: (B, H, T, E), as attention takes them.",
        "Back: .transpose(1, 2).flatten(2), then @ w_o.T.",
    ),
    proves="heads are split, attend alone, and are merged in their order",
    sources=(MultiHeadAttention,),
)
