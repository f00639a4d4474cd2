"""Layers as they are done, parts that are switched off, attribution and patching, in the browser."""

from __future__ import annotations

import re
import time

from playwright.sync_api import Route

from tests.browser.conftest import Open

TEXT = "the cat sat on the mat"


def test_the_first_map_does_not_wait_for_the_pass(open_page: Open) -> None:
    """While the server has not answered what the model predicts, tokens, thumbnails and a map are there; typing ends the wait."""
    one = open_page(model="deep", text="the")
    held: list[Route] = []

    def hold(route: Route) -> None:
        # The first request answers tokens and a few layers; the others of this text never come back.
        if "within" in (route.request.post_data or "") and "cat" in (route.request.post_data or ""):
            if held:
                held.append(route)
                return
            held.append(route)
            body = (route.request.post_data or "").replace('"within":80', '"within":0')
            route.continue_(post_data=body)
            return
        route.continue_()

    one.page.route("**/explore/read", hold)
    one.page.get_by_label("Text", exact=True).fill(TEXT)
    one.page.locator(".answer progress").wait_for()
    assert re.fullmatch(r"Layer \d+ of 30", one.page.locator(".answer h2").inner_text())
    one.page.wait_for_function("document.querySelector('.one .summary')?.textContent.includes('×')")
    assert one.page.locator(".head.here").count() >= 8
    assert one.colours(one.panel.get_by_label("Attention map").first) > 3
    assert "cat" in "".join(one.tokens())
    assert one.page.locator(".answer progress").count() == 1, "the answer is still on its way"
    one.page.get_by_label("Text", exact=True).fill("the dog")
    end = time.monotonic() + 8
    while one.page.locator(".answer .bars").count() == 0 and time.monotonic() < end:
        one.page.wait_for_timeout(20)
    one.settle()
    assert "dog" in "".join(one.tokens())
    assert len(held) <= 2, "what belongs to the text before is not asked for any more"


def test_whole_parts_are_switched_off(open_page: Open) -> None:
    one = open_page(model="gpt", panel="intervene", text=TEXT)
    one.panel.get_by_role("button", name="Feed-forward 1", exact=True).click()
    one.settle()
    assert one.state()["changes"] == "blocks.1.feedforward:*:zero"
    assert "Before" in one.panel.locator(".before-after").inner_text()
    assert one.page.locator("#changed .badge").inner_text() == "1 part changed"
    one.panel.get_by_role("button", name="Layer 2", exact=True).click()
    one.settle()
    assert one.panel.get_by_role("button", name="Attention 2", exact=True).get_attribute("aria-pressed") == "true"
    assert one.page.locator("#changed .badge").inner_text() == "3 parts changed"
    one.panel.get_by_role("button", name="Layer 2", exact=True).click()
    one.settle()
    assert one.state()["changes"] == "blocks.1.feedforward:*:zero"
    before = one.page.locator(".answer").inner_text()
    one.tab("generate")
    assert one.panel.locator(".chances b").first.inner_text() in before, "Generate has the change, too"


def test_scaled_heads_keep_their_factor(open_page: Open) -> None:
    one = open_page(model="gpt", panel="intervene", text=TEXT, how="scale", by="2.5")
    one.panel.locator("[role=gridcell]").first.click()
    one.settle()
    assert one.state()["changes"] == "blocks.0.attention:0:x2.5"
    assert "× 2.5" in one.panel.locator(".before-after + .row").inner_text()
    assert one.errors == []


def test_parts_of_the_logit_sum_to_it(open_page: Open) -> None:
    one = open_page(model="gpt", panel="attribution", text=TEXT)
    words = one.panel.locator(".note", has_text="parts sum to").inner_text()
    logit, total = re.findall(r"is (-?[\d.]+)\. The \d+ parts sum to (-?[\d.]+)\.", words)[0]
    assert abs(float(logit) - float(total)) <= 2e-3
    assert one.panel.locator(".signed li").count() == 14
    one.panel.get_by_label("Token", exact=True).fill(" cat")
    one.panel.get_by_label("Token", exact=True).press("Enter")
    one.settle()
    assert "cat" in one.panel.locator(".note", has_text="parts sum to").inner_text()
    assert one.state()["token"] == " cat"
    one.panel.get_by_label("Token", exact=True).fill("nothing like it")
    one.panel.get_by_label("Token", exact=True).press("Enter")
    one.settle()
    assert "not one token" in one.errors[0]
    one.complaints.clear()  # the browser reports a refused request, too


