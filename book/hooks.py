"""What mkdocs does for this site beyond its configuration (mkdocs.yml).

- A pattern in the navigation stands for all pages that match.
- The pages of *Look up* are made from the package, and files that a page links to outside docs/ get pages of their own.
- A paragraph that is only a link to an object of a Python file, `[text](../../clearhead/config.py#Config)`, shows its lines.
- A console block that is only `clearhead experiment NAME`, `clearhead draw MODEL --out FILE.svg` or
  `clearhead explore MODEL --export FILE.html --live` is run, and its result shown, in place of the one that is written on the page.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import reference
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from sources import ROOT, SourceError, anchor_of, page_of, show_object, source_page

HERE = Path(__file__).parent
RESULTS = ROOT / "build" / "experiments"
PACKAGES = ROOT / "node_modules"
COPIES = {"lookup/changes.md": ROOT / "CHANGELOG.md", "lookup/contributing.md": ROOT / "CONTRIBUTING.md"}
ASSETS = {
    "assets/site.css": HERE / "site.css",
    "assets/mathematics.js": HERE / "mathematics.js",
    "assets/iframe-worker.js": PACKAGES / "iframe-worker" / "shim" / "index.js",
    "assets/katex/katex.min.js": PACKAGES / "katex" / "dist" / "katex.min.js",
    "assets/katex/katex.min.css": PACKAGES / "katex" / "dist" / "katex.min.css",
}
NOT_RUN = "*This build did not run it; `make docs` does.*"
# What an experiment said when the page was written, for readers of the file; here a build's own result takes its place.
WRITTEN = re.compile(r"^<!-- result ([\w-]+) -->$.*?^<!-- end of the result -->$", re.M | re.S)
NO_WEIGHTS = "*This build did not make the file; `make docs` does where it finds the weights.*"
LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<path>[^)#\s:]+)(?:#(?P<name>[\w.-]+))?\)")
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="(?P<dark>[^"]*)">\s*<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]*)">\s*</picture>'
)
FENCE = re.compile(r"^(```+).*?^\1 *$", re.M | re.S)
RUN = re.compile(
    r"^```console\nclearhead (?:experiment (?P<experiment>[\w-]+)|draw (?P<model>\S+) --out (?P<svg>[\w-]+\.svg)"
    r"|explore (?P<weights>[\w.-]+/\S+) --export (?P<live>[\w-]+\.html) --live)\n```$",
    re.M,
)


def on_config(config: Any) -> Any:
    docs = Path(config.docs_dir)

    def expand(items: list[Any]) -> list[Any]:
        found: list[Any] = []
        for item in items:
            (title, value), *_ = item.items() if isinstance(item, dict) else [(None, item)]
            if isinstance(value, list):
                found.append({title: expand(value)})
            elif "*" in value or "[" in value:
                pages = sorted(path.relative_to(docs).as_posix() for path in docs.glob(value))
                found += [{title: pages}] if pages else []
            else:
                found.append(item)
        return found

    config.nav = expand(config.nav)
    return config


def on_files(files: Files, *, config: Any) -> Files:
    for name, make in reference.PAGES.items():
        files.append(File.generated(config, f"lookup/{name}.md", content=make()))
    for name, file in COPIES.items():
        files.append(File.generated(config, name, abs_src_path=str(file)))
    fonts = {
        f"assets/katex/fonts/{file.name}": file for file in sorted((PACKAGES / "katex/dist/fonts").glob("*.woff2"))
    }
    for name, file in {**ASSETS, **fonts}.items():
        if not file.is_file():
            raise PluginError(f"{file} is not there; run: npm ci --ignore-scripts")
        files.append(File.generated(config, name, abs_src_path=str(file)))
    for notebook in sorted(Path(config.docs_dir).glob("notebooks/*.ipynb")):
        name = f"notebooks/{notebook.stem}.md"
        outside = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, name, content=notebook_page(notebook), inclusion=outside))
    pages = [(origin(file), file.content_string) for file in files.documentation_pages()]
    for file in sorted({file for _, text in pages for file in results_of(text)}):
        files.append(File.generated(config, f"results/{file.relative_to(RESULTS).as_posix()}", abs_src_path=str(file)))
    for file in sorted(linked_sources(pages)):
        outside = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, str(page_of(file)), content=source_page(file), inclusion=outside))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    file = origin(page.file)
    if page.file.src_uri.startswith("source/") and file.suffix != ".md":
        return markdown
    if not re.search(r"^##+ ", markdown, re.M):
        page.meta.setdefault("hide", []).append("toc")  # it would be an empty column
    markdown = WRITTEN.sub(lambda old: "" if (RESULTS / old[1] / "page.md").is_file() else old[0], markdown)
    parts, done = [], 0
    try:
        for fence in FENCE.finditer(markdown):
            parts += [rewrite(markdown[done : fence.start()], page.file), with_result(fence[0], page.file)]
            done = fence.end()
        return "".join([*parts, rewrite(markdown[done:], page.file)])
    except SourceError as error:
        raise PluginError(f"{file.relative_to(ROOT)}: {error}") from error


def rewrite(text: str, page: File) -> str:
    """Links out of docs/ lead to pages of the site, and a paragraph that is only a link to an object shows the object."""

    def change(link: re.Match[str]) -> str:
        target = (origin(page).parent / link["path"]).resolve()
        if target.is_relative_to(ROOT / "docs") and not target.is_file():
            return link[0]  # a page that is made, or a dead link, of which mkdocs warns
        if not target.is_file() or not target.is_relative_to(ROOT):
            raise SourceError(f"the link {link[0]} leads to no file")
        to, name = place_of(target), link["name"] or ""
        if target == origin(page):
            to = target.relative_to(ROOT / "docs").as_posix()  # a notebook's page offers the notebook
        words = title_of(target) if re.fullmatch(r"[\w/.-]+\.md", link["text"]) else link["text"]
        place = between(page.src_uri, to)
        if name and target.suffix == ".py":  # mkdocs does not know the anchors of lines; tests/docs/test_site.py does
            changed = f'<a href="{place.removesuffix(".md")}.html#{anchor_of(target, name)}">{words}</a>'
        else:
            changed = f"[{words}]({place}{'#' * bool(name)}{name})"
        alone = re.search(r"(^|\n\n)$", text[: link.start()]) and re.match(r"\n*$|\n\n", text[link.end() :])
        shows = alone and name and target.suffix == ".py"
        return f"{changed}\n\n{show_object(target, name)}" if shows else changed

    return LINK.sub(change, PICTURE.sub(r"![\g<alt>](\g<light>#only-light)![\g<alt>](\g<dark>#only-dark)", text))


def origin(page: File) -> Path:
    """The file in the repository that a page comes from."""
    if page.src_uri.startswith("source/"):
        return ROOT / page.src_uri.removeprefix("source/").removesuffix(".md")
    if page.src_uri.startswith("notebooks/") and page.src_uri.endswith(".md"):
        return (ROOT / "docs" / page.src_uri).with_suffix(".ipynb")
    return COPIES.get(page.src_uri, ROOT / "docs" / page.src_uri)


def place_of(target: Path) -> str:
    """Where a file of the repository is, in the site's sources."""
    copies = {file: name for name, file in COPIES.items()} | {ROOT / "README.md": "index.md"}
    if target in copies:
        return copies[target]
    if is_source(target):
        return str(page_of(target))
    within = target.relative_to(ROOT / "docs")
    return str(within.with_suffix(".md") if within.suffix == ".ipynb" else within)


