"""The site is built without a warning, and every link in it leads somewhere, anchors included."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

Site = tuple[Path, str]


class Page(HTMLParser):
    """The links of a page, what it loads, and the places that links can lead to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])


@pytest.fixture(scope="module")
def pages(site: Site) -> dict[Path, Page]:
    files = (file for file in site[0].rglob("*.html") if file.is_file())  # a result's folder may be named so, too
    return {file: Page(file) for file in files if file.name != "404.html"}


@pytest.mark.slow
def test_the_build_warns_of_nothing(site: Site) -> None:
    folder, printed = site
    assert [line for line in printed.splitlines() if not line.startswith("INFO ")] == []
    assert "Documentation built" in printed
    assert (folder / "index.html").is_file()


@pytest.mark.slow
def test_every_link_leads_somewhere(pages: dict[Path, Page], site: Site) -> None:
    dead, seen = [], 0
    for file, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme in ("https", "http", "mailto", "data"):
                continue
            seen += 1
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            is_there = target.is_file() and (target not in pages or unquote(parts.fragment) in pages[target].anchors)
            dead += [] if is_there else [f"{file.relative_to(site[0])}: {link}"]
    assert dead == []
    assert seen > 2000


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page]) -> None:
    assert [load for page in pages.values() for load in page.loads if "//" in load] == []


@pytest.mark.slow
def test_every_page_is_reached_from_the_home_page(pages: dict[Path, Page], site: Site) -> None:
    reached, waiting = set(), [site[0] / "index.html"]
    while waiting:
        file = waiting.pop()
        if file in pages and file not in reached:
            reached.add(file)
            links = (urlsplit(link) for link in pages[file].links)
            waiting += [(file.parent / unquote(link.path)).resolve() for link in links if link.path and not link.scheme]
    assert set(pages) - reached == set()
