"""Solutions: the lines of this library that do what an exercise asks for, read from the source itself."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import clearhead.lessons
from clearhead.lessons.exercise import Exercise

ROOT = Path(clearhead.lessons.__file__).parents[2]


def solution_of(exercise: Exercise) -> list[tuple[str, str]]:
    """Titles and lines: where the library does it in earnest, and last a function that passes the exercise."""
    return [*map(lines_of, exercise.sources), lines_of(exercise.answer, "as the exercise's function: ")]


def lines_of(symbol: Any, words: str = "") -> tuple[str, str]:
    plain = inspect.unwrap(symbol)
    file, (lines, first) = Path(inspect.getfile(plain)), inspect.getsourcelines(plain)
    name = plain.__qualname__
    title = f"{words}{name}, {file.relative_to(ROOT).as_posix()}, lines {first} to {first + len(lines) - 1}"
    return title, "".join(lines).rstrip()
