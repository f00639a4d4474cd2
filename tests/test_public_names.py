"""The public names, pinned: a name that comes or goes is a decision, and this list is where it shows."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import clearhead as ch

PUBLIC = [
    "CheckpointError",
    "ClearheadError",
    "Config",
    "ConfigError",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "Generation",
    "InputError",
    "MissingExtraError",
    "Recipe",
    "__version__",
    "build",
    "cost",
    "draw",
    "find_recipe",
    "generate",
    "load",
    "load_tokenizer",
    "preset",
    "presets",
    "probe",
    "save",
    "train",
    "train_tokenizer",
    "translate",
]


def test_the_public_names_are_these() -> None:
    assert ch.__all__ == PUBLIC
    assert sorted(PUBLIC) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_is_there(name: str) -> None:
    value = getattr(ch, name)
    assert value is getattr(ch, name)
    if name in ch._ROOMS:
        assert value is getattr(importlib.import_module(f"clearhead.{ch._ROOMS[name]}"), name)


def test_all_of_them_come_with_a_star() -> None:
    names: dict[str, object] = {}
    exec("from clearhead import *", names)
    assert set(PUBLIC) <= set(names)


def test_dir_lists_them() -> None:
    assert dir(ch) == PUBLIC


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"clearhead has no 'bulid'; it has .*build, cost, .*preset"):
        _ = ch.bulid
    assert not hasattr(ch, "utils")


def test_type_checkers_and_python_are_told_the_same() -> None:
    """The imports under TYPE_CHECKING, read from the source, against the table that python looks names up in."""
    tree = ast.parse(Path(ch.__file__).read_text(encoding="utf-8"))
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(typed.test) == "TYPE_CHECKING"
    told = {
        alias.name: node.module.removeprefix("clearhead.")
        for node in typed.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert told == ch._ROOMS
    assert {*told, "__version__"} == set(PUBLIC)


def test_every_public_name_says_what_it_is() -> None:
    for name in PUBLIC:
        value = getattr(ch, name)
        assert isinstance(value, str) or value.__doc__, name
