"""Source files in the site: an object's lines by its name, and a page for each file that a page links to."""

from __future__ import annotations

import ast
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".json": "json", ".toml": "toml", ".js": "javascript"}


class SourceError(Exception):
    """A page names a file or an object that is not there."""


def find_lines(file: Path, name: str) -> tuple[int, int]:
    """First and last line of `function`, `Class`, `Class.method` or `NAME` in a Python file, decorators included."""
    nodes: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next((node for node in nodes if part in names_of(node)), None)
        if found is None:
            raise SourceError(f"{file.relative_to(ROOT)} has no {name!r}; rename it in the page, too")
        nodes = getattr(found, "body", [])
    assert found is not None
    first = min([found.lineno, *(decorator.lineno for decorator in getattr(found, "decorator_list", []))])
    return first, found.end_lineno or first


def names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def show_object(file: Path, name: str) -> str:
    """A fenced block with the object's lines, numbered as in the file."""
    first, last = find_lines(file, name)
    lines = file.read_text(encoding="utf-8").splitlines()[first - 1 : last]
    indent = len(lines[0]) - len(lines[0].lstrip())
    code = "\n".join(line[indent:] for line in lines)
    title = f"{file.relative_to(ROOT).as_posix()}, lines {first} to {last}"
    return f'````python linenums="{first}" title="{title}"\n{code}\n````'


def page_of(file: Path) -> PurePosixPath:
    """Where the page of a source file is, in the site's sources."""
    return PurePosixPath("source", f"{file.relative_to(ROOT).as_posix()}.md")


def anchor_of(file: Path, name: str) -> str:
    """The anchor of an object's first line in its file's page."""
    return f"__codelineno-0-{find_lines(file, name)[0]}"


def source_page(file: Path) -> str:
    path, text = file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    # A fence that no line of the text can end.
    code = f'`````{LANGUAGES.get(file.suffix, "text")} linenums="1"\n{text}\n`````'
    return f"---\nhide: [toc, navigation]\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n{code}\n"
