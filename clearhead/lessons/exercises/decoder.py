"""Exercise decoder: a whole GPT, which learns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.families import preset
from clearhead.laws.forward_laws import find_leak
from clearhead.lessons.exercise import Exercise, Function, drawn_ids
from clearhead.models import Decoder, build
from clearhead.models.stack import Stack

SIZES = dict(vocab_size=17, d_model=32, n_layers=2, n_heads=2, d_ff=64, max_len=24)
PERIOD, LENGTH = 6, 24
STEPS, GOAL = 150, 0.1


def decoder(vocab_size: int, d_model: int, n_layers: int, n_heads: int, d_ff: int, max_len: int) -> nn.Module:
    """Build a decoder: an nn.Module whose call `model(tokens)` takes ids (B, T) and returns logits (B, T, V) for the next token.

    Tokens to vectors, positions, n_layers blocks of causal self-attention and feed-forward, a last norm (if the blocks are
    pre-norm), and a product to the vocabulary. Which positions, norms and activation is up to you. You may import what you wrote
    before: from block import block. Write your classes above this function.

    The laws: no token changes a logit before it, by one bit; the order of tokens matters; every parameter gets a gradient; each
    layer has weights of its own; the first loss is about log V; and 150 steps of AdamW (lr 0.003) teach it to continue random
    tokens that repeat every 6, to a loss below 0.1. Guessing has log 17 = 2.83.
    """
    raise NotImplementedError("write a class that is an nn.Module, and return one of it")


def answer(vocab_size: int, d_model: int, n_layers: int, n_heads: int, d_ff: int, max_len: int) -> nn.Module:
    sizes = dict(vocab_size=vocab_size, d_model=d_model, n_layers=n_layers, n_heads=n_heads, d_ff=d_ff, max_len=max_len)
    return build(preset("gpt2", **sizes, dropout=0.0, attention_dropout=0.0))


def made(function: Function, **changes: int) -> nn.Module:
    torch.manual_seed(0)
    model = function(**(SIZES | changes))
    if not isinstance(model, nn.Module):
        raise TypeError(f"decoder() returned {type(model).__name__}; return an nn.Module")
    return model.eval()


def repeating(rows: int, seed: int) -> Tensor:
    """Rows of random tokens that repeat every PERIOD."""
    return drawn_ids(rows, PERIOD, below=SIZES["vocab_size"], seed=seed).repeat(1, LENGTH // PERIOD)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of the tokens that can be known: those after the first period."""
    logits = model(tokens[:, :-1])[:, PERIOD - 1 :]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, PERIOD:].flatten())


def has_logits(function: Function) -> str | None:
    model, tokens = made(function), drawn_ids(3, 7, below=17)
    logits: Any = model(tokens)
    found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if found != (3, 7, 17):
        return f"ids of shape (3, 7) give {found}; expected logits (3, 7, 17)"
    if bool(logits.isnan().any()):
        return "logits are NaN: a row of scores that are all -inf, or a token that does not see itself"
    if bool((logits >= 0).all()) and torch.allclose(logits.sum(-1), torch.ones(3, 7)):
        return "these are probabilities; return the logits, before the softmax: the loss takes it"
    if not torch.equal(logits, model(tokens)):
        return "after model.eval() the same ids give other logits each time: F.dropout needs training=self.training"
    return None


@torch.no_grad()
def sees_no_future(function: Function) -> str | None:
    model = made(function)
    leak, unread = find_leak(model, drawn_ids(3, 11, below=17, seed=1), 17)
    if unread is not None:
        return f"another token at position {unread} does not change the logits there: the model does not read its own input"
    if leak:
        return (
            f"the future leaks: tokens change logits before them by up to {leak:.2g} of the largest. Is there a mask, before "
            "the softmax, and does each token see itself and none after it?"
        )
    return None


