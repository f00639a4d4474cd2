"""One server of tiny models, one Chromium, and pages that fail a test on errors and on requests to other machines."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.models import make_models
from tests.browser.opened import Opened
from tests.chromium import find_chromium
from tests.serving.live_server import served

Open = Callable[..., Opened]


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def address(places: dict[str, Path]) -> Generator[str]:
    with served(*map(str, places.values())) as (url, _):
        yield url


# Playwright occupies this thread's event loop while it runs, so it ends with this folder: other tests need the loop.
@pytest.fixture(scope="package")
def chromium() -> Generator[Browser]:
    executable = find_chromium()  # without one these tests are skipped before this is asked for
    with sync_playwright() as playwright:
        args = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=executable, args=args)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser, address: str) -> Generator[Open]:
    """Opens the page at a view: `open_page(model="gpt", panel="lens")`; errors on the page fail the test at its end."""
    opened: list[Opened] = []

    def open_one(at: str | None = None, *, script: str = "", **state: str | int) -> Opened:
        if at is None:
            state.setdefault("panel", "heads")  # of a panel of its own each test says which
        theme = state.pop("system", "light")
        width, height = int(state.pop("width", 1280)), int(state.pop("height", 900))
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if theme == "dark" else "light",
            reduced_motion="reduce",
        )
        one = Opened(context, at or address, script)
        opened.append(one)
        one.go(**state)
        return one

    yield open_one
    for one in opened:
        one.context.close()
    for one in opened:
        one.check()
