"""Constrained output: the text must match a regular expression, a JSON schema, or one of several choices.

llguidance does the matching, over the tokens' bytes from vocabulary.py. What must match is `tokenizer.decode` of all new ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool
from torch import Tensor

from clearhead.data.tokenizer import Tokenizer
from clearhead.errors import InputError
from clearhead.sampling.json_schema import check_bounds, check_pattern, is_endless, spelled_texts
from clearhead.sampling.vocabulary import library, literal, vocabulary_of

Schema = Mapping[str, Any] | bool | str

# Any way to spell a text in tokens is allowed, not only the tokenizer's own.
_HEAD = '%llguidance {"no_forcing": true}\n'
# Room for deep indentation. Without a limit a small model can fill its whole context with line breaks.
_SPACES = r"[ \t\r\n]{1,64}"
_STUCK = "the vocabulary has no token for what must come next"


class Grammar:
    """What a text must match, compiled for one tokenizer; many texts may share it.

    `vocab_size` is the model's, which may be larger than the tokenizer's. `ends` are the ids that end a text; without them, the
    tokenizer's eos.
    """

    def __init__(self, rules: str, what: str, tokenizer: Tokenizer, vocab_size: int | None, ends: Sequence[int] | None):
        self.what = what
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.n_tokens = tokenizer.vocab_size
        eos = () if tokenizer.eos is None else (tokenizer.eos,)
        self.ends = list(eos if ends is None else ends)
        if not all(0 <= end < self.vocab_size for end in self.ends):
            raise InputError(
                f"ends={self.ends} are not all ids of a vocabulary of {self.vocab_size}; give the model's own"
            )
        lib = library()
        quiet = lib.LLParserLimits(verbose_errors=False)
        self._matcher = lib.LLMatcher(vocabulary_of(tokenizer).handle, _HEAD + rules, log_level=0, limits=quiet)
        if self._matcher.is_error():
            raise InputError(f"{what} cannot be followed: {_reason(self._matcher)}; simplify it")
        if not _goes_on(self.start(), steps=2):
            raise InputError(
                f"{what} matches no text that this vocabulary of {self.n_tokens} tokens can write; loosen it"
            )

    @classmethod
    def regex(
        cls, pattern: str, tokenizer: Tokenizer, *, vocab_size: int | None = None, ends: Sequence[int] | None = None
    ) -> Grammar:
        r"""The whole text matches `pattern`: Python's syntax without look-around and back-references; \d is 0 to 9."""
        what = f"regex {_text(pattern, 'a regex')!r:.200}"
        check_pattern(pattern, what)
        lib = library()
        check = lib.LLMatcher(vocabulary_of(tokenizer).handle, lib.LLMatcher.grammar_from_regex(pattern), log_level=0)
        if check.is_error():
            raise InputError(f"{what} does not compile: {_reason(check)}; correct it")
        rules = vocabulary_of(tokenizer).rules(f"/{lib.regex_to_lark(pattern or '(?:)', 'd')}/")  # // is a comment
        return cls(rules, what, tokenizer, vocab_size, ends)

    @classmethod
    def json_schema(
        cls,
        schema: Schema,
        tokenizer: Tokenizer,
        *,
        vocab_size: int | None = None,
        ends: Sequence[int] | None = None,
        is_trusted: bool = True,
    ) -> Grammar:
        """The text is JSON that `schema` (an object, or its JSON) accepts; {} and True accept any JSON.

        Properties come in the schema's order. A key that is not in the schema may come twice. A stranger's schema, if not
        `is_trusted`, is compiled in a process apart first.
        """
        what = f"JSON schema {schema if isinstance(schema, str) else str(schema)!s:.200}"
        read: Any = _read_json(schema, what)
        if read is not True and not isinstance(read, dict):
            advice = "false accepts nothing" if read is False else "a schema is an object or true"
            raise InputError(f"{what} describes no text: {advice}; give an object such as {{'type': 'object'}}")
        known = {} if read is True else cast("dict[str, Any]", read)
        check_bounds(known, what)
        vocabulary = vocabulary_of(tokenizer)
        written = {"whitespace_pattern": _SPACES, "json_allowed_escapes": vocabulary.escapes()}
        schema_text = json.dumps({"x-guidance": written, **known})
        if not is_trusted:
            vocabulary.try_schema(schema_text, what)
        lib = library()
        # Compiled alone first: its error message then has none of our own rules in it.
        check = lib.LLMatcher(
            vocabulary.handle,
            lib.LLMatcher.grammar_from_json_schema(schema_text),
            log_level=0,
            limits=lib.LLParserLimits(verbose_errors=False),
        )
        if check.is_error():
            raise InputError(f"{what} cannot be followed: {_reason(check)}; change that part of it")
        for name in spelled_texts(known):
            vocabulary.check(name, what)
        if is_endless(known):
            raise InputError(
                f"{what} describes only values without end: each holds another; make the inner one optional"
            )
        # JSON never starts with a space: the one that decoding removes is not part of it.
        space = '" "? ' if vocabulary.loses_space else ""
        return cls(f"start: {space}json\njson: %json {schema_text}", what, tokenizer, vocab_size, ends)

    @classmethod
    def choice(
        cls,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        *,
        vocab_size: int | None = None,
        ends: Sequence[int] | None = None,
    ) -> Grammar:
        """The text is one of `texts`, exactly."""
        if isinstance(texts, str) or not texts:
            raise InputError(
                f"choices are a list of texts, at least one; got {texts!r:.100}; give such as ['yes', 'no']"
            )
        vocabulary = vocabulary_of(tokenizer)
        for text in texts:
            if not _text(text, "a choice"):
                raise InputError(f"a choice is an empty text, in {list(texts)!r:.200}; leave it out")
            vocabulary.check(text, "a list of choices")
        rules = vocabulary.rules("/" + "|".join(map(literal, dict.fromkeys(texts))) + "/")
        return cls(rules, f"choice of {list(texts)!r:.200}", tokenizer, vocab_size, ends)

    def start(self) -> Constraint:
        """The state of a text without tokens."""
        return Constraint(self, self._matcher.deep_copy())


