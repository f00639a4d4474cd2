"""Special tokens in what users wrote: a text that spells one must not end a turn or begin another one's."""

from __future__ import annotations

from typing import Literal
from weakref import WeakKeyDictionary

from clearhead.data import Tokenizer
from clearhead.errors import InputError

SPLIT = "\u200b"  # a zero-width space inside a token's name: a reader sees the same text, a tokenizer another one

_CONTROLS: WeakKeyDictionary[Tokenizer, dict[str, int]] = WeakKeyDictionary()


def control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens, and added ones that are not flagged as special but stand in the chat template: names and ids."""
    if tokenizer not in _CONTROLS:
        added = {token.content: id for id, token in tokenizer.core.get_added_tokens_decoder().items()}
        template, special = tokenizer.chat_template or "", {tokenizer.token(id): id for id in tokenizer.special_ids}
        words = {name: id for name, id in added.items() if name.strip() and not name.isalnum() and name in template}
        _CONTROLS[tokenizer] = {**special, **words}
    return _CONTROLS[tokenizer]


def find_control(tokenizer: Tokenizer, text: str) -> str | None:
    """A control token that the tokenizer reads in a text. Normalisation may make one of other letters, such as full-width ones."""
    tokens = control_tokens(tokenizer)
    if (found := next((token for token in tokens if token in text), None)) is not None:
        return found
    names = {id: token for token, id in tokens.items()}
    added = tokenizer.core.get_added_tokens_decoder()
    if not any(added[id].normalized for id in names if id in added):  # these are found in the text as it was written
        return None
    return next((names[id] for id in tokenizer.encode(text, special=False) if id in names), None)


def as_text(tokenizer: Tokenizer, text: str, what: str) -> str:
    """The text with the names of control tokens split. InputError if the tokenizer reads one all the same."""
    for token in control_tokens(tokenizer):
        if token in text:
            text = text.replace(token, token[:1] + SPLIT + token[1:])
    if (found := find_control(tokenizer, text)) is not None:
        raise InputError(
            f"{what} holds what this model's tokenizer reads as the special token {found!r}, in other letters; got "
            f"{text!r:.60}; leave it out"
        )
    return text


def check_prompt(tokenizer: Tokenizer, text: str, reading: Literal["read", "text"] | None) -> str:
    """The prompt of a completion, its special tokens read or split as `special_tokens` says. InputError if nobody said."""
    if reading == "read":
        return text
    if reading == "text":
        return as_text(tokenizer, text, "the prompt")
    if (found := find_control(tokenizer, text)) is not None:
        raise InputError(
            f"the prompt holds the special token {found!r}, which may be meant as one or be a user's text; got {text!r:.60}; "
            f"set special_tokens to 'read' or to 'text', or send ids"
        )
    return text
