"""Checks of a JSON schema before it is compiled to a grammar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import unquote


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
