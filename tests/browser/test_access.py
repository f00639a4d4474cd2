"""Accessibility: axe-core finds nothing on any panel, and the whole page can be used with the keyboard."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.opened import Opened

AXE = Path(__file__).parents[2] / "node_modules/axe-core/axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
EVERY = "model heads follow lens flow intervene attribution patching generate positions sandbox geometry cost"
FOCUSED = "document.activeElement"


def load_axe() -> str:
    if not AXE.is_file():
        pytest.skip(f"no node packages: {AXE} is missing")
    return AXE.read_text(encoding="utf-8")


def violations(one: Opened) -> list[str]:
    found: Any = one.page.evaluate(
        "rules => axe.run(document, {runOnly: rules, resultTypes: ['violations']}).then(told => told.violations)", RULES
    )
    return [
        f"{each['id']} ({each['impact']}): {node['target']} {node.get('failureSummary', '')[:300]}"
        for each in found
        for node in each["nodes"][:3]
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "theme", "panels"),
    [
        ("gpt", "light", EVERY),
        ("gpt", "dark", EVERY),
        ("translator", "light", "model heads intervene generate"),
        ("digits", "dark", "model heads lens"),
    ],
)
def test_axe_finds_nothing_on_any_panel(open_page: Open, model: str, theme: str, panels: str) -> None:
    one = open_page(model=model, system=theme, script=load_axe())
    found: dict[str, list[str]] = {}
    for panel in panels.split():
        one.tab(panel)
        for details in one.page.locator("#panel details:not([hidden]) > summary").all():
            details.click()
        if complaints := violations(one):
            found[panel] = complaints
    assert not found
    one.page.evaluate("document.querySelector('#panel').append(document.createElement('button'))")
    assert any("button-name" in each for each in violations(one)), "axe-core is not looking"


def test_errors_and_the_walk_are_accessible_too(open_page: Open) -> None:
    one = open_page(model="gpt", text="the cat " * 200, script=load_axe())
    assert one.errors
    assert violations(one) == []
    one.complaints.clear()
    one.type("the cat sat on the mat")
    one.page.get_by_role("button", name="Show me around").click()
    one.settle()
    assert violations(one) == []


def focused(one: Opened) -> str:
    """The focused element by its role or kind and its name."""
    return one.page.evaluate(
        f"""() => {{ const at = {FOCUSED};
          return (at.getAttribute('role') ?? at.localName) + ': ' +
            (at.getAttribute('aria-label') ?? at.closest('label')?.innerText ?? at.innerText ?? '').slice(0, 60); }}"""
    )


def press_until(one: Opened, pattern: str, key: str = "Tab", most: int = 60) -> str:
    seen: list[str] = []
    for _ in range(most):
        one.page.keyboard.press(key)
        seen.append(focused(one))
        if re.search(pattern, seen[-1]):
            return seen[-1]
    raise AssertionError(f"{most} times {key} did not reach {pattern!r}; it went over {seen}")


def test_a_walk_with_the_keyboard_alone(open_page: Open) -> None:
    one = open_page(model="gpt", text="the cat sat on the mat")
    keyboard = one.page.keyboard
    assert "Skip" in press_until(one, ".", most=1)
    press_until(one, "^tab: Attention")
    keyboard.press("ArrowRight")
    one.settle()
    assert focused(one) == "tab: Follow a token"
    assert one.state()["panel"] == "follow"
    keyboard.press("Home")
    one.settle()
    assert focused(one) == "tab: Model"
    keyboard.press("ArrowRight")
    one.settle()
    assert focused(one) == "tab: Attention"

    press_until(one, "^(textarea|textbox)")
    keyboard.press("Control+A")
    with one.page.expect_response("**/explore/read"):
        keyboard.type("a dog ran over the hill")
    one.settle()
    assert one.state()["text"] == "a dog ran over the hill"

    # Tokens: one stop, arrows inside; the token in focus shades the others by its weights.
    press_until(one, "^option")
    keyboard.press("ArrowRight")
    keyboard.press("End")
    assert one.page.locator("[role=option]").last.evaluate("one => one === document.activeElement")
    assert one.page.locator("[role=option][style*='background']").count() >= 1

    # Heads: one stop, arrows in both directions, Enter chooses.
    press_until(one, "^gridcell")
    for key in ("Home", "ArrowRight", "ArrowDown", "ArrowDown", "Enter"):
        keyboard.press(key)
    one.settle()
    state = one.state()
    assert (state["site"], state["head"]) == ("blocks.2.attention", "1")
    assert one.page.locator("[role=gridcell][aria-selected=true]").evaluate("one => one === document.activeElement")

    # The map: rows by arrows, zoom by + and 0.
    press_until(one, "Attention map")
    keyboard.press("ArrowUp")
    first = one.panel.locator(".readout").inner_text()
    keyboard.press("ArrowUp")
    assert first != one.panel.locator(".readout").inner_text()
    keyboard.press("+")
    keyboard.press("0")

    press_until(one, "^tab: Attention", "Shift+Tab")
    for _ in range(4):
        keyboard.press("ArrowRight")
        one.settle()
    assert focused(one) == "tab: Intervene"
    press_until(one, "^gridcell")
    with one.page.expect_response("**/explore/read"):
        keyboard.press("Enter")
    one.settle()
    assert "After" in one.panel.inner_text()


def test_focus_is_always_seen(open_page: Open) -> None:
    one = open_page(model="gpt")
    unseen: list[str] = []
    for _ in range(25):
        one.page.keyboard.press("Tab")
        # The ring may be the element's own, or drawn by what stands for it (a radio's label).
        if not one.page.evaluate(
            f"""() => {{ const at = {FOCUSED};
              const ringed = (node) => node && [getComputedStyle(node)].some(
                (style) => style.outlineStyle !== 'none' || style.boxShadow !== 'none');
              return at === document.body || ringed(at) || ringed(at.nextElementSibling) || ringed(at.parentElement); }}"""
        ):
            unseen.append(focused(one))
    assert unseen == []


def test_every_canvas_has_its_words(open_page: Open) -> None:
    """A name, a summary and a table of its numbers; thumbnails and the colour key have a name only."""
    one = open_page(model="gpt")
    for panel in one.page.locator("[role=tab]").evaluate_all("tabs => tabs.map(tab => tab.id.slice(4))"):
        one.tab(panel)
        for figure in one.panel.locator("figure").all():
            name = figure.locator("canvas[aria-label]").first.get_attribute("aria-label")
            assert name, panel
        summaries = [text.strip() for text in one.panel.locator("figcaption > p:visible").all_inner_texts()]
        assert all(summaries), (panel, summaries)
        tables = one.panel.locator("figcaption details:not([hidden])").count()
        assert tables >= len(summaries), (panel, tables, len(summaries))


def test_the_guided_walk_ends_where_it_began(open_page: Open) -> None:
    one = open_page(model="gpt")
    start = one.page.get_by_role("button", name="Show me around")
    start.focus()
    one.page.keyboard.press("Enter")
    dialog = one.page.get_by_role("dialog")
    seen: list[str] = []
    for _ in range(10):
        seen.append(dialog.get_by_role("heading").inner_text())
        assert one.page.locator(".walked").count() == 1, seen[-1]
        one.page.keyboard.press("Enter")
        one.settle()
        if not dialog.count():
            break
    assert len(set(seen)) == len(seen) == 7
    assert start.evaluate("one => one === document.activeElement")
    start.click()
    one.page.keyboard.press("Escape")
    assert not dialog.count()
