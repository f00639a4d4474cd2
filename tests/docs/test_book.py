"""book/: real lines by the name of their object, and the pages that are made from the package."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

import clearhead as ch
from clearhead.cli.command_list import SUMMARIES, load_command
from clearhead.training.recipe_fields import Data, Train

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book"))
import hooks  # noqa: E402
import reference  # noqa: E402
import sources  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402

CODE = '''"""A file."""
from functools import cache

SIZES: dict[str, int] = {
    "one": 1,
}


@cache
def first() -> int:
    return 1


class Thing:
    width = 3

    def second(self) -> int:
        return 2
'''


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "room.py").write_text(CODE)
    for module in (hooks, sources):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [("SIZES", 4, 6), ("first", 9, 11), ("Thing", 14, 18), ("Thing.second", 17, 18), ("Thing.width", 15, 15)],
)
def test_an_object_is_found_with_all_its_lines(repository: Path, name: str, first: int, last: int) -> None:
    assert sources.find_lines(repository / "room.py", name) == (first, last)


def rewrite(text: str) -> str:
    page = File("learn.md", None, "site", False)
    return hooks.rewrite(text, page)


def test_a_link_that_stands_alone_shows_the_lines(repository: Path) -> None:
    shown = rewrite("Before.\n\n[`second`](../room.py#Thing.second)\n\nAfter.\n")
    assert shown == (
        'Before.\n\n<a href="source/room.py.html#__codelineno-0-17">`second`</a>\n\n'
        '````python linenums="17" title="room.py, lines 17 to 18"\n'
        "def second(self) -> int:\n    return 2\n````\n\nAfter.\n"
    )
    within = rewrite("See [`first`](../room.py#first) and [all of it](../room.py).")
    assert (
        within == 'See <a href="source/room.py.html#__codelineno-0-9">`first`</a> and [all of it](source/room.py.md).'
    )


@pytest.mark.parametrize("link", ["../room.py#gone", "../room.py#Thing.gone", "../gone.py#first", "../../outside.py"])
def test_what_is_gone_fails_the_build(repository: Path, link: str) -> None:
    with pytest.raises(sources.SourceError):
        rewrite(f"[x]({link})")


def test_a_result_is_shown_behind_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "RESULTS", tmp_path)
    page = File("learn/03-attention.md", None, "site", False)
    block = "```console\nclearhead experiment scale\n```"
    assert hooks.NOT_RUN in hooks.with_result(block, page)
    (tmp_path / "scale").mkdir()
    (tmp_path / "scale" / "page.md").write_text("Found.\n\n![a figure](figure.svg)\n")
    command = block.replace("console", "bash")  # in a console's block all but what follows "$" is grey
    assert hooks.with_result(block, page) == f"{command}\n\nFound.\n\n![a figure](../results/scale/figure.svg)\n"


def test_a_builds_result_takes_the_place_of_the_written_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "RESULTS", tmp_path)
    page = SimpleNamespace(file=File("learn/03-attention.md", None, "site", False), meta={})
    text = "Before.\n\n<!-- result scale -->\n\nOld.\n\n<!-- end of the result -->\n\nAfter.\n"

    def shown() -> str:
        return hooks.on_page_markdown(text, page=page, config=None, files=Files([]))

    assert shown() == text
    (tmp_path / "scale").mkdir()
    (tmp_path / "scale" / "page.md").write_text("New.\n")
    assert shown() == "Before.\n\n\n\nAfter.\n"


def test_pages_that_compute_are_made_from_a_demo_or_from_weights_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str]) -> None:
        ran.append(command[1:])
        if "--export" in command:
            Path(command[command.index("--export") + 1]).write_text("<!doctype html>" + "x" * 1_900_000)

    monkeypatch.setattr(hooks, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(hooks, "run", run)
    monkeypatch.setenv("CLEARHEAD_SHARED", str(tmp_path))
    monkeypatch.delenv("CLEARHEAD_DOCS_DRAFT", raising=False)
    text = (ROOT / "docs" / "explorer.md").read_text(encoding="utf-8")
    blocks = {block["live"]: block[0] for block in hooks.RUN.finditer(text)}
    assert set(blocks) == {"dates.html", "stories260K.html"}
    page = File("explorer.md", None, "site", False)
    assert [file.name for file in hooks.results_of(text)] == ["dates.html"], "there are no weights of stories260K"
    assert [command[0] for command in ran] == ["demo", "explore"]
    assert hooks.NO_WEIGHTS in hooks.with_result(blocks["stories260K.html"], page)
    link = "[Open dates.html](results/dates.html/dates.html) (1.9 MB; it needs no server)."
    assert link in hooks.with_result(blocks["dates.html"], page)
    (tmp_path / "data/stories260K").mkdir(parents=True)
    (tmp_path / "data/stories260K/stories260K.bin").touch()
    assert len(hooks.results_of(text)) == 2
    assert [command[0] for command in ran] == ["demo", "explore", "explore"], "the first is newer than its code"


def test_every_option_and_field_is_there() -> None:
    commands = reference.commands()
    for name in SUMMARIES:
        assert f"## clearhead {name}\n" in commands
        spelled = [option for parameter in load_command(name).params for option in parameter.opts if option[0] == "-"]
        assert spelled, name
        assert [option for option in spelled if option not in commands] == []
    for page, kinds in ((reference.recipe(), (Data, Train)), (reference.config(), (ch.Config,))):
        rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
        assert [row[1].strip(" `") for row in rows] == [one.name for kind in kinds for one in fields(kind)]
        assert [row[1] for row in rows if not row[-2].strip()] == [], "a field without a meaning"
    assert all(f"| {name} |" in reference.presets() for name in ch.presets())


def test_the_python_page_has_all_public_names() -> None:
    page = reference.python()
    assert page.count("\n::: ") == len(ch.__all__) - 1  # without __version__
