"""Embedded data sets become files that tasks read like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clearhead.data.builtin_datasets import standard_library
from clearhead.data.dates import DatePair
from clearhead.training import embedded_data
from clearhead.training.recipe import Data, Recipe, find_recipe

TRAIN = [DatePair("le 3 mars 1987", "1987-03-03", "fr"), DatePair("1987年3月3日", "1987-03-03", "ja")]
VALID = [DatePair("3. März 1988", "1988-03-03", "de")]


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Only a few dates, since making all takes seconds; returns the seeds that were used."""
    asked: list[int] = []

    def few(*, seed: int) -> tuple[list[DatePair], list[DatePair]]:
        asked.append(seed)
        return TRAIN, VALID

    monkeypatch.setattr(embedded_data, "split_dates", few)
    return asked


def with_data(embedded: str) -> Recipe:
    return Recipe(task="translate", data=Data(embedded=embedded, length=17))  # type: ignore[arg-type]


def test_dates_are_written_once(tmp_path: Path, seeds: list[int]):
    recipe = embedded_data.unpack(with_data("dates"), tmp_path)
    for files, lines in (
        (recipe.data.source, [pair.text for pair in TRAIN]),
        (recipe.data.target, [pair.iso for pair in TRAIN]),
        (recipe.data.valid_source, [pair.text for pair in VALID]),
        (recipe.data.valid_target, [pair.iso for pair in VALID]),
    ):
        assert Path(files[0]).read_text(encoding="utf-8").split("\n") == [*lines, ""]
    assert sorted(path.name for path in (tmp_path / "dates").iterdir()) == [
        "train.iso",
        "train.text",
        "valid.iso",
        "valid.text",
    ]
    assert recipe.data.length == 17
    assert embedded_data.unpack(with_data("dates"), tmp_path) == recipe
    assert seeds == [0]  # always the same dates, and made once


def test_a_kill_while_dates_are_written_is_mended(tmp_path: Path, seeds: list[int]):
    recipe = embedded_data.unpack(with_data("dates"), tmp_path)
    whole = Path(recipe.data.target[0]).read_bytes()
    Path(recipe.data.target[0]).unlink()
    assert embedded_data.unpack(with_data("dates"), tmp_path) == recipe
    assert Path(recipe.data.target[0]).read_bytes() == whole
    assert seeds == [0, 0]


def test_code_is_the_standard_library(tmp_path: Path):
    recipe = embedded_data.unpack(find_recipe("code"), tmp_path)
    assert list(map(Path, recipe.data.files)) == standard_library()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "digits"])
def test_the_rest_is_as_it_was(tmp_path: Path, name: str):
    assert embedded_data.unpack(with_data(name), tmp_path) == with_data(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["dates", "code", "digits"])
def test_each_has_a_recipe(name: str):
    recipe = find_recipe(name)
    assert recipe.data.embedded == name
    assert replace(recipe.data, embedded="").files == ()
