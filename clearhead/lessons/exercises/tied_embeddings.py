"""Exercise tied_embeddings: one table at both ends of a model."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.layers.embedding import TokenEmbedding, TokenHead
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn, drawn_ids

Stack = Callable[[Tensor], Tensor]


def tied_embeddings(
    tokens: Int[Tensor, "B T"], table: Float[Tensor, "V D"], stack: Callable[[Tensor], Tensor]
) -> Float[Tensor, "B T V"]:
    """From token ids to logits, with one table at both ends (section 3.4 of the paper).

    Equation: x = table[tokens] * sqrt(D),  y = stack(x),  logits = y table^T. `stack` keeps the shape (B, T, D).

    The law: these logits; and the table's gradient is the sum of what its two uses send.
    """
    raise NotImplementedError("look the rows of the table up with table[tokens]")


def answer(tokens: Tensor, table: Tensor, stack: Stack) -> Tensor:
    V, D = table.shape
    embedding, head = TokenEmbedding(V, D, scale=True), TokenHead(d_model=D, vocab_size=V, tied=True)
    x = torch.func.functional_call(embedding, {"weight": table}, (tokens,))
    return head(stack(x), table)


def reference(tokens: Tensor, table: Tensor, stack: Stack) -> tuple[Tensor, Tensor]:
    """With one-hot rows, in float64."""

    def logits(table: Tensor) -> Tensor:
        chosen = torch.eye(len(table)).double()[tokens]
        y = stack((chosen @ table * table.shape[1] ** 0.5).float()).double()
        return torch.einsum("btd,vd->btv", y, table)

    return observe(lambda _tokens, table, _stack: logits(table), tokens, table.double(), stack)


def observe(function: Function, tokens: Tensor, table: Tensor, stack: Stack) -> tuple[Tensor, Tensor]:
    """The logits, and the gradient of the sum of their squares."""
    leaf = table.detach().clone().requires_grad_()
    logits = function(tokens, leaf, stack)
    (gradient,) = torch.autograd.grad(logits.square().sum(), leaf, allow_unused=True, materialize_grads=True)
    return logits.detach(), gradient


def variant(scale: float | None = None, *, after: float = 1.0, look: bool = True, project: bool = True) -> Function:
    def function(tokens: Tensor, table: Tensor, stack: Stack) -> Tensor:
        D = table.shape[1]
        x = (table if look else table.detach())[tokens] * (math.sqrt(D) if scale is None else D**scale)
        return stack(x) @ (table if project else table.detach()).T * D**after / D

    return function


def cases() -> dict[str, tuple[Tensor, Tensor, Stack]]:
    mix = drawn(7, 7, seed=3)
    return {
        "a stack that changes nothing": (drawn_ids(2, 5, below=11), drawn(11, 7, seed=1), lambda x: x),
        "a stack that mixes": (drawn_ids(3, 2, below=11, seed=4), drawn(11, 7, seed=5), lambda x: torch.tanh(x @ mix)),
    }


EXERCISE = Exercise(
    stub=tied_embeddings,
    answer=answer,
    reference=reference,
    observe=observe,
    cases=cases,
    mistakes=(
        Mistake("the embeddings are not multiplied by sqrt(D)", variant(0.0)),
        Mistake("the embeddings are multiplied by D, not by sqrt(D)", variant(1.0)),
        Mistake("the embeddings are divided by sqrt(D); the paper multiplies", variant(-0.5)),
        Mistake(
            "sqrt(D) multiplies what comes out of the stack; it multiplies what goes in",
            lambda tokens, table, stack: stack(table[tokens]) * math.sqrt(table.shape[1]) @ table.T,
        ),
        Mistake("the logits are multiplied by sqrt(D), too; only the embeddings are", variant(after=1.5)),
        Mistake(
            "the logits are right, but the table is not trained as a head: its second use is detached or a copy",
            variant(project=False),
        ),
        Mistake(
            "the logits are right, but the table is not trained as an embedding: its first use is detached or a copy",
            variant(look=False),
        ),
    ),
    hints=(
        "table[tokens] has shape (B, T, D): each id is replaced by its row.",
        "math.sqrt(table.shape[1]) is the factor of the embeddings.",
        "The head is a product with the same tensor: stack(x) @ table.T. No copy, no .data, no .detach().",
    ),
    proves="one table enters and leaves, scaled as in the paper, and learns from both uses",
    sources=(TokenEmbedding, TokenHead),
)
