"""All errors that a user can cause. Each message has three parts: what is wrong, the values received, what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ClearheadError(Exception):
    """The base class of all errors here."""


class ConfigError(ClearheadError):
    """A config, preset or recipe that is invalid."""


class InputError(ClearheadError):
    """Tokens, masks, texts, files or options that can not be used."""


class CheckpointError(ClearheadError):
    """A checkpoint or tokenizer file that is broken, incomplete or not supported."""


class MissingExtraError(ClearheadError):
    """An optional dependency that is not installed. The message has the command that installs it."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The end of an error message: the nearest valid choice, or the choices, at most 20, if none is near."""
    choices = sorted(choices)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    more = f" ... ({len(choices)} in all)" if len(choices) > 20 else ""
    return f"choose one of: {', '.join(choices[:20])}{more}"
