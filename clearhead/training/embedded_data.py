"""Embedded data sets as files, so that tasks read them like any other: dates in many languages, Python's standard library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clearhead.checkpoint.durable_files import write_text
from clearhead.data.builtin_datasets import standard_library
from clearhead.data.dates import split_dates
from clearhead.training.recipe import Recipe


def unpack(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with the files of its embedded data set, which are written into `folder` if they are missing."""
    match recipe.data.embedded:
        case "dates":
            names = ("train.text", "train.iso", "valid.text", "valid.iso")
            source, target, valid_source, valid_target = (str(folder / "dates" / name) for name in names)
            if not all((folder / "dates" / name).is_file() for name in names):
                _write_dates(folder / "dates")
            files = dict(source=(source,), target=(target,), valid_source=(valid_source,), valid_target=(valid_target,))
            return replace(recipe, data=replace(recipe.data, **files))
        case "code":
            return replace(recipe, data=replace(recipe.data, files=tuple(map(str, standard_library()))))
        case _:
            return recipe


def _write_dates(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    train, valid = split_dates(seed=0)
    for name, pairs in (("train", train), ("valid", valid)):
        for suffix, lines in (("text", [pair.text for pair in pairs]), ("iso", [pair.iso for pair in pairs])):
            write_text(folder / f"{name}.{suffix}", "\n".join(lines) + "\n")
