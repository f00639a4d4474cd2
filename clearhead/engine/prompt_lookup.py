"""Prompt lookup: where the last tokens of a text occurred before, in the prompt or in the text, what followed is the draft.

Such drafts need no second model (Saxena 2023, "Prompt Lookup Decoding"). They are often right where a text edits or quotes another.
"""

from __future__ import annotations

from collections.abc import Iterable

NGRAMS = 3, 2  # tokens that must have occurred before, the most telling first
LONGEST = 8  # matches of so many tokens or more are counted together
# How often the token after a match of 0, 1 ... LONGEST tokens is right, before any was seen.
FIRST_RATES = 0.0, 0.0, 0.43, 0.54, 0.62, 0.69, 0.75, 0.79, 0.82
MEMORY = 8  # predictions: the weight of older ones falls by 1 / MEMORY with each new one
# A row more takes a tenth (float32) to a sixth (4 bits) of a decode step with one row.
WORTH = 0.4  # draft a token if it is at least as likely as this to be accepted


class PromptLookup:
    """Drafts for one text. Each prediction is compared with the token that came, drafted or not.

    So its rates follow the text, and where nothing repeats as before, nothing is drafted.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}  # how many tokens there were when an n-gram last ended
        self.at = self.matched = 0  # the last `matched` tokens are also those before `at`, up to LONGEST
        self.rates = list(FIRST_RATES)
        self.extend(prompt)

    def extend(self, new: Iterable[int]) -> None:
        """Append tokens of the prompt or of the text."""
        tokens, ends = self.tokens, self.ends
        for token in new:
            if self.matched:
                is_right = tokens[self.at] == token
                self.rates[self.matched] += (is_right - self.rates[self.matched]) / MEMORY
                self.matched = min(self.matched + 1, LONGEST) if is_right else 0
                self.at += 1
            tokens.append(token)
            for n in NGRAMS:
                ngram = tuple(tokens[-n:])
                if self.matched < n and ngram in ends:
                    self.at, self.matched = ends[ngram], n
                if len(tokens) >= n:
                    ends[ngram] = len(tokens)

    def draft(self, most: int) -> list[int]:
        """The tokens that may come next, at most so many: as long as all of them together are likely enough."""
        found: list[int] = []
        chance, n = 1.0, len(self.tokens)
        for place in range(most):
            chance *= self.rates[min(self.matched + place, LONGEST)]
            if not self.matched or chance < WORTH:
                break
            at = self.at + place
            found.append(self.tokens[at] if at < n else found[at - n])  # a text that repeats itself
        return found
