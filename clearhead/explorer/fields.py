"""The fields of a request, each checked when it is read: any request gets an answer or an InputError."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from clearhead.errors import InputError, did_you_mean

MAX_TEXT = 200_000  # characters


class Fields:
    """The fields of a JSON object. `what` names the object in error messages."""

    def __init__(self, given: object, what: str = "a request") -> None:
        if not isinstance(given, dict):
            raise InputError(f"{what} is a JSON object; got {given!r:.60}; write {{...}} with the fields' names")
        self.given, self.what = cast("dict[Any, Any]", given), what

    def has(self, name: str) -> bool:
        return self.given.get(name) is not None

    def text(self, name: str, default: str | None = None) -> str:
        value = self.given.get(name, default)
        if not isinstance(value, str):
            raise InputError(f"{self.what} needs {name!r}, a text; got {value!r:.60}")
        if len(value) > MAX_TEXT:
            raise InputError(f"{name!r} has {len(value):,} characters; {MAX_TEXT:,} are the most; give a shorter one")
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise InputError(f"{name!r} holds half of a surrogate pair, which is no text; got {value!r:.60}; remove it")
        return value

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else None

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self.given.get(name, default)
        if value not in choices:
            raise InputError(f"{name}={value!r:.60} is not one there is; {did_you_mean(f'{value}'[:60], choices)}")
        return str(value)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self.given.get(name, default)
        if type(value) is float and value.is_integer():  # JavaScript has only floats
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise InputError(f"{name} is a whole number from {low} to {high}; got {value!r:.60}")
        return value

    def integers(self, name: str, low: int, high: int, most: int, default: Sequence[int] | None = None) -> list[int]:
        values = self.given.get(name, default)
        if not isinstance(values, list | tuple) or len(values) > most:
            raise InputError(f"{name} is a list of up to {most} whole numbers; got {values!r:.60}")
        listed = cast("Sequence[Any]", values)
        return [Fields({name: value}, self.what).integer(name, low, high) for value in listed]

    def number(self, name: str, default: float) -> float:
        value = self.given.get(name, default)
        if type(value) not in (int, float) or abs(value) > 1e300 or not math.isfinite(value):
            raise InputError(f"{name} is a number; got {value!r:.60}; {default:g} is usual")
        return float(value)

    def nested(self, name: str) -> Fields:
        return Fields(self.given.get(name), repr(name))

    def nested_list(self, name: str, most: int) -> list[Fields]:
        values = self.given.get(name) or []
        if not isinstance(values, list) or len(cast("list[Any]", values)) > most:
            raise InputError(f"{name} is a list of up to {most} objects; got {values!r:.60}")
        return [Fields(value, f"one of {name!r}") for value in cast("list[Any]", values)]
