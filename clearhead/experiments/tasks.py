"""Data that is made: small tasks of which the answer is known, and how far back it stands."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.experiments.fitting import IGNORED, Batch, Batches


def draw(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator)


def distinct(generator: torch.Generator, rows: int, vocab: int, n: int) -> Tensor:
    """In each row n different tokens."""
    return torch.rand(rows, vocab, generator=generator).argsort(-1)[:, :n]


def back(tokens: Tensor, n: int) -> Tensor:
    """The tokens n places earlier; IGNORED where there is none."""
    return F.pad(tokens[:, : tokens.shape[1] - n], (n, 0), value=IGNORED)


def looking_back(n: int, *, rows: int, length: int, vocab: int, first: int = 0) -> Batches:
    """At each place from `first` on: which token stood n places before?"""

    def batches(generator: torch.Generator) -> Batch:
        tokens = draw(generator, 0, vocab, rows, length)
        targets = back(tokens, n)
        targets[:, :first] = IGNORED
        return (tokens,), targets

    return batches


def two_back(near: int, far: int, *, rows: int, length: int, vocab: int) -> Batches:
    """At each place, which two tokens stood `near` and `far` places before? The answer is their ordered pair, one of vocab^2."""

    def batches(generator: torch.Generator) -> Batch:
        tokens = draw(generator, 0, vocab, rows, length)
        pairs = back(tokens, near) * vocab + back(tokens, far)
        return (tokens,), torch.where(pairs < 0, IGNORED, pairs)

    return batches


def repetition(*, rows: int, length: int, vocab: int) -> Batches:
    """Different random tokens, then the same again after a period that varies by row: what comes next?"""

    def batches(generator: torch.Generator) -> Batch:
        period = draw(generator, length // 4, length // 2 + 1, rows, 1)
        at = torch.arange(length)
        tokens = distinct(generator, rows, vocab, length // 2).gather(1, at % period)
        targets = torch.where(at + 1 < length, tokens.roll(-1, 1), IGNORED)
        return (tokens,), torch.where(at + 1 >= period, targets, IGNORED)

    return batches


def brackets(*, rows: int, length: int, kinds: int) -> Batches:
    """Nested brackets of several kinds. Token 2k opens kind k, 2k + 1 closes it; asked for is each bracket that closes."""

    def batches(generator: torch.Generator) -> Batch:
        tokens = torch.zeros(rows, length + 1, dtype=torch.int64)
        opens = torch.rand(rows, length + 1, generator=generator) < 0.5
        kind = draw(generator, 0, kinds, rows, length + 1)
        for row in range(rows):
            stack: list[int] = []
            for at in range(length + 1):
                if not stack or (bool(opens[row, at]) and len(stack) < 6):
                    stack.append(int(kind[row, at]))
                    tokens[row, at] = 2 * stack[-1]
                else:
                    tokens[row, at] = 2 * stack.pop() + 1
        following = tokens[:, 1:]
        return (tokens[:, :-1],), torch.where(following % 2 == 1, following, IGNORED)

    return batches


def partners(tokens: Tensor) -> Tensor:
    """For each place the place of the innermost bracket that is still open after it; -1 if none is: what a bracket that closes
    next must match."""
    found = torch.full_like(tokens, -1)
    for row in range(len(tokens)):
        stack: list[int] = []
        for at, token in enumerate(tokens[row].tolist()):
            if token % 2:
                stack.pop()
            else:
                stack.append(at)
            found[row, at] = stack[-1] if stack else -1
    return found


def recall(*, rows: int, length: int, vocab: int, pairs: int = 4) -> Batches:
    """Keys with values at random places in noise; at the end one key comes again: which value stood behind it?

    Tokens: 0 noise, then keys, then values. The distance from question to answer is up to the length.
    """

    def batches(generator: torch.Generator) -> Batch:
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        slots = distinct(generator, rows, (length - 1) // 2, pairs) * 2
        keys = 1 + distinct(generator, rows, vocab, pairs)
        values = 1 + vocab + draw(generator, 0, vocab, rows, pairs)
        tokens.scatter_(1, slots, keys).scatter_(1, slots + 1, values)
        asked = draw(generator, 0, pairs, rows, 1)
        tokens[:, -1:] = keys.gather(1, asked)
        targets = torch.full_like(tokens, IGNORED)
        targets[:, -1:] = values.gather(1, asked)
        return (tokens,), targets

    return batches


def copying(*, rows: int, length: int, vocab: int, n: int = 5) -> Batches:
    """The first n tokens again, after noise up to the length: token 0 is noise, vocab + 1 says "now" (as Hochreiter, Arjovsky)."""

    def batches(generator: torch.Generator) -> Batch:
        first = draw(generator, 1, vocab + 1, rows, n)
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        tokens[:, :n] = first
        tokens[:, -n:] = vocab + 1
        targets = torch.full_like(tokens, IGNORED)
        targets[:, -n:] = first
        return (tokens,), targets

    return batches
