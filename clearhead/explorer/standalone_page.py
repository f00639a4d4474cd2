"""The page's files, and the page as one HTML file that carries its answers and needs no server."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE_FILES = Path(__file__).parent / "page"
LIVE_FILES = PAGE_FILES / "live"  # what only a page that computes by itself carries
MAX_BYTES = 10_000_000  # of a page with its answers

# A page without a server makes no requests at all.
POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:"


def write_page(answers: Mapping[str, bytes], start: Mapping[str, Any], live: Mapping[str, Any] | None = None) -> str:
    """The page as one file with these answers (by `key_of`). `start` holds its first state and what was left out; `live` is the
    model of a page that computes the others by itself (live_export.py)."""
    encoded = {key: base64.b64encode(answer).decode() for key, answer in answers.items()}
    files = [*sorted(PAGE_FILES.glob("*.js")), *(sorted(LIVE_FILES.glob("*.js")) if live else ())]
    modules = {file.name: _module(read_lean(file)) for file in files}
    assert len(modules) == len(files)
    imports = {f"clearhead/{name}": _data_url(text) for name, text in modules.items()}
    page = (PAGE_FILES / "index.html").read_text(encoding="utf-8")
    script = "".join(
        [
            f"<script>window.CLEARHEAD_START={_script_json(start)};window.CLEARHEAD_ANSWERS={_script_json(encoded)}</script>\n",
            f'<script type="importmap">{_script_json({"imports": imports})}</script>\n',
            f"<script>window.CLEARHEAD_MODEL={_script_json(live)}</script>\n" if live else "",
            '<script type="module">import "clearhead/live.js"</script>\n' if live else "",
            '<script type="module">import "clearhead/main.js"</script>',
        ]
    )
    # Replacements are functions: in a string, re.sub would interpret backslashes.
    page = re.sub(r'<link rel="stylesheet" href="([\w-]+\.css)">', _style, page)
    page = re.sub(r'<script type="module"[^>]*></script>', lambda _: script, page)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    return re.sub(r"<meta charset[^>]*>", lambda found: f"{found[0]}\n{policy}", page, count=1)


def read_lean(file: Path) -> str:
    """A script or a style without comments and indentation, which are for readers of the repository: a sixth of its bytes."""
    text = re.sub(r"/\*\*? .*?\*/ ?", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"^[ \t]*(//.*)?\n|^[ \t]+", "", text, flags=re.MULTILINE)


def _style(link: re.Match[str]) -> str:
    return f"<style>\n{read_lean(PAGE_FILES / link[1])}</style>"


def _module(text: str) -> str:
    """A module that imports the others by name: in a data URL there are no relative paths."""
    return re.sub(r"""((?:from|import)\s*\(?\s*)(["'])\./""", r"\1\2clearhead/", text)


def _data_url(text: str) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"


def _script_json(value: Any) -> str:
    """JSON for a <script>, which it can not end early."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
