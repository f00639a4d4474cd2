"""The site of docs/ in a browser, from a server on this machine and from the disk: search, dark mode, mathematics, a phone."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.opened import Opened
from tests.docs.building import build_site

pytestmark = pytest.mark.slow
Visit = Callable[..., Page]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory)[0]


@pytest.fixture(scope="module")
def over_http(folder: Path) -> Generator[str]:
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def visit(chromium: Browser) -> Generator[Visit]:
    """Opens an address; errors on the console and requests to other machines fail the test at its end."""
    opened: list[Opened] = []

    def open_one(address: str, width: int = 1280) -> Page:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme="light")
        opened.append(Opened(context, address))
        opened[-1].page.goto(address)
        return opened[-1].page

    yield open_one
    for one in opened:
        one.context.close()
        one.check()


@pytest.mark.parametrize("way", ["http", "file"])
def test_search_finds_a_page(visit: Visit, over_http: str, folder: Path, way: str) -> None:
    page = visit(f"{over_http if way == 'http' else folder.as_uri()}/index.html")
    page.get_by_role("textbox", name="Search").click()
    page.get_by_role("textbox", name="Search").type("length_penalty")
    first = page.locator(".md-search-result__link").first
    first.wait_for()
    first.click()
    page.wait_for_url("**/generation.html*")


def test_dark_mode_is_switched_and_stays(visit: Visit, over_http: str) -> None:
    page = visit(f"{over_http}/index.html")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    assert page.locator("img[src$='#only-light']").is_visible()
    page.locator("label[title='Dark mode']").click()
    page.wait_for_function(f"{background} !== '{light}'")
    assert not page.locator("img[src$='#only-light']").is_visible()
    assert page.locator("img[src$='#only-dark']").is_visible()
    dark = page.evaluate(background)
    page.goto(f"{over_http}/do/lora.html")
    assert page.evaluate(background) == dark


def test_mathematics_is_set(visit: Visit, over_http: str, folder: Path) -> None:
    """On every page that has some; a formula that KaTeX does not know is an error on the console, which fails the test."""
    with_some = [file for file in folder.rglob("*.html") if 'class="arithmatex"' in file.read_text(encoding="utf-8")]
    assert with_some
    page = visit(f"{over_http}/index.html")
    for file in with_some:
        page.goto(f"{over_http}/{file.relative_to(folder).as_posix()}")
        assert page.locator(".arithmatex").count() == page.locator(".arithmatex .katex").count() > 0
        assert page.evaluate("document.fonts.ready.then(() => document.fonts.check('16px KaTeX_Math'))")


def test_no_page_scrolls_sideways_on_a_phone(visit: Visit, over_http: str, folder: Path) -> None:
    page = visit(f"{over_http}/index.html", width=390)
    wide = []
    sources = sorted((folder / "source").rglob("*.html"))  # they are all alike
    for file in sorted({*folder.rglob("*.html")} - {*sources[1:]}):
        page.goto(f"{over_http}/{file.relative_to(folder).as_posix()}")
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wide.append(file.relative_to(folder))
    assert wide == []
