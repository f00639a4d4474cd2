"""Every experiment runs, at its quick size, as a user runs it; pages, figures and refusals."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import Result as Ran
from typer.testing import CliRunner

from clearhead.cli import app
from clearhead.errors import InputError
from clearhead.experiments import figure, running
from clearhead.experiments.catalogue import CATALOGUE, find_entry, load_experiment
from clearhead.experiments.page import page
from clearhead.experiments.result import Chart, Curve, Finding, Result, Table
from clearhead.lessons.catalogue import CATALOGUE as EXERCISES

pytestmark = pytest.mark.usefixtures("unchecked")  # as a user runs it

CHAPTERS = sorted((Path(__file__).resolve().parents[2] / "docs" / "learn").glob("[0-9]*.md"))
RESULT = Result(
    tables=(Table("Rows", ("way", "loss"), (("plain", 0.12345), ("other", 1234567))),),
    charts=(
        Chart(
            "Lines", "x", "y", (Curve("a", (1, 2), (0.5, 0.25)), Curve("b", (1, 2), (0.5, float("inf")))), log_y=True
        ),
        Chart("Bars", "", "y", (Curve("a", ("one", "two"), (1.0, 2.0)),)),
        Chart(
            "Map", "x", "y", (Curve("a", (1, 2), (0.5, 0.25), ("here", "there")), Curve("b", (1,), (1.0,))), is_map=True
        ),
    ),
    findings=(Finding("Claim.", "Numbers.", "contradicts"),),
)


def experiment(*words: object) -> Ran:
    clean = {"FORCE_COLOR": None, "NO_COLOR": "1", "COLUMNS": "200"}
    return CliRunner(env=clean).invoke(app, ["experiment", *map(str, words)], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in CATALOGUE])
def test_every_experiment_runs(name: str, tmp_path: Path) -> None:
    ran = experiment(name, "--quick", "--out", tmp_path / "out")
    assert ran.exit_code == 0, ran.output
    written = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    result = Result.from_dict(written["result"])
    assert result.tables
    assert result.charts
    text = (tmp_path / "out" / "page.md").read_text(encoding="utf-8")
    assert not re.search("^#", text, re.M)  # it stands inside a chapter
    for finding in result.findings:
        assert finding.measured in text
        assert finding.measured in ran.output
    assert (tmp_path / "out" / "figure.svg").read_text(encoding="utf-8").count("<svg") == 1
    assert f"clearhead experiment {name} --quick" in text


@pytest.mark.slow
def test_a_text_of_the_user(tmp_path: Path) -> None:
    names = ["house", "tree", "river", "stone"]
    (tmp_path / "my.txt").write_text(" ".join(f"the {n} and the {n}s stand ." for n in names * 40), encoding="utf-8")
    ran = experiment("embeddings", "--quick", "--text", tmp_path / "my.txt", "--out", tmp_path / "out", "--json")
    assert ran.exit_code == 0
    assert "In my.txt, the plural is among" in ran.output
    (tmp_path / "short.txt").write_text("no plural here", encoding="utf-8")
    with pytest.raises(InputError, match=r"3 words and 0 pairs of a word and its plural; 3 are needed; give a longer"):
        running.run(find_entry("embeddings"), size="quick", text=tmp_path / "short.txt")


def test_the_list() -> None:
    ran = experiment()
    assert all(entry.name in ran.output and entry.question in ran.output for entry in CATALOGUE)
    assert json.loads(experiment("--json").output)[0]["name"] == CATALOGUE[0].name


def test_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no experiment 'maks'; did you mean 'masks'"):
        experiment("maks")
    with pytest.raises(InputError, match=r"masks makes its own data; got a text, a\.txt; leave it out"):
        running.run(find_entry("masks"), text=Path("a.txt"))
    with pytest.raises(InputError, match="needs a seed; got seeds=0; nearest valid: 1"):
        running.run(find_entry("masks"), n_seeds=0)
    assert experiment("masks", "--quick", "--full").exit_code == 2
    assert experiment("--seeds", "3").exit_code == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"can not be made.*name another folder with --out"):
        experiment("masks", "--quick", "--out", tmp_path / "file")


def test_a_missing_matplotlib_is_told_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "clearhead.experiments.figure")
    monkeypatch.delattr("clearhead.experiments.figure")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(running, "run", lambda *_, **__: pytest.fail("it worked first"))
    with pytest.raises(Exception, match=r"pip install 'clearhead\[plot\]'"):
        experiment("masks", "--out", tmp_path)


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_each_module_has_its_three_sizes(entry) -> None:
    module = load_experiment(entry)
    assert set(module.SIZES) == {"quick", "usual", "full"}
    assert len(set(module.SIZES.values())) == 3  # no option without effect


def test_a_page_says_what_was_found() -> None:
    text = page("is it so?", "Measured here.", RESULT, "figure.svg")
    assert "**Is it so?**" in text
    assert "- **Contradicts what is commonly said.** *Claim.* Numbers." in text
    assert "| plain | 0.123 |" in text
    assert "| other | 1,234,567 |" in text
    assert "](figure.svg)" in text


def test_a_figure_is_the_same_bytes_again_and_skips_what_is_not_finite(tmp_path: Path) -> None:
    figure.write(RESULT, tmp_path / "a.svg")
    figure.write(Result.from_dict(json.loads(json.dumps(asdict(RESULT)))), tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    drawn = figure.draw(RESULT)
    assert [len(line.get_xdata()) for line in drawn.axes[0].lines] == [2, 1]
    assert [bar.get_height() for bar in drawn.axes[1].patches] == [1.0, 2.0]
    assert drawn.axes[0].get_yscale() == "log"
    assert [line.get_linestyle() for line in drawn.axes[2].lines] == ["None", "None"]
    assert [text.get_text() for text in drawn.axes[2].texts] == ["here", "there"]
    assert drawn.axes[2].get_aspect() == 1


# The chapters.


def test_each_chapter_is_one_experiment() -> None:
    assert len(CHAPTERS) == len(CATALOGUE)
    for number, (chapter, entry) in enumerate(zip(CHAPTERS, CATALOGUE, strict=True), 1):
        assert chapter.name == f"{number:02}-{entry.chapter.replace(' ', '-')}.md"
        blocks = re.findall(r"^```console\n(clearhead experiment.*)\n```$", chapter.read_text(encoding="utf-8"), re.M)
        assert blocks == [f"clearhead experiment {entry.name}"]


def test_each_exercise_is_named_in_its_chapter_and_no_other_name_is() -> None:
    for chapter, entry in zip(CHAPTERS, CATALOGUE, strict=True):
        named = set(re.findall(r"clearhead learn start (\w+)", chapter.read_text(encoding="utf-8")))
        assert named == {exercise.name for exercise in EXERCISES if exercise.chapter == entry.chapter}
    assert {exercise.chapter for exercise in EXERCISES} <= {entry.chapter for entry in CATALOGUE}
