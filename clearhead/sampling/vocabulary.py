"""A tokenizer's tokens as the bytes that they add to a text, in the form that llguidance takes."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from clearhead.data.isolated_process import HandlerError, IsolatedError, IsolatedProcesses
from clearhead.data.tokenizer import BYTE_PIECE, Tokenizer
from clearhead.data.tokenizer_parts import byte_alphabet
from clearhead.errors import InputError, MissingExtraError
from clearhead.sampling import grammar_trial
from clearhead.sampling.grammar_trial import Words

SECONDS, MEGABYTES = 3.0, 64  # to compile a stranger's schema; the usual ones take milliseconds and a few megabytes
MAX_TRIED = 10_000  # schemas that are remembered
# Decoders under which a token has the same bytes at every place, except for a space at the start of a text.
_LOCAL = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"}
# The bytes of all characters beyond ASCII, except for Unicode planes that are empty or private.
_BEYOND_ASCII = {*range(0x80, 0xC0), *range(0xC2, 0xF1)}
_ASCII = {"\t", "\n", "\r", *map(chr, range(0x20, 0x7F))}


class Vocabulary:
    """A tokenizer's tokens as bytes, in llguidance's structure, and which texts they can spell."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        lib = library()
        tokens, self.loses_space = spell(tokenizer)
        self.has_beyond_ascii = _BEYOND_ASCII.issubset(token[0] for token in tokens if len(token) == 1)
        if not self.has_beyond_ascii:
            # A part of a character must not be generated if no token can complete it.
            tokens = [token if _as_text(token) is not None else b"" for token in tokens]
        texts = {text for token in tokens if (text := _as_text(token))}
        alone = {text for text in texts if len(text) == 1}
        self._pieces = sorted(text for text in texts if any(c not in alone and not self._is_beyond(c) for c in text))
        self._chars = alone.union(*self._pieces)
        self._alone = sorted(c for c in alone if not self._is_beyond(c))

        self.size = len(tokens)
        self.handle = lib.LLTokenizer(lib.TokenizerWrapper(Words(tokens)))
        self._tokens, self._tried = tokens, dict[bytes, None]()

    def _is_beyond(self, char: str) -> bool:
        return self.has_beyond_ascii and char > "\x7f"

    def lacks(self, text: str) -> str:
        """The first character of a text that no token contains, or ""."""
        return next((c for c in text if c not in self._chars and not self._is_beyond(c)), "")

    def check(self, text: str, what: str) -> None:
        """InputError if `what` requires a text that the tokens can not spell."""
        if lacking := self.lacks(text):
            raise InputError(
                f"{what} asks for {text!r:.100}, but no token of this vocabulary of {self.size} has {lacking!r}; "
                "spell it without"
            )

    def escapes(self) -> str:
        """The letters that may follow a backslash in JSON: those whose escapes the tokens can complete."""
        return "".join(c for c in 'nrbtf\\"u' if not self.lacks(c + "0123456789abcdefABCDEF" * (c == "u")))

    @cached_property
    def _trials(self) -> IsolatedProcesses:
        first = {"tokens": [token.hex() for token in self._tokens]}
        return IsolatedProcesses(Path(grammar_trial.__file__), seconds=SECONDS, megabytes=MEGABYTES, n=2, first=first)

    def try_schema(self, schema: str, what: str) -> None:
        """Compile a schema in a process apart; InputError if that takes too long, too much memory, or ends the process.

        For schemas of strangers. One that passed is not tried again.
        """
        key = hashlib.sha256(schema.encode()).digest()
        if key in self._tried:
            return
        try:
            self._trials.call({"schema": schema})
        except (IsolatedError, HandlerError) as error:
            raise InputError(f"{what} is too costly: to compile it {error}; simplify it") from None
        if len(self._tried) >= MAX_TRIED:
            self._tried.clear()
        self._tried[key] = None

    def rules(self, terminal: str) -> str:
        """A grammar for `terminal`, limited to texts that the tokens can spell; allows for the space that decoding removes."""
        if self.loses_space:
            terminal = f'(" " {terminal} | ({terminal} & /([^ ](?s:.)*)?/))'
        if not (self.has_beyond_ascii and _ASCII.issubset(self._alone)):
            some = "".join(map(literal, self._alone)) + (r"\x{80}-\x{10ffff}" if self.has_beyond_ascii else "")
            parts = [*([f"[{some}]"] if some else []), *map(literal, self._pieces)]
            terminal = f"{terminal} & /({'|'.join(parts)})*/"
        return f"start: TEXT\nTEXT: {terminal}"


_VOCABULARIES: WeakKeyDictionary[Tokenizer, Vocabulary] = WeakKeyDictionary()


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Built once for each tokenizer: for 50,000 tokens that takes a third of a second."""
    if tokenizer not in _VOCABULARIES:
        _VOCABULARIES[tokenizer] = Vocabulary(tokenizer)
    return _VOCABULARIES[tokenizer]


def spell(tokenizer: Tokenizer) -> tuple[list[bytes], bool]:
    """Each id's bytes inside a text, b"" for ids without text; and whether decoding removes a space at the start of a text."""
    decoder: Any = tokenizer.target_core.decoder
    kinds: set[str] = _kinds(json.loads(decoder.__getstate__())) if decoder else set()
    if decoder is None or not kinds <= _LOCAL:
        raise InputError(
            f"this tokenizer joins tokens by rules that depend on their neighbours (decoder: {', '.join(kinds) or 'none'}), so "
            "its output cannot be constrained; use a model with byte-level, SentencePiece or character tokens"
        )
    tokens = [b""] * tokenizer.vocab_size
    letters = {letter: byte for byte, letter in enumerate(byte_alphabet())}
    trims, shifted = bool(kinds & {"Metaspace", "Strip"}), dict[int, bool]()
    for name, id in tokenizer.vocab.items():
        if id in tokenizer.special_ids:
            continue
        if "ByteLevel" in kinds and all(letter in letters for letter in name):
            tokens[id] = bytes(letters[letter] for letter in name)
        elif "ByteFallback" in kinds and BYTE_PIECE.fullmatch(name):
            tokens[id] = bytes([int(name[3:5], 16)])
        else:
            tokens[id] = decoder.decode(["a", name]).removeprefix("a").encode()
        if trims and (spaces := len(tokens[id]) - len(tokens[id].lstrip(b" "))):
            shifted[id] = not decoder.decode([name, "a"]).startswith(" " * spaces)
    loses_space = any(shifted.values())
    for id, is_shifted in shifted.items():
        if is_shifted != loses_space:  # a space written in another way than the vocabulary's own sign
            tokens[id] = b""
    return tokens, loses_space


def _kinds(decoder: Any) -> set[str]:
    return {decoder["type"]}.union(*map(_kinds, decoder.get("decoders", [])))


def _as_text(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None


def literal(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join(f"\\x{{{ord(char):x}}}" for char in text)


def library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtraError(
            "constrained output needs llguidance, which is missing; pip install 'clearhead[constrain]'"
        ) from None
    return llguidance
