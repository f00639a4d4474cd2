"""Cause and effect are on one screen: maps, tabs, taps, the Back button, colours that the system forces."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator

from tests.browser.conftest import Open
from tests.browser.opened import Opened

SIZES = [(1440, 900), (390, 844)]


def share_in_view(one: Opened, node: Locator) -> float:
    return node.evaluate(
        """node => {
          const {top, bottom, height} = node.getBoundingClientRect();
          return (Math.min(bottom, innerHeight) - Math.max(top, 0)) / height;
        }"""
    )


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("layer", [0, 15, 29])
def test_a_chosen_head_is_seen_at_once(open_page: Open, width: int, height: int, layer: int) -> None:
    one = open_page(model="deep", text="the cat sat on the mat", width=width, height=height)
    one.panel.locator("[role=gridcell].here").nth(layer * 8 + 3).click()
    one.settle()
    assert one.panel.get_by_role("heading", name=f"Layer {layer}, head 3").count() == 1
    assert share_in_view(one, one.panel.get_by_label("Attention map").first) >= 0.8


def test_a_chosen_head_is_seen_under_a_lesson(open_page: Open) -> None:
    one = open_page(
        model="gpt", panel="heads", lesson="induction", text="the cat sat on the mat", width=1440, height=900
    )
    assert share_in_view(one, one.panel.get_by_label("Attention map").first) < 0.8
    one.panel.locator("[role=gridcell].here").first.click()
    one.settle()
    assert share_in_view(one, one.panel.get_by_label("Attention map").first) >= 0.8


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_answer_is_seen_when_a_head_is_changed(open_page: Open, width: int, height: int) -> None:
    one = open_page(model="deep", panel="intervene", text="the cat sat on the mat", width=width, height=height)
    one.panel.locator("[role=gridcell].here").nth(29 * 8).click()
    one.settle()
    assert share_in_view(one, one.panel.locator(".before-after h3").first) == 1


def test_no_tab_is_hidden(open_page: Open) -> None:
    for width, height in SIZES:
        one = open_page(model="gpt", width=width, height=height)
        one.page.locator("select[aria-label=Model] option").first.evaluate("one => (one.textContent = 'a'.repeat(90))")
        for tab in one.page.locator("[role=tab]").all():
            box = tab.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width, tab.inner_text()


def test_the_last_name_of_a_map_is_whole(open_page: Open) -> None:
    text = "the cat sat on the mat. the cat sat on the mat. the cat sat<mask>"
    one = open_page(model="gpt", text=text, width=390, height=844)
    assert one.tokens()[-1] == "<mask>"
    edge = one.panel.get_by_label("Attention map").first.evaluate(
        """canvas => [...canvas.getContext('2d').getImageData(canvas.width - 2, 0, 2, 60).data].reduce((a, b) => a + b)"""
    )
    assert edge == 0, "no letter touches the edge of the canvas"


def test_a_tap_reads_the_map(open_page: Open) -> None:
    one = open_page(model="gpt", text="the cat sat", width=390, height=844)
    canvas = one.panel.get_by_label("Attention map").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    canvas.dispatch_event(
        "pointerdown",
        {
            "pointerType": "touch",
            "bubbles": True,
            "clientX": box["x"] + 0.6 * box["width"],
            "clientY": box["y"] + 0.7 * box["height"],
        },
    )
    canvas.dispatch_event("pointerleave", {"pointerType": "touch"})
    assert "\u2192" in one.panel.locator(".readout").inner_text(), "what was tapped stays to be read"


@pytest.mark.parametrize("model", ["gpt", "translator", "digits"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_models_drawing_is_whole_and_tapped(open_page: Open, model: str, width: int, height: int) -> None:
    """Every word is inside its part's box; on a phone the drawing is as wide as its card, and a tap opens the part's panel."""
    one = open_page(model=model, panel="model", width=width, height=height)
    assert one.page.evaluate("document.documentElement.scrollWidth") <= width
    outside = one.panel.locator(".diagram g[role=link]").evaluate_all(
        """all => all.filter(part => {
             const box = part.querySelector('rect').getBBox();
             return [...part.querySelectorAll('text')].some(text => {
               const word = text.getBBox();
               return word.x < box.x || word.x + word.width > box.x + box.width || word.y + word.height > box.y + box.height;
             });
           }).map(part => part.textContent)"""
    )
    assert outside == []
    part = one.panel.locator(".diagram g[role=link]").filter(has_text="attention").first
    part.scroll_into_view_if_needed()
    box = part.bounding_box()
    assert box is not None
    one.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    one.settle()
    assert one.state()["panel"] == "heads"


def test_back_goes_back(open_page: Open) -> None:
    one = open_page(model="gpt", text="the cat sat")
    one.tab("lens")
    one.tab("cost")
    one.page.go_back()
    one.settle()
    assert one.page.locator("#tab-lens").get_attribute("aria-selected") == "true"
    one.page.go_back()
    one.settle()
    assert one.page.locator("#tab-heads").get_attribute("aria-selected") == "true"
    assert one.page.get_by_label("Text", exact=True).input_value() == "the cat sat"


def test_bars_stay_in_forced_colours(open_page: Open) -> None:
    one = open_page(model="gpt", text="the cat sat")
    one.page.emulate_media(forced_colors="active")
    images = one.page.locator(".answer .bar").evaluate_all(
        "all => all.map(bar => getComputedStyle(bar).backgroundImage)"
    )
    assert images
    assert all("gradient" in image for image in images)


def test_a_sweep_can_be_stopped(open_page: Open) -> None:
    one = open_page(model="deep", panel="intervene", text="the cat sat on the mat")
    one.panel.get_by_role("button", name="Try every head").click()
    one.panel.get_by_role("button", name="Stop", exact=True).click()
    one.settle()
    asked = len(one.asked)
    one.page.wait_for_timeout(500)
    assert len(one.asked) <= asked + 1
    assert one.panel.get_by_role("button", name="Try every head").is_visible()