def title_of(page: Path) -> str:
    """The first heading of a page."""
    return re.search(r"^# (.*)$", page.read_text(encoding="utf-8"), re.M)[1]  # type: ignore[index]


def is_source(target: Path) -> bool:
    return not target.is_relative_to(ROOT / "docs") or target.suffix == ".py"


def between(page: str, target: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def linked_sources(pages: list[tuple[Path, str]]) -> set[Path]:
    """The files outside docs/ that pages link to, and those that these link to."""
    found: set[Path] = set()
    known = {*COPIES.values(), ROOT / "README.md"}
    while pages:
        file, text = pages.pop()
        for link in LINK.finditer(FENCE.sub("", text)):
            target = (file.parent / link["path"]).resolve()
            if target.is_file() and target.is_relative_to(ROOT) and is_source(target) and target not in found | known:
                found.add(target)
                pages += [(target, target.read_text(encoding="utf-8"))] if target.suffix == ".md" else []
    return found


def notebook_page(file: Path) -> str:
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    shown = [
        text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for cell, text in zip(cells, texts, strict=True)
    ]
    file_itself = f"[The notebook itself, to run]({file.name})"  # not changed to a link to this page
    return "\n\n".join([shown[0], file_itself, *shown[1:]])


def run(command: list[str]) -> None:
    print("running", " ".join(command), flush=True)
    subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def results_of(text: str) -> list[Path]:
    """Run what a page's blocks show, unless its result is there and newer than its code; the files that pages need."""
    found: list[Path] = []
    for block in RUN.finditer(text):
        result, code = result_of(block), code_of(block)
        if not os.environ.get("CLEARHEAD_DOCS_DRAFT") and (
            not result.is_file() or result.stat().st_mtime < code.stat().st_mtime
        ):
            result.parent.mkdir(parents=True, exist_ok=True)
            for command in commands_of(block, result):
                run(["clearhead", *command])
        found += [file for file in result.parent.glob("*") if file.suffix in (".svg", ".png", ".html")]
    return found


def result_of(block: re.Match[str]) -> Path:
    name = block["experiment"] or block["svg"] or block["live"]
    return RESULTS / name / ("page.md" if block["experiment"] else name)


def code_of(block: re.Match[str]) -> Path:
    """The file whose change makes a result old."""
    if block["experiment"]:
        return ROOT / "clearhead" / "experiments" / f"{block['experiment'].replace('-', '_')}.py"
    return ROOT / "clearhead" / ("costs/diagram.py" if block["svg"] else "explorer/live_export.py")


def commands_of(block: re.Match[str], result: Path) -> list[list[str]]:
    """What makes a result. A page that computes has its model from a demo (runs/NAME) or from CLEARHEAD_SHARED; none without."""
    if block["experiment"]:
        return [["experiment", block["experiment"], "--out", str(result.parent)]]
    if block["svg"]:
        return [["draw", block["model"], "--out", str(result)]]
    folder, _, name = block["weights"].partition("/")
    model, before = Path(os.environ.get("CLEARHEAD_SHARED") or ROOT / "shared") / "data" / folder / name, []
    if folder == "runs":
        model = RESULTS / "runs" / name
        before = [] if (model / "model.safetensors").is_file() else [["demo", name, "--out", str(model)]]
    elif not model.exists():
        return []
    return [*before, ["explore", str(model), "--export", str(result), "--live"]]


def with_result(block: str, page: File) -> str:
    """A block that shows a command with a result, and the result behind it. In commands only comments are grey."""
    run_block = RUN.fullmatch(block)
    if not re.search(r"^\$ ", block, re.M):
        block = block.replace("```console", "```bash", 1)
    if not run_block:
        return block
    result = result_of(run_block)
    name, folder = result.parent.name, between(page.src_uri, f"results/{result.parent.name}")
    if not result.is_file():
        return f"{block}\n\n{NO_WEIGHTS if run_block['live'] else NOT_RUN}"
    if run_block["svg"]:
        return f"{block}\n\n![{run_block['model']}, drawn]({folder}/{name})"
    if run_block["live"]:
        size = f"{result.stat().st_size / 1e6:.1f} MB"
        return f"{block}\n\n[Open {name}]({folder}/{name}) ({size}; it needs no server)."
    text = re.sub(r"(!\[[^\]]*\]\()", rf"\g<1>{folder}/", result.read_text(encoding="utf-8"))
    return f"{block}\n\n{text}"