@torch.no_grad()
def knows_order(function: Function) -> str | None:
    """Of one layer: with two, a causal mask alone lets order through. With larger weights, too: small ones in a post-norm layer
    change the logits by no more than rounding does."""
    model, tokens = made(function, n_layers=1), torch.tensor([[3, 9, 5, 11, 2]])
    swapped, changes = tokens[:, [1, 0, 2, 3, 4]], list[float]()
    for _ in range(2):
        logits = model(tokens)[0, -1]
        changes.append(float((logits - model(swapped)[0, -1]).abs().max() / logits.abs().max()))
        for weight in model.parameters():
            weight.mul_(10 if weight.ndim > 1 else 1)
    if max(changes) < 1e-5:
        return f"there are no positions: with tokens 0 and 1 swapped the last logits of one layer differ by only {max(changes):.1g}"
    return None


def trains_everything(function: Function) -> str | None:
    model = made(function)
    loss_of(model, repeating(4, seed=2)).backward()
    idle = [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and (weight.grad is None or not bool(weight.grad.any()))
    ]
    if not list(model.parameters()):
        return "the model has no parameters: keep layers in nn.ModuleList, not in a plain list"
    return (
        f"no gradient reaches {', '.join(idle[:3])}{' ...' if len(idle) > 3 else ''}: it is not used" if idle else None
    )


def grows_by_layers(function: Function) -> str | None:
    one, two, three = (sum(p.numel() for p in made(function, n_layers=n).parameters()) for n in (1, 2, 3))
    if two == one:
        return (
            f"one layer and two have the same {one:,} parameters: all layers are one and the same module, or stand in a plain "
            "list. Make each anew, in nn.ModuleList"
        )
    return (
        None
        if three - two == two - one
        else f"layers differ in size: {one:,}, {two:,}, {three:,} parameters for 1, 2, 3"
    )


@torch.no_grad()
def starts_at_chance(function: Function) -> str | None:
    loss, chance = float(loss_of(made(function), repeating(16, seed=3))), math.log(17)
    if loss > 1.5 * chance:
        return (
            f"the first loss is {loss:.2f}; guessing has log 17 = {chance:.2f}. The first weights are too large: embeddings of "
            "std 1, times a tied head, or a missing last norm"
        )
    return None


def learns(function: Function) -> str | None:
    model = made(function).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        loss = loss_of(model, repeating(32, seed=100 + step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        loss = float(loss_of(model.eval(), repeating(64, seed=99)))
    return (
        None
        if loss < GOAL
        else f"after {STEPS} steps the loss is {loss:.3f}, not below {GOAL}; it has not learnt to look back. Are embeddings and "
        "positions of about the same size at first? Of a sum of both, the smaller one is lost"
    )


LAWS: dict[str, Callable[[Function], str | None]] = {
    "ids in, logits out": has_logits,
    "no future token changes a past logit": sees_no_future,
    "the order of tokens matters": knows_order,
    "every parameter gets a gradient": trains_everything,
    "each layer has weights of its own": grows_by_layers,
    "the first loss is about log V": starts_at_chance,
    f"{STEPS} steps reach a loss below {GOAL}": learns,
}

EXERCISE = Exercise(
    stub=decoder,
    answer=answer,
    laws=LAWS,
    hints=(
        "Parts: nn.Embedding(vocab_size, d_model) for tokens, another of max_len for positions, nn.ModuleList of blocks, "
        "nn.LayerNorm, nn.Linear(d_model, vocab_size).",
        "A block: x = x + attention(norm_1(x)); x = x + feed_forward(norm_2(x)). Hide the future: torch.ones(T, T).tril().",
        "Set weights small at the start: nn.init.normal_(parameter, std=0.02) for every matrix. Embeddings so small are lost in a "
        "sum with sinusoids: multiply them by math.sqrt(d_model) first. Post-norm learns faster from nn.Linear's own weights.",
        "If it does not learn: overfit one batch first, and look whether the loss falls below 2.83 at all.",
    ),
    proves="a whole decoder: it sees no future, uses all its weights, and learns to look back",
    sources=(Decoder, Stack),
)
