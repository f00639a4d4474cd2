"""Text that must match: a regular expression, a JSON schema or one of a list of choices, whatever the model would rather say.

The matching is llguidance's, over the vocabulary that vocabularies.py makes ready for it. A grammar speaks of
`tokenizer.decode` of the new ids, as one whole text.
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
from clearhead.sampling.json_schema import is_endless, spelled_texts
from clearhead.sampling.vocabulary import library, literal, vocabulary_of

Schema = Mapping[str, Any] | bool | str

# Any spelling of a text may be chosen, not only the one that the tokenizer itself would give.
_HEAD = '%llguidance {"no_forcing": true}\n'
# Room for deep indentation. Without a limit a small model can fill its whole context with line breaks.
_SPACES = r"[ \t\r\n]{1,64}"
_STUCK = "the vocabulary has no token for what must come next"


class Grammar:
    """What a text must match, made ready for one tokenizer's vocabulary; shared by many texts.

    `vocab_size` is the model's, where it has more rows than the tokenizer has tokens; `ends` are the ids that end a text,
    the tokenizer's eos where none are given.
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
        lib = library()
        check = lib.LLMatcher(vocabulary_of(tokenizer).handle, lib.LLMatcher.grammar_from_regex(pattern), log_level=0)
        if check.is_error():
            raise InputError(f"{what} does not compile: {_reason(check)}; correct it")
        rules = vocabulary_of(tokenizer).rules(f"/{lib.regex_to_lark(pattern or '(?:)', 'd')}/")  # // is a comment
        return cls(rules, what, tokenizer, vocab_size, ends)

    @classmethod
    def json_schema(
        cls, schema: Schema, tokenizer: Tokenizer, *, vocab_size: int | None = None, ends: Sequence[int] | None = None
    ) -> Grammar:
        """The text is JSON that `schema` (an object, or its JSON) accepts; {} and True accept any JSON.

        Properties come in the schema's order. A key that the schema does not name may come twice.
        """
        what = f"JSON schema {schema if isinstance(schema, str) else str(schema)!s:.200}"
        read: Any = _read_json(schema, what)
        if read is not True and not isinstance(read, dict):
            advice = "false accepts nothing" if read is False else "a schema is an object or true"
            raise InputError(f"{what} describes no text: {advice}; give an object such as {{'type': 'object'}}")
        known = {} if read is True else cast("dict[str, Any]", read)
        vocabulary = vocabulary_of(tokenizer)
        written = {"whitespace_pattern": _SPACES, "json_allowed_escapes": vocabulary.escapes()}
        schema_text = json.dumps({"x-guidance": written, **known})
        lib = library()
        # Asked for alone first: its reason then stands without our rules around it.
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
        # JSON never starts with a space, so the one that decoding takes off is no part of it.
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
        """A text that has not begun."""
        return Constraint(self, self._matcher.deep_copy())


class Constraint:
    """How far one text has come."""

    def __init__(self, grammar: Grammar, matcher: Any) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._seen: tuple[npt.NDArray[np.bool_], bool] | None = None  # what `_look` found, until the next token
        self._has_ended = False

    def allowed(self) -> Bool[Tensor, " V"]:
        """Which tokens may come next, on the CPU; the ends may exactly where the text may stop.

        InputError where none may, which can happen if the vocabulary lacks a character that the grammar asks for.
        """
        return torch.from_numpy(self._look()[0].copy())

    @property
    def is_done(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._look()[1]

    def push(self, token: int) -> None:
        """Goes on by one token; InputError for one that is not allowed, which changes nothing."""
        may = self._look()[0]
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
        """An independent copy, for another text that begins like this one."""
        other = Constraint(self._grammar, self._matcher.deep_copy())
        other._seen, other._has_ended = self._seen, self._has_ended
        return other

    def _look(self) -> tuple[npt.NDArray[np.bool_], bool]:
        """What may come next, and whether that is the end alone.

        In numpy, because torch splits even this little over its threads: 0.1 ms for one `any`, 30 ms on a busy machine.
        """
        if self._seen is None:
            may = np.zeros(self._grammar.vocab_size, dtype=np.bool_)
            has_more = False
            if not self._has_ended:
                bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
                n = min(len(may), self._grammar.n_tokens)  # without the library's own end
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
    """Whether tokens may follow for some steps. Where many may, one will surely do, and no more is looked at."""
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
    """The text, if it is one that can be written."""
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
    """The schema as JSON holds it, from its text or from Python's objects."""
    try:
        return json.loads(schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{what} is not JSON: {error}; give a JSON object, or its text") from error


def _reason(matcher: Any) -> str:
    """The library's own words, on one line, without the excerpt of a grammar that the user has never seen."""
    message = re.split(r"\n +1 \| |\n<non-verbose/>", matcher.get_error())[0]
    for mark in ("(in regex): ", "regex parse error:", "\nerror: ", "failed to compile JSON schema: "):
        message = message.rpartition(mark)[2]
    return " ".join(message.split())
