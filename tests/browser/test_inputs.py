"""Texts in many scripts, views shared by their address, and error messages on the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser

import clearhead as ch
from tests.browser.conftest import Open
from tests.browser.opened import Opened
from tests.serving.live_server import served

TEXTS = {
    "one token": "a",
    "blank": " ",
    "unicode": "naïve café 😀👩‍👩‍👧 漢字 ẞ\n\ttabs & <u>tags</u> \"'\\ \u2028 ￿",
    "right to left": "שלום עולם and مرحبا بالعالم",
}


@pytest.mark.parametrize("model", ["gpt", "classes", "masked", "translator"])
def test_any_text_is_shown_whole(open_page: Open, places: dict[str, Path], model: str) -> None:
    tokenizer = ch.load_tokenizer(places[model])
    one = open_page(model=model)
    for name, text in TEXTS.items():
        for panel in ("lens", "flow", "intervene", "heads"):
            one.go(model=model, text=text, panel=panel)
            assert one.errors == [], (name, panel)
        ids = tokenizer.encode(text)
        is_ended = model != "translator" or ids[-1:] == [tokenizer.eos]
        assert len(one.tokens()) == len(ids) + (not is_ended), name
        assert one.page.locator("#run u").count() == 0, "a text is never markup"


def test_right_to_left_tokens_stand_alone(open_page: Open) -> None:
    """Each token is isolated, so that the strip still runs from left to right."""
    one = open_page(model="gpt", text=TEXTS["right to left"])
    chips = one.page.locator("[aria-label='Input tokens'] [role=option]:not(.special)")
    assert chips.evaluate_all("all => all.every(one => one.localName === 'bdi')")
    tops_lefts = chips.evaluate_all("all => all.map(one => [one.offsetTop, one.offsetLeft])")
    assert tops_lefts == sorted(tops_lefts)


def test_padded_inputs_hide_their_padding(open_page: Open) -> None:
    """Padding behind a text does not change its answers."""
    said: list[str] = []
    for text in ("the cat sat", "the cat sat<pad><pad><pad>"):
        one = open_page(model="classes", text=text)
        said.append(one.page.locator(".answer .bars").inner_text())
        assert one.errors == []
    assert said[0] == said[1]
    assert one.page.locator("[role=option].special").count() >= 3


def test_typing_is_followed(open_page: Open) -> None:
    one = open_page(model="gpt")
    before = one.page.locator(".answer").inner_text()
    one.type("hello there")
    assert "".join(one.tokens()).replace("·", " ").endswith("hello there")
    assert one.page.locator(".answer").inner_text() != before
    assert one.state()["text"] == "hello there"


VIEWS = [
    dict(
        model="gpt",
        text="the dog ran",
        panel="heads",
        site="blocks.2.attention",
        head="3",
        scale="linear",
        sort="entropy",
    ),
    dict(model="gpt", text="the dog ran", panel="lens", **{"lens.layer": "1", "lens.position": "2", "lens.by": "rank"}),
    dict(model="translator", panel="intervene", changes="decoder.blocks.1.cross:2:zero", attention="cross"),
    dict(model="gpt", panel="generate", **{"generate.top_k": "5", "generate.seed": "7"}),
    dict(model="masked", panel="cost", **{"cost.layers": "7", "cost.precision": "int8"}),
    dict(model="digits", text="sample:4", panel="flow", theme="dark"),
]


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view["panel"])
def test_an_address_restores_its_view(open_page: Open, view: dict[str, str]) -> None:
    first = open_page(**view)
    address = first.page.url
    assert {key: first.state().get(key) for key in view} == view
    second = open_page(**view)
    second.page.goto("about:blank")
    second.page.goto(address)
    second.page.wait_for_selector("[role=tab]")
    second.settle()
    looks: list[tuple[str, list[str]]] = []
    for _ in range(50):  # a heading may change after the last answer
        looks = [
            (one.panel.inner_text(), list(map(one.picture, one.panel.locator("canvas").all())))
            for one in (first, second)
        ]
        if looks[0] == looks[1]:
            break
        second.page.wait_for_timeout(20)
    assert looks[0] == looks[1]


def test_the_same_picture_can_be_opened_again(open_page: Open, tmp_path: Path) -> None:
    """A browser tells of no choice that it takes for the one before."""
    picture = tmp_path / "grey.png"
    Image.new("L", (16, 16), 128).save(picture)
    one = open_page(model="digits", panel="heads")
    chooser = one.page.locator("input[type=file]")
    with one.page.expect_response("**/explore/picture*"):
        chooser.set_input_files(picture)
    one.settle()
    assert one.state()["text"].startswith("upload:")
    assert chooser.input_value() == ""


def test_a_text_that_is_too_long_is_said_in_the_page(open_page: Open) -> None:
    one = open_page(model="gpt", text="the cat " * 200)
    assert any("tokens" in error for error in one.errors)
    assert all("400" in complaint for complaint in one.complaints), one.complaints
    one.complaints.clear()


@pytest.mark.parametrize("width", [390, 360])
def test_a_phone_shows_everything_without_scrolling_sideways(open_page: Open, width: int) -> None:
    one = open_page(model="translator", width=width, height=780)
    for tab in one.page.locator("[role=tab]").evaluate_all("tabs => tabs.map(tab => tab.id.slice(4))"):
        one.tab(tab)
        assert is_within(one), tab


def test_at_twice_the_zoom_nothing_is_cut_off(open_page: Open) -> None:
    """Zoom of 200% is half the width in CSS pixels."""
    one = open_page(model="gpt", width=640, height=450)
    for tab in one.page.locator("[role=tab]").evaluate_all("tabs => tabs.map(tab => tab.id.slice(4))"):
        one.tab(tab)
        assert is_within(one), tab


def is_within(one: Opened) -> bool:
    return one.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.mark.slow
def test_no_page_without_the_key(chromium: Browser, places: dict[str, Path]) -> None:
    """The key comes in the address, is sent with each request, and is gone from the address at once."""
    with served(str(places["gpt"]), env={"CLEARHEAD_API_KEYS": "open sesame"}) as (url, _):
        context = chromium.new_context()
        one = Opened(context, url)
        one.go(key="open sesame", model="gpt")
        assert len(one.tokens()) > 3
        assert "sesame" not in one.page.url
        context.close()
        one.check()