class Constraint:
    """The state of one text: which tokens may come next."""

    def __init__(self, grammar: Grammar, matcher: Any) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._seen: tuple[npt.NDArray[np.bool_], bool] | None = (
            None  # the result of `_allowed_next`, until the next token
        )
        self._has_ended = False

    def allowed(self) -> Bool[Tensor, " V"]:
        """Which tokens may come next, on the CPU. Ends are allowed exactly where the text may stop.

        InputError if none is allowed: the vocabulary may lack a character that the grammar requires.
        """
        return torch.from_numpy(self._allowed_next()[0].copy())

    @property
    def is_done(self) -> bool:
        """Whether the text is complete: only an end may follow."""
        return self._allowed_next()[1]

    def push(self, token: int) -> None:
        """Append a token; InputError, and no change, if it is not allowed."""
        may = self._allowed_next()[0]
        if not (0 <= token < len(may) and may[token]):
            raise InputError(
                f"token {token} may not come here under {self._grammar.what}; choose one that `allowed` names"
            )
        if token in self._grammar.ends:
            self._has_ended = True
        elif not self._matcher.consume_token(token):
            raise self._failed()
        self._seen = None

    def fork(self) -> Constraint:
        """An independent copy, for another text with the same tokens so far."""
        other = Constraint(self._grammar, self._matcher.deep_copy())
        other._seen, other._has_ended = self._seen, self._has_ended
        return other

    def after(self, tokens: Sequence[int]) -> Constraint:
        """The state after these tokens; InputError if one of them is not allowed."""
        state = self.fork() if tokens else self
        for token in tokens:
            state.push(token)
        return state

    def _allowed_next(self) -> tuple[npt.NDArray[np.bool_], bool]:
        """Which tokens may come next, and whether only an end may.

        In numpy, because torch splits even this little work over its threads: 0.1 ms for one `any`, 30 ms on a busy machine.
        """
        if self._seen is None:
            may = np.zeros(self._grammar.vocab_size, dtype=np.bool_)
            has_more = False
            if not self._has_ended:
                bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
                n = min(len(may), self._grammar.n_tokens)  # without llguidance's own end token
                may[:n] = np.unpackbits(bits, bitorder="little", count=n)
                may[self._grammar.ends] = False
                has_more = bool(may.any())
            may_stop = self._has_ended or self._matcher.is_accepting()
            may[self._grammar.ends] = may_stop
            if self._matcher.is_error() or not (has_more or may_stop):
                raise self._failed()
            self._seen = may, not has_more
        return self._seen

    def _failed(self) -> InputError:
        reason = _reason(self._matcher)
        if not reason or "NoExtension" in reason:  # the library's word for it
            reason = _STUCK
        return InputError(f"a text cannot go on under {self._grammar.what}: {reason}; simplify the grammar")


def _goes_on(state: Constraint, steps: int) -> bool:
    """Whether the text can continue for some steps. With more than 8 allowed tokens, one is assumed to work."""
    try:
        choices = state.allowed().nonzero().flatten().tolist()
    except InputError as error:
        if _STUCK not in str(error):
            raise
        return False
    if state.is_done or steps == 1 or len(choices) > 8:
        return True
    forks = [state.fork() for _ in choices]
    for fork, token in zip(forks, choices, strict=True):
        fork.push(token)
    return any(_goes_on(fork, steps - 1) for fork in forks)


def _text(text: Any, what: str) -> str:
    """The text, if it is a valid str."""
    if not isinstance(text, str):
        raise InputError(f"{what} must be a str, not {type(text).__name__}: {text!r:.60}; write it as text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} is not valid Unicode: {text!r:.60}: {error.reason}; remove the lone surrogate"
        ) from None
    return text


def _read_json(schema: Any, what: str) -> Any:
    """The schema as parsed JSON, from a JSON text or from Python objects."""
    try:
        return json.loads(schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{what} is not JSON: {error}; give a JSON object, or its text") from error


def _reason(matcher: Any) -> str:
    """llguidance's error message on one line, without its excerpt of our generated grammar."""
    message = re.split(r"\n +1 \| |\n<non-verbose/>", matcher.get_error())[0]
    for mark in ("(in regex): ", "regex parse error:", "\nerror: ", "failed to compile JSON schema: "):
        message = message.rpartition(mark)[2]
    return " ".join(message.split())
