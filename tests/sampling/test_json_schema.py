"""Facts about schemas that decide before any token is written."""

from __future__ import annotations

from typing import Any

import pytest

from clearhead.sampling.json_schema import _depth, is_endless


@pytest.mark.parametrize(
    ("schema", "endless"),
    [
        ({"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}}, True),
        ({"type": "object", "required": ["a"], "additionalProperties": {"type": "null"}}, False),
        ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}, True),
        ({"type": "object", "required": ["a"], "properties": {"a": {}}, "additionalProperties": {"$ref": "#"}}, False),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, False),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, True),
        ({"type": "array", "items": {"$ref": "#"}}, False),
    ],
)
def test_a_required_value_inside_itself_has_no_end(schema: dict[str, Any], endless: bool) -> None:
    assert is_endless(schema) is endless


def test_depth_counts_objects_and_lists() -> None:
    assert _depth({"a": {"b": [{}]}}) == 3
    assert _depth([[1], {}]) == 2
