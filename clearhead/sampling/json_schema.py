"""Checks of a JSON schema before it is compiled to a grammar.

llguidance is recursive: on a stack of 8 MB, a chain of 1,000 references ends the process, and there is no exception to catch. So
depth and size are bounded first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import unquote

from clearhead.errors import InputError

MAX_LEVELS = 600  # of nested values, references followed
MAX_VALUES = 10_000
MAX_CHARACTERS = 200_000  # of names and texts
MAX_PATTERN = 10_000  # characters of a regular expression


def check_bounds(schema: Any, what: str) -> None:
    """InputError for a schema that is too deep or too large to compile."""
    n_values = n_characters = 0
    inside = [schema]
    references: set[str] = set()
    while inside:
        value = inside.pop()
        n_values += 1
        if isinstance(value, dict):
            part = cast("dict[str, Any]", value)
            inside += part.values()
            n_characters += sum(map(len, part))
            if isinstance(reference := part.get("$ref"), str):
                references.add(reference)
            if isinstance(pattern := part.get("pattern"), str):
                check_pattern(pattern, what)
        elif isinstance(value, list):
            inside += cast("list[Any]", value)
        elif isinstance(value, str):
            n_characters += len(value)
        if n_values > MAX_VALUES or n_characters > MAX_CHARACTERS:
            raise InputError(
                f"{what} is too large: more than {MAX_VALUES:,} values, or {MAX_CHARACTERS:,} characters; simplify it"
            )
    # A path through the schema meets each referenced part at most once, or is a cycle, which is compiled once.
    n_levels = whole = _depth(schema)
    for reference in references:
        if n_levels <= MAX_LEVELS:
            target = _follow(schema, reference)
            n_levels += 1 + (
                whole if target is True else _depth(target)
            )  # True: named by an anchor, so it may be any part
    if n_levels > MAX_LEVELS:
        raise InputError(
            f"{what} is too deep: with its {len(references)} references, more than {MAX_LEVELS} levels; "
            f"use fewer references, or nest less"
        )


def check_pattern(pattern: str, what: str) -> None:
    """InputError for a regular expression that is too long to compile."""
    if len(pattern) > MAX_PATTERN:
        raise InputError(
            f"{what} is too long: a regular expression of {len(pattern):,} characters, and {MAX_PATTERN:,} are the limit; "
            f"simplify it"
        )


def _depth(node: Any) -> int:
    """The levels of nested objects and lists."""
    level, depth = [node], 0
    while level := [
        inner
        for value in level
        if isinstance(value, dict | list)
        for inner in cast("list[Any]", list(value.values()) if isinstance(value, dict) else value)
    ]:
        depth += 1
    return depth


def is_endless(schema: dict[str, Any]) -> bool:
    """Whether no finite value satisfies the schema, because its references require a value inside a value without end."""
    targets = {
        reference: _follow(schema, reference)
        for part in _parts(schema)
        if isinstance(reference := part.get("$ref"), str)
    }
    ending: set[str] = set()  # references known to have a finite value

    def ends(node: Any) -> bool:
        if not isinstance(node, dict):
            return True
        part = cast("dict[str, Any]", node)
        reference, all_of = part.get("$ref"), _listed(part, "allOf")
        if isinstance(reference, str) and reference not in ending:
            return False
        if not all(map(ends, all_of)):
            return False
        if not all(any(map(ends, some)) for word in ("anyOf", "oneOf") if (some := _listed(part, word))):
            return False
        inner: list[Any] = []
        if part.get("type") in ("object", ["object"]):
            named, others = part.get("properties", {}), part.get("additionalProperties")
            inner = [named.get(name, others) for name in _listed(part, "required")]
        elif part.get("type") in ("array", ["array"]):
            inner = [*_listed(part, "prefixItems"), part.get("items")][: int(part.get("minItems", 0))]
        return all(map(ends, inner))

    while more := {reference for reference in targets.keys() - ending if ends(targets[reference])}:
        ending |= more
    return not ends(schema)


def spelled_texts(schema: dict[str, Any]) -> Iterator[str]:
    """The strings that a schema requires: property names, enum and const values."""
    for part in _parts(schema):
        named: Any = part.get("properties")
        spelled = [*_listed(part, "required"), *_listed(part, "enum"), part.get("const")]
        spelled += named if isinstance(named, dict) else []
        yield from (text for text in spelled if isinstance(text, str))


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    """Every object in the schema, outer ones first."""
    if isinstance(node, dict):
        part = cast("dict[str, Any]", node)
        yield part
        node = list(part.values())
    if isinstance(node, list):
        for inner in cast("list[Any]", node):
            yield from _parts(inner)


def _listed(part: dict[str, Any], word: str) -> list[Any]:
    found: Any = part.get(word)
    return found if isinstance(found, list) else []


def _follow(schema: Any, reference: str) -> Any:
    """The part of the schema that a JSON pointer names; True, a finite schema, for other kinds of reference."""
    if reference != "#" and not reference.startswith("#/"):
        return True
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict):
            schema = cast("dict[str, Any]", schema).get(step, True)
        elif isinstance(schema, list) and step.isdigit():
            schema = dict(enumerate(cast("list[Any]", schema))).get(int(step), True)
        else:
            return True
    return schema
