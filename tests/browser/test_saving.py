"""Pictures and pages that are saved: true to what is seen, and whole without a server."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.browser.conftest import Open
from tests.browser.opened import Opened


def saved(one: Opened, label: str, folder: Path) -> Path:
    with one.page.expect_download() as found:
        one.page.get_by_role("button", name=label, exact=True).first.click()
    file = folder / found.value.suggested_filename
    found.value.save_as(file)
    return file


@pytest.mark.parametrize(
    ("panel", "label", "words"),
    [
        ("model", "the drawing", ["embedding"]),
        ("heads", "Attention map", ["cat"]),
        ("lens", "Likeliest token by layer and position", ["cat"]),
        ("attribution", "Shares of the logit by layer and part", ["FF"]),
        ("cost", "Operations by length, one line a part", ["output projection", "feed-forward", "operations"]),
        ("positions", None, ["sinusoidal", "similarity, 1 = the same position"]),
    ],
)
def test_a_picture_is_saved(open_page: Open, tmp_path: Path, panel: str, label: str | None, words: list[str]) -> None:
    one = open_page(model="gpt", panel=panel, text="the cat sat on the mat")
    names = one.panel.get_by_role("button", name=re.compile("^Save .* as SVG$")).evaluate_all(
        "all => all.map(each => each.getAttribute('aria-label'))"
    )
    label = label or names[0].removeprefix("Save ").removesuffix(" as SVG")
    svg = saved(one, f"Save {label} as SVG", tmp_path)
    root = ElementTree.fromstring(svg.read_text(encoding="utf-8"))
    assert root.tag.endswith("svg")
    said = "".join(root.itertext()).lower()
    assert all(word.lower() in said for word in words)
    assert len(list(root.iter())) > 20
    png = saved(one, f"Save {label} as PNG", tmp_path)
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert png.stat().st_size > 2000


def test_a_page_is_saved_as_it_is_seen(open_page: Open, tmp_path: Path) -> None:
    """With its text, its changed head and its panel; every control that it can not obey is off; a reload shows the same."""
    view = dict(model="gpt", panel="heads", text="hello there", changes="blocks.1.attention:0:zero", scale="linear")
    one = open_page(**view)
    answer = one.page.locator(".answer .bars").inner_text()
    file = saved(one, "Save page", tmp_path)
    assert file.name == "gpt.html"
    again = open_page(file.as_uri())
    assert {url.split(":")[0] for url in again.asked} <= {"file", "data"}
    assert again.errors == []
    assert again.page.locator(".answer .bars").inner_text() == answer
    assert "1 head changed" in again.page.locator("#changed").inner_text()
    assert again.page.get_by_role("button", name="Save page").count() == 0
    assert again.page.locator("#tab-patching").count() == 0
    again.tab("attribution")
    assert again.errors == []
    assert again.panel.locator("input:enabled").count() == 0
    again.tab("intervene")
    assert again.panel.locator(".parts button:enabled, [type=search]:enabled").count() == 0
    again.page.reload()
    again.page.wait_for_selector("#panel .parts")
    assert again.errors == []


def test_a_saved_page_follows_the_token_that_was_seen(open_page: Open, tmp_path: Path) -> None:
    """It opened with an error: the walk was left out of every file."""
    state: dict[str, Any] = {"site": "blocks.2.attention", "head": 3, "follow.at": 1, "follow.step": 7}
    one = open_page(model="gpt", panel="follow", text="the cat sat on the mat", **state)
    weights = one.panel.locator(".keys td.now").all_inner_texts()
    again = open_page(saved(one, "Save page", tmp_path).as_uri())
    assert again.errors == []
    assert again.panel.locator(".keys td.now").all_inner_texts() == weights
    assert len(weights) > 1


COLOURS = """async (text) => {
  const image = new Image();
  image.src = `data:image/png;base64,${text}`;
  await image.decode();
  const canvas = Object.assign(document.createElement('canvas'), {width: image.width, height: image.height});
  const ink = canvas.getContext('2d');
  ink.drawImage(image, 0, 0);
  return [image.width, new Set(new Uint32Array(ink.getImageData(0, 0, image.width, image.height).data.buffer)).size];
}"""


@pytest.mark.parametrize(
    ("panel", "words"),
    [("heads", "Every head"), ("sandbox", "1.75"), ("generate", "Take the drawn token"), ("intervene", "Before")],
)
def test_any_panel_is_saved_as_a_picture(open_page: Open, tmp_path: Path, panel: str, words: str) -> None:
    """Its lists, tables and fields, too, as they are seen."""
    one = open_page(model="gpt", panel=panel, text="the cat sat", changes="blocks.1.attention:0:zero", theme="dark")
    if panel == "sandbox":
        one.panel.get_by_label("Queries, sat, number 1").fill("1.75")
    svg = saved(one, "Save this panel as SVG", tmp_path)
    assert svg.name == f"clearhead-{panel}.svg"
    text = svg.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert words in text
    png = saved(one, "Save this panel as PNG", tmp_path)
    width, colours = one.page.evaluate(COLOURS, base64.b64encode(png.read_bytes()).decode())
    assert width == 2 * one.panel.evaluate("panel => panel.offsetWidth")
    assert colours > 50


def test_a_link_is_copied(open_page: Open) -> None:
    one = open_page(model="gpt", panel="lens", text="the cat sat")
    one.context.grant_permissions(["clipboard-read", "clipboard-write"])
    one.page.get_by_role("button", name="Copy link").click()
    one.page.get_by_role("button", name="Copied").wait_for()
    assert one.page.evaluate("navigator.clipboard.readText()") == one.page.url
    assert "panel=lens" in one.page.url
