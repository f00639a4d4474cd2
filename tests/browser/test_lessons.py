"""Lessons are addresses, words of the field are explained, and a row of cross-attention says which token is written there."""

from __future__ import annotations

import pytest

from tests.browser.conftest import Open


@pytest.mark.parametrize(
    ("lesson", "model", "panel", "shown"),
    [
        ("induction", "gpt", "heads", "followed the same token"),
        ("sink", "gpt", "heads", "sum to 1"),
        ("dates", "translator", "heads", "writes it as numbers"),
        ("patches", "digits", "heads", "square patches"),
    ],
)
def test_a_lesson_is_an_address(open_page: Open, lesson: str, model: str, panel: str, shown: str) -> None:
    one = open_page(lesson=lesson, panel="")
    one.page.locator("#lesson .card").wait_for()
    state = one.state()
    assert (state["model"], state["panel"]) == (model, panel)
    assert shown in one.page.locator("#lesson").inner_text()
    assert one.page.locator(f"#tab-{panel}").get_attribute("aria-selected") == "true"
    assert one.errors == []
    one.page.get_by_role("button", name="Close").last.click()
    one.settle()
    assert one.page.locator("#lesson").is_hidden()
    assert one.state()["panel"] == panel


def test_a_lesson_without_a_model_that_fits_says_what_it_needs(open_page: Open) -> None:
    one = open_page(model="gpt", lesson="ioi", panel="")
    words = one.page.locator("#lesson").inner_text()
    assert "each name as one token" in words, "these tiny vocabularies have no Mary and no John"
    assert "differ in one token" not in words
    assert one.errors == []


def test_lessons_follow_one_another(open_page: Open) -> None:
    one = open_page(model="gpt", panel="model")
    one.panel.get_by_role("button", name="Attention sinks").click()
    one.settle()
    assert one.state()["lesson"] == "sink"
    assert one.state()["sort"] == "first"
    one.page.get_by_role("button", name="Next: Mary and John").click()
    one.page.get_by_role("button", name="Next: Dates").click()
    one.settle()
    assert one.state()["model"] == "translator"
    assert one.state()["sort"] == "alignment"


def test_a_lesson_keeps_what_the_address_says(open_page: Open) -> None:
    one = open_page(lesson="sink", panel="lens", model="gpt", text="hello")
    assert one.state()["panel"] == "lens"
    assert one.state()["text"] == "hello"
    assert one.page.locator("#lesson").is_visible()


def test_words_are_explained_on_hover_and_focus(open_page: Open) -> None:
    one = open_page(model="gpt", panel="attribution", text="the cat")
    word = one.panel.locator("dfn", has_text="embedding").first
    meaning = word.locator("span")
    assert meaning.is_hidden()
    word.hover()
    assert "before the first layer" in meaning.inner_text()
    one.page.mouse.move(1, 1)
    word.focus()
    assert meaning.is_visible()
    assert "before the first layer" in (word.get_attribute("aria-label") or "")


def test_a_row_of_cross_attention_is_the_token_being_written(open_page: Open) -> None:
    one = open_page(model="translator", panel="heads", attention="cross", text="the cat", target="a dog ran")
    written = one.tokens("Target")[1:]
    canvas = one.panel.get_by_label("Attention map").first
    canvas.focus()
    one.page.keyboard.press("ArrowDown")
    row = one.panel.locator(".readout").inner_text()
    assert f"{written[1]}\u2069” → " in row, "the second row; the first token is the start, which nobody writes"
    assert one.page.locator("[aria-label='Target tokens'] .here").inner_text() == written[1]
