"""A JSON schema, compiled to see whether that ends: the handler of a process apart (isolated_process.py). Imports nothing of ours.

llguidance has limits for matching, but not for all of its compiling: an intersection of two regular expressions, or a large
`multipleOf`, takes minutes and gigabytes; deep references overflow the stack, which no exception announces.
"""

from __future__ import annotations

from typing import Any

_tokenizer: Any = None


class Words:
    """The tokenizer interface of llguidance. Its end token is an extra one after all others, which no model has."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = [*tokens, b"<end>"], len(tokens), [len(tokens)]

    def __call__(self, text: str | bytes) -> list[int]:
        return []  # used only to force tokens, which our grammars turn off


def answer(request: dict[str, Any]) -> None:
    """Take the vocabulary's tokens, in hexadecimal digits; after that, compile a `schema` and compute its first mask."""
    global _tokenizer
    import llguidance as library

    if "tokens" in request:
        words: Any = Words([bytes.fromhex(token) for token in request["tokens"]])
        _tokenizer = library.LLTokenizer(library.TokenizerWrapper(words))
        return
    grammar = library.LLMatcher.grammar_from_json_schema(request["schema"])
    limits = library.LLParserLimits(verbose_errors=False)
    matcher = library.LLMatcher(_tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():  # an error is the caller's to find, and to word
        matcher.compute_bitmask()
