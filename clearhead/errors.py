"""Every error a user can cause. Each message has three parts: what is wrong, the values received, what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ClearheadError(Exception):
    """The root of the tree: catch this to catch everything below."""


class ConfigError(ClearheadError):
    """A config, preset or recipe that can not be built."""


class InputError(ClearheadError):
    """Tokens, masks, prompts or texts that a model can not take."""


class CheckpointError(ClearheadError):
    """A file of weights that is broken, incomplete or not what it says."""


class MissingExtraError(ClearheadError):
    """A feature whose optional dependency is not installed; the message holds the command that installs it."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The end of an error message: the nearest valid choice, or what there is where none is near."""
    choices = sorted(choices)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"choose one of: {', '.join(choices[:60])}"
