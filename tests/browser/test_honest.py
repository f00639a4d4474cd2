"""The page never says a false thing: what each sentence claims is so, and nothing old stands beside something new."""

from __future__ import annotations

import re

import pytest

from tests.browser.conftest import Open
from tests.browser.opened import Opened
from tests.browser.test_access import EVERY

CHANGE = "blocks.1.attention:0:zero,blocks.2.attention:3:zero"


def visible_errors(one: Opened) -> list[str]:
    return [each.inner_text() for each in one.page.locator(".error").all() if each.is_visible()]


def test_an_encoder_without_a_head_tells_how_its_states_turn(open_page: Open) -> None:
    one = open_page(model="states", panel="intervene", text="the cat sat", changes=CHANGE)
    words = one.panel.locator(".before-after").inner_text()
    assert "text" not in words, "there is no text that could stay or change"
    assert "States that turned most" in words
    cosines = [float(each) for each in one.panel.locator(".before-after .bars b").all_inner_texts()]
    assert cosines == sorted(cosines)
    assert cosines[0] < 1
    assert "loss" not in one.panel.inner_text(), "there is nothing to measure"


def test_a_sweep_is_signed(open_page: Open) -> None:
    """Heads without which the model gets better are not said to matter most."""
    one = open_page(model="gpt", panel="intervene", text="the cat sat on the mat. the cat")
    one.panel.get_by_role("button", name="Try every head").click()
    one.panel.get_by_text("The 20 largest changes").wait_for()
    one.settle()
    one.panel.get_by_text("The 20 largest changes").click()
    rows = [row.locator("td").all_inner_texts() for row in one.panel.locator("table tbody tr").all()]
    losses = {row[0]: float(row[1].replace("\u2212", "-").replace("+", "")) for row in rows}
    assert min(losses.values()) < 0 < max(losses.values()), "this model has heads of both kinds"
    words = one.panel.locator(".note", has_text="Bars:").inner_text()
    hurts, helps = (max(losses, key=lambda name: sign * losses[name]) for sign in (1, -1))
    assert f"Removing {hurts} hurts most" in words
    assert f"Removing {helps} helps most" in words
    kinds = one.panel.locator("[role=gridcell]").evaluate_all(
        "all => all.map(each => [each.dataset.effect, getComputedStyle(each, '::after').backgroundColor])"
    )
    assert len({colour for kind, colour in kinds if kind == "better"}) == 1
    assert {colour for kind, colour in kinds if kind == "better"} != {
        colour for kind, colour in kinds if kind == "worse"
    }


def test_generate_follows_the_changes_and_says_so(open_page: Open) -> None:
    one = open_page(model="gpt", panel="generate", text="the cat sat")
    before = one.panel.locator(".chances").inner_text()
    assert one.page.locator("#changed").is_hidden()
    one = open_page(model="gpt", panel="generate", text="the cat sat", changes=CHANGE)
    assert one.panel.locator(".chances").inner_text() != before
    assert "2 heads changed" in one.page.locator("#changed").inner_text()
    one.page.get_by_role("button", name="Undo all").first.click()
    one.settle()
    assert one.panel.locator(".chances").inner_text() == before
    assert one.page.locator("#changed").is_hidden()


@pytest.mark.parametrize("panel", EVERY.split())
def test_every_panel_says_that_heads_are_changed(open_page: Open, panel: str) -> None:
    one = open_page(model="gpt", panel=panel, changes=CHANGE)
    words = one.page.locator("#changed").inner_text()
    assert "2 heads changed" in words
    assert ("without the change" in words) == (panel in ("positions", "sandbox", "geometry", "cost"))