def test_nothing_to_save_before_texts_are_compared(open_page: Open) -> None:
    one = open_page(model="gpt", panel="patching", text=TEXT, token=" the", against=" cat")
    assert one.panel.locator("figure").is_hidden()
    one.panel.get_by_label("The other text, with as many tokens").fill("the dog ran on the hill")
    one.panel.locator("figure").wait_for()


def test_patching_two_texts(open_page: Open) -> None:
    one = open_page(
        model="gpt", panel="patching", text=TEXT, second="the dog ran on the hill", token=" the", against=" cat"
    )
    one.page.wait_for_function("document.querySelector('#panel .summary')?.textContent.includes('3 of 3 layers')")
    one.settle()
    assert one.errors == []
    canvas = one.panel.locator("canvas")
    assert one.colours(canvas) > 3
    canvas.focus()
    one.page.keyboard.press("ArrowDown")
    one.page.keyboard.press("ArrowRight")
    assert "of the way" in one.panel.locator(".readout").inner_text()
    one.panel.get_by_label("The other text, with as many tokens").fill("the dog")
    one.page.wait_for_timeout(400)
    one.settle()
    assert "as many tokens" in one.errors[0]
    one.complaints.clear()


def test_neurons_are_listed_and_switched_off(open_page: Open) -> None:
    one = open_page(model="gpt", panel="intervene", text=TEXT)
    one.panel.get_by_text("Neurons of a feed-forward layer").click()
    one.settle()
    rows = one.panel.locator(".neurons tbody tr")
    assert rows.count() == 12
    assert all(len(row.locator("td").all_inner_texts()) == 3 for row in rows.all()), (
        "value, tokens, and what it makes likelier"
    )
    values = [abs(float(row.locator("td").first.inner_text().replace("\u2212", "-"))) for row in rows.all()]
    assert values == sorted(values, reverse=True)
    first = rows.first.get_by_role("button")
    number = first.inner_text()
    first.click()
    one.settle()
    assert one.state()["changes"] == f"blocks.2.feedforward:{number}:zero"
    assert f"layer 2, neuron {number}: zero" in one.panel.inner_text()
    assert one.page.locator("#changed .badge").inner_text() == "1 part changed"
    assert one.panel.get_by_role("button", name=f"Neuron {number}", exact=True).count() <= 1
    one.panel.locator("details.more select").first.select_option("0")
    one.settle()
    assert one.state()["neurons"] == "0"
    assert one.errors == []


def test_steering_changes_the_answer_and_what_generate_writes(open_page: Open) -> None:
    one = open_page(model="gpt", panel="intervene", text=TEXT)
    one.panel.get_by_text("Steer towards another text").click()
    one.panel.get_by_role("button", name="Steer", exact=True).click()
    assert "Write both texts" in one.panel.inner_text()
    one.panel.get_by_label("Towards the text").fill("hello there")
    one.panel.get_by_label("Away from the text").fill("a dog ran")
    one.page.wait_for_timeout(400)
    with one.page.expect_response("**/explore/read"):
        one.panel.get_by_role("button", name="Steer", exact=True).click()
    one.settle()
    assert one.errors == []
    assert one.state()["changes"] == "blocks.2.residual:*:s2"
    assert "layer 2, steered \u00d7 2" in one.panel.inner_text()
    assert "Before" in one.panel.locator(".before-after").inner_text()
    first = one.page.locator(".answer .token").first.inner_text()
    address = one.page.url
    one.tab("generate")
    assert one.panel.locator(".chances .token").first.inner_text() == first, "Generate has the vector, too"
    assert one.page.locator("#changed .badge").inner_text() == "1 part changed"
    one.tab("attribution")
    assert "undo the steering" in one.errors[0], "a sum that leaves the vector out would be false"
    one.complaints.clear()
    again = open_page(address)
    assert again.panel.get_by_role("button", name="Undo the steering").is_visible(), "the address has all of it"
    again.panel.get_by_role("button", name="Undo the steering").click()
    again.settle()
    assert "changes" not in again.state()
