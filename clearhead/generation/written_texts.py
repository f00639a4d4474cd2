"""Texts that a model wrote, token by token, with its own probabilities: what `write_texts(return_scores=True)` returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clearhead.data.tokenizer import Tokenizer
from clearhead.display import html_shaded
from clearhead.engine.request import Token


@dataclass(frozen=True)
class WrittenToken:
    """A token as text, its probability, and the likeliest tokens in its place with theirs, if asked for."""

    name: str
    probability: float
    alternatives: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class WrittenText:
    """A prompt and its continuation. In a notebook, each token's ground shows its probability, and the pointer the alternatives.

    A token may be part of a character; `text` is exact.
    """

    prompt: str
    text: str
    tokens: tuple[WrittenToken, ...]

    def __str__(self) -> str:
        return self.prompt + self.text

    def _repr_html_(self) -> str:
        parts = [(token.name, token.probability, describe(token)) for token in self.tokens]
        return html_shaded([(self.prompt, None, "the prompt"), *parts])


class WrittenTexts(list[WrittenText]):
    """Several of them."""

    def _repr_html_(self) -> str:
        return "<hr>".join(text._repr_html_() for text in self)  # pyright: ignore[reportPrivateUsage] - its own kind


def describe(token: WrittenToken) -> str:
    """A token's probability and its alternatives, in one line."""
    others = [f"{name!r} {share:.1%}" for name, share in token.alternatives if name != token.name]
    return f"{token.probability:.1%}" + (f"; instead: {', '.join(others)}" if others else "")


def make_written(prompt: str, text: str, tokens: Sequence[Token], tokenizer: Tokenizer) -> WrittenText:
    named = (
        WrittenToken(
            tokenizer.name(token.id),
            math.exp(token.score),
            tuple((tokenizer.name(id), math.exp(score)) for id, score in token.alternatives),
        )
        for token in tokens
    )
    return WrittenText(prompt, text, tuple(named))
