"""`Fields`: the base of every request body. A field that would have no effect is refused by its name."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn, cast

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from clearhead.errors import did_you_mean

# Fields of OpenAI's API that are not supported here, each with the values that ask for nothing. null always asks for nothing.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "best_of": (1,),
    "dimensions": (),
    "function_call": ("none",),
    "functions": (),
    "include_obfuscation": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "refusal": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_call_id": (),
    "tool_calls": ([],),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


class Fields(BaseModel):
    """A body, or a part of one, that accepts no other fields than its own."""

    model_config = ConfigDict(extra="forbid")
    # Accepted without effect: names and notes that clients give to their requests. docs/serving.md lists them.
    labels: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, given: Any) -> Any:
        """Before pydantic looks at any field: the first unknown one ends the request, however many there are."""
        if not isinstance(given, dict):
            return given
        fields = cast("dict[str, Any]", given)
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept: dict[str, Any] = {}
        for name, value in fields.items():
            if name in known:
                kept[name] = value
            elif not (name in cls.labels or asks_nothing(name, value)):
                refuse(name, value, known)
        return kept


def asks_nothing(name: str, value: Any) -> bool:
    """Whether this is an unsupported field of OpenAI's with a value that changes nothing."""
    # 1 == True in Python: the types must be equal, too.
    neutral = NOT_SUPPORTED.get(name)
    return neutral is not None and (
        value is None or any(type(value) is type(each) and value == each for each in neutral)
    )


def refuse(name: str, value: Any, known: Iterable[str]) -> NoReturn:
    """Raise the error for a field that is unknown or not supported."""
    got = reprlib.repr(value)
    if name in NOT_SUPPORTED:
        said = f"{name} is not supported by this server; got {got}; leave it out"
    else:
        said = f"there is no field {name[:60]!r} here; got {got}; {did_you_mean(name[:60], known)}"
    raise PydanticCustomError("unknown_field", "{said}", {"said": said, "field": name[:60]})
