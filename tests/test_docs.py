"""The documents are run: each python block, in order, as a reader would; each command and path they name is looked up."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from clearhead.cli import app
from clearhead.cli.command_list import load_command

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
names = [str(page.relative_to(ROOT)) for page in PAGES]


@dataclass
class Block:
    language: str
    line: int  # of its first line, counted from 1
    lines: list[str]


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page; a block inside a list loses its indentation."""
    found: list[Block] = []
    fence, indent = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        start = re.match(r"( *)(```+)(.*)", line)
        if not fence and start:
            fence, indent = start[2], len(start[1])
            found.append(Block(start[3].split()[0] if start[3].split() else "", number + 1, []))
        elif fence and line.strip() == fence:
            fence = ""
        elif fence:
            found[-1].lines.append(line[indent:] if not line[:indent].strip() else line)
    assert not fence, f"the block that begins before line {found[-1].line} has no end"
    return found


def script(page: Path) -> str:
    """A page's python, every line of it where it stands on the page, so that a traceback names the page's line."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * len(text.splitlines())
    for block in blocks(text):
        if block.language == "python":
            lines[block.line - 1 : block.line - 1 + len(block.lines)] = block.lines
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=names)
def test_the_python_runs(page: Path, tmp_path: Path) -> None:
    code = script(page)
    if not code.strip():
        return
    (tmp_path / page.name).write_text(code, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-W", "error", page.name],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_the_readme_has_python_to_run() -> None:
    assert "import clearhead as ch" in script(ROOT / "README.md")


def said(page: Path) -> list[tuple[str, str]]:
    """Every command line that a page shows, in a block or in its prose, with where it stands."""
    text = page.read_text(encoding="utf-8")
    found: list[tuple[str, str]] = []
    for block in blocks(text):
        if block.language != "python":
            for number, line in enumerate(block.lines, block.line):
                commands = line.strip().removeprefix("$ ").split("&&")
                found += [(f"{page.name}:{number}", command.strip()) for command in commands]
    prose = re.sub(r"^ *```.*?^ *```", lambda gone: "\n" * gone[0].count("\n"), text, flags=re.S | re.M)
    for number, line in enumerate(prose.splitlines(), 1):
        found += [(f"{page.name}:{number}", code) for code in re.findall(r"`([^`]+)`", line)]
    return found


def words_after(program: str, line: str) -> list[str] | None:
    """What follows the program's name on a command line; None: the line is not one of its."""
    words = shlex.split(line, comments=True) if re.match(rf"(\S*/)?{program}(\s|$)", line) else []
    return words[1:] if words else None


def check_clearhead(words: list[str]) -> str | None:
    """What is wrong with a clearhead command line; None: nothing."""
    group, command, known = typer.main.get_command(app), None, set[str]()
    for word in ("clearhead", *(word for word in words if not word.startswith("-"))):
        if command is not None:
            if word not in group.commands:
                return f"there is no command {word!r}"
            group = load_command(word) if group.name == "clearhead" else group.commands[word]
        command = word
        known = {option for parameter in group.params for option in (*parameter.opts, *parameter.secondary_opts)}
        if not hasattr(group, "commands"):  # what follows are arguments
            break
    known |= {option for parameter in typer.main.get_command(app).params for option in parameter.opts} | {
        "--help",
        "-h",
    }
    wrong = [word for word in words if word.startswith("-") and word.partition("=")[0] not in known]
    return f"{command} has no option {wrong[0]}" if wrong else None


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=names)
def test_the_commands_exist(page: Path) -> None:
    wrong = []
    for where, line in said(page):
        words = words_after("clearhead", line)
        if words and (problem := check_clearhead(words)):
            wrong.append(f"{where}: {line}: {problem}")
    assert wrong == []


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_the_make_targets_exist(page: Path) -> None:
    wrong = []
    for where, line in said(page):
        wished = [word for word in words_after("make", line) or [] if "=" not in word]
        wrong += [f"{where}: make {word}" for word in wished if word not in targets()]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_the_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_readmes_tree_is_what_is_there() -> None:
    trees = [
        block for block in blocks((ROOT / "README.md").read_text(encoding="utf-8")) if block.lines[:1] == ["clearhead/"]
    ]
    assert len(trees) == 1
    above = Path()
    for line in trees[0].lines:
        name = line.split()[0]
        above = above if line.startswith(" ") else Path()
        assert (ROOT / above / name).exists(), line
        above = above if line.startswith(" ") else Path(name)
    shown = {line.split()[0].rstrip("/") for line in trees[0].lines if line.startswith(" ")}
    rooms = {path.parent.name for path in (ROOT / "clearhead").glob("*/__init__.py")}
    assert rooms <= shown, "a room that the README does not show"


# The readers themselves.
PAGE = """
Text with `clearhead prests` and `make tset`.

```python
one = 1
```

- a list

  ```python
  two = one + 1
  ```

```console
$ clearhead presets llama   # a comment
clearhead demo --wrong
make demo
```
"""


def test_blocks_are_found_where_they_stand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    code = script(page).splitlines()
    assert code[4] == "one = 1"
    assert code[10] == "two = one + 1"
    assert [line for line in code if line] == ["one = 1", "two = one + 1"]
    lines = {line: where for where, line in said(page)}
    assert lines["clearhead prests"] == "page.md:2"
    assert lines["clearhead demo --wrong"] == "page.md:16"


def test_wrong_commands_are_found() -> None:
    assert check_clearhead(["presets", "llama"]) is None
    assert check_clearhead(["--help"]) is None
    assert check_clearhead(["prests"]) == "there is no command 'prests'"
    assert check_clearhead(["demo", "--wrong"]) == "demo has no option --wrong"
    assert check_clearhead(["learn", "start", "attention", "--out", "x"]) is None
    assert check_clearhead(["learn", "strat"]) == "there is no command 'strat'"
    assert check_clearhead(["learn", "start", "--json"]) == "start has no option --json"
    assert words_after("clearhead", ".venv/bin/clearhead demo") == ["demo"]
    assert words_after("clearhead", "clearheaded demo") is None
