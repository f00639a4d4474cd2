"""docs/learn/teaching.md against the exercises that exist."""

from __future__ import annotations

import re
from pathlib import Path

from clearhead.lessons.catalogue import CATALOGUE

PAGE = (Path(__file__).parents[2] / "docs" / "learn" / "teaching.md").read_text(encoding="utf-8")


def test_each_exercise_is_in_one_session_of_its_chapter() -> None:
    rows = re.findall(r"^\| (\d+) \|([^|]+)\|([^|]*)\|.*\|$", PAGE, re.M)[:12]
    assert [int(number) for number, *_ in rows] == list(range(1, 13))
    written = [(name, chapter.strip()) for _, chapter, names in rows for name in re.findall(r"`(\w+)`", names)]
    apart = {"induction_head": "looking inside", "patching": "looking inside"}  # a session of their own
    together = ("cost and complexity, long range", "geometry, from the paper to today")  # two chapters in one
    apart |= {entry.name: both for both in together for entry in CATALOGUE if entry.chapter in both.split(", ")}
    assert sorted(written) == sorted((entry.name, apart.get(entry.name, entry.chapter)) for entry in CATALOGUE)