def test_a_lens_of_a_long_text_opens_on_the_token_of_the_card(open_page: Open) -> None:
    text = "the cat sat on the mat. " * 60
    one = open_page(model="long", panel="lens", text=text)
    n = len(one.tokens())
    assert n > 256
    assert one.state()["lens.position"] == str(n - 1)
    card = one.page.locator(".answer .bars .token").all_inner_texts()[:4]
    assert one.panel.locator(".cell-top .bars .token").all_inner_texts()[:4] == card
    assert one.panel.locator(".lens-scroll").evaluate("box => box.scrollLeft + box.clientWidth >= box.scrollWidth - 8")


def test_nothing_old_stands_under_an_error(open_page: Open) -> None:
    one = open_page(model="gpt", text="the cat sat")
    assert one.panel.is_visible()
    one.complaints.clear()
    one.page.get_by_label("Text", exact=True).fill("the cat sat on the mat " * 40)
    one.page.locator(".error").first.wait_for()
    one.page.wait_for_timeout(400)
    assert len(visible_errors(one)) == 1, "one error, said once"
    assert one.panel.is_hidden(), "no picture of the text before"
    assert one.page.locator(".answer").is_hidden()
    one.type("the dog")
    assert visible_errors(one) == []
    assert one.panel.is_visible()
    assert one.page.locator(".answer").is_visible()
    one.complaints[:] = [
        each for each in one.complaints if "400" not in each
    ]  # the browser's own line for the refused text


def test_a_failed_search_hides_the_neighbours_found_before(open_page: Open) -> None:
    one = open_page(model="gpt", panel="geometry")
    assert one.panel.locator(".bars").is_visible()
    one.panel.get_by_label("Token", exact=True).fill("no such token at all")
    one.panel.get_by_role("button", name="Find").click()
    one.panel.locator(".error").wait_for()
    assert one.panel.locator(".bars").is_hidden()
    one.complaints[:] = [each for each in one.complaints if "400" not in each]


def test_a_masked_model_says_whether_a_token_is_masked(open_page: Open) -> None:
    one = open_page(model="masked", text="the cat sat")
    words = one.page.locator(".answer").inner_text()
    assert "No token is masked" in words
    assert "At the mask" not in words
    one.type("the <mask> sat")
    assert "At the mask" in one.page.locator(".answer").inner_text()


def test_a_model_of_pictures_has_no_words_for_tokens(open_page: Open) -> None:
    one = open_page(model="digits", panel="lens")
    assert one.panel.locator(".cell-top h3").inner_text().startswith("Of the whole input")
    assert "token" not in one.panel.inner_text().lower()
    one.tab("intervene")
    assert one.panel.get_by_label("Measure the loss of").get_attribute("placeholder") == "the class it chose"
    one.tab("heads")
    assert one.panel.get_by_label("Order by").count() + one.panel.get_by_role("radio", name="induction").count() <= 1
    assert one.panel.get_by_role("radio", name="induction").count() == 0
    assert "first token" not in one.panel.locator(".one").inner_text()
    one = open_page(model="masked", panel="lens", text="the <mask> sat")
    assert one.panel.locator(".cell-top h3").inner_text().startswith("At")


def test_geometry_and_cost_claim_nothing_that_is_not_measured(open_page: Open) -> None:
    one = open_page(model="gpt", panel="geometry")
    assert "do not" not in one.panel.inner_text()
    one.tab("cost")
    legend = one.panel.locator(".card", has_text="The operations of attention").locator(".legend")
    assert legend.locator("span").all_inner_texts() == [
        "projections",
        "attention",
        "feed-forward",
        "output projection",
        "operations",
    ], "as on the drawing: a head is one of attention's"
    time = one.panel.locator(".card", has_text="Time on this machine")
    assert "at least" in time.locator(".legend").inner_text()
    assert "forecast" not in time.inner_text()


def test_an_unknown_model_is_said_to_be_unknown(open_page: Open) -> None:
    one = open_page(model="nope")
    assert re.search("no model .*nope.* here", visible_errors(one)[0])
    one.page.get_by_label("Model").select_option("gpt")
    one.settle()
    assert visible_errors(one) == []
