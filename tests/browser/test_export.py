"""The exported file and a notebook's frame work from disk, with no server and no network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.explorer import export_page, tokenizer_of
from clearhead.explorer.notebook import show_seen
from tests.browser.conftest import Open

PANELS = ["model", "heads", "follow", "lens", "flow", "generate", "positions", "sandbox", "geometry", "cost"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "translator", "classes", "digits"])
def test_an_exported_page_needs_nothing(open_page: Open, places: dict[str, Path], tmp_path: Path, name: str) -> None:
    model = ch.load(places[name])
    page = export_page(model, tokenizer_of(places[name], model), name=name, path=places[name])
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    assert file.stat().st_size < 10_000_000
    one = open_page(file.as_uri())
    assert {url.split(":")[0] for url in one.asked} <= {"file", "data"}
    tabs = one.page.locator("[role=tab]").evaluate_all("tabs => tabs.map(tab => tab.id.slice(4))")
    for panel in (each for each in PANELS if each in tabs):
        one.tab(panel)
        assert one.errors == [], panel
    one.tab("follow")
    assert one.panel.get_by_text("1 of").is_visible()
    assert one.panel.locator("select:enabled, input:enabled").count() == 0
    one.tab("heads")
    cells = one.panel.locator("[role=gridcell].here")
    assert cells.count() >= 8
    for number in (0, cells.count() - 1):
        cells.nth(number).click()
        one.settle()
        assert one.errors == []
        assert one.colours(one.panel.get_by_label("Attention map").first) > 3
    # What it does not hold can not be asked for, and a reload shows the same.
    assert one.page.locator(".given textarea:not([readonly]), .given input:enabled, .given select:enabled").count() == 0
    held = ("Back to the model as it is", "PNG", "SVG")  # pictures are saved from what the page holds
    for panel, controls in (
        ("generate", ".knobs input, .sampling button, .chances button"),
        ("cost", ".knobs input, button"),
    ):
        if panel in tabs:
            one.tab(panel)
            shown = one.panel.locator(controls)
            assert shown.count() > 0 or panel == "generate"
            assert [each for each in shown.all() if each.is_enabled() and each.inner_text() not in held] == []
    one.tab("intervene")
    one.panel.locator("[role=gridcell]").first.click()
    assert re.search("clearhead explore", one.errors[0])
    one.page.reload()
    one.page.wait_for_selector("[role=gridcell].here")
    assert one.errors == []


def test_a_notebooks_frame(open_page: Open, places: dict[str, Path], tmp_path: Path) -> None:
    """In a sandboxed frame that may only run scripts, as in notebooks."""
    model = ch.load(places["gpt"]).eval()
    tokenizer = ch.load_tokenizer(places["gpt"])
    ids = tokenizer.encode("the cat sat")
    with ch.probe(model, "*.attention.weights") as seen, torch.no_grad():
        model(torch.tensor([ids]))
    frame = show_seen(seen, tokens=[tokenizer.decode([id]) for id in ids])
    file = tmp_path / "notebook.html"
    shown = frame._repr_html_()  # pyright: ignore[reportPrivateUsage]
    file.write_text(f"<!doctype html><title>a notebook</title>{shown}", encoding="utf-8")
    one = open_page(script="", at="about:blank")
    one.page.goto(file.as_uri())
    inner = one.page.frame_locator("iframe")
    inner.locator("[role=gridcell].here").nth(11).wait_for()
    assert inner.locator("[role=gridcell].here").count() == 12
    assert inner.locator("[role=tab]").count() == 1
