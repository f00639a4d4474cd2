"""docs/exercises.md against the code: its table is the catalogue, its sample what is said of its own function."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clearhead.cli import app
from clearhead.cli.learn import report
from clearhead.lessons.catalogue import CATALOGUE, find_entry, load_exercise
from clearhead.lessons.trial import grade_file
from clearhead.lessons.workbook import MEGABYTES, Trial

pytestmark = pytest.mark.usefixtures("unchecked")  # as a student runs it

PAGE = (Path(__file__).parents[2] / "docs" / "exercises.md").read_text(encoding="utf-8")


def test_the_table_is_the_catalogue() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (\d+) \| (.+?) \|$", PAGE, re.M)
    expected = [
        (
            entry.name,
            entry.chapter,
            entry.teaches,
            str(len(exercise.cases()) + len(exercise.laws)),
            len(exercise.mistakes),
        )
        for entry in CATALOGUE
        for exercise in [load_exercise(entry.name)]
    ]
    assert rows == [(*row, str(count) if count else "each law says its own") for *row, count in expected]
    assert f"{len(CATALOGUE)} functions" in PAGE


def test_the_limits_are_as_said() -> None:
    limits = {entry.seconds for entry in CATALOGUE}
    assert limits == {30.0, 120.0}
    assert f"for 30 seconds at most (the whole decoder: 120) and {MEGABYTES // 1024} GB" in PAGE


def test_the_sample_is_what_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.S)
    assert code is not None
    (tmp_path / "attention.py").write_text(code[1], encoding="utf-8")
    found = grade_file("attention", tmp_path / "attention.py")
    report(Trial("attention", **found), find_entry("attention"))
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    # the last digits of a sum may differ between machines
    assert [re.sub(r"\d+\.\d+", "N", line) for line in said] == [
        re.sub(r"\d+\.\d+", "N", " ".join(line.split())) for line in code[2].splitlines()
    ]


def test_the_commands_of_the_page_are_the_groups() -> None:
    shown = CliRunner().invoke(app, ["learn", "--help"]).output
    for name in re.findall(r"^clearhead learn (\w+)", PAGE, re.M):
        assert name in shown
