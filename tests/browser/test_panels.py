"""Every panel used on every shape of model that has it, in a real browser against the real server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from tests.browser.conftest import Open
from tests.browser.opened import Opened

HEADS_OF_LAYER = 4
TABS = {
    "gpt": "model heads follow lens flow intervene attribution patching generate positions sandbox geometry cost",
    "classes": "model heads follow lens flow intervene positions sandbox geometry cost",
    "masked": "model heads follow lens flow intervene positions sandbox geometry cost",
    "translator": "model heads follow lens flow intervene generate positions sandbox geometry cost",
    "digits": "model heads follow lens flow intervene attribution positions sandbox cost",
}
ELSEWHERE = {"follow", "attribution", "patching"}  # used in test_follow.py and test_causes.py
CASES = [(model, panel) for model, panels in TABS.items() for panel in panels.split() if panel not in ELSEWHERE]


@pytest.mark.parametrize("model", list(TABS))
def test_a_model_has_the_panels_it_can_fill(open_page: Open, model: str) -> None:
    one = open_page(model=model)
    tabs = one.page.locator("[role=tab]").evaluate_all("tabs => tabs.map(tab => tab.id.slice(4))")
    assert tabs == TABS[model].split()
    assert one.errors == []


@pytest.mark.slow
@pytest.mark.parametrize(("model", "panel"), CASES)
def test_panel(open_page: Open, places: dict[str, Path], model: str, panel: str) -> None:
    one = open_page(model=model, panel=panel)
    assert one.errors == []
    USES[panel](one, places[model], model)
    assert one.errors == []


def use_heads(one: Opened, place: Path, model: str) -> None:
    page, panel = one.page, one.panel
    cells = panel.locator("[role=gridcell].here")
    n_layers = ch.load(place).config.n_layers
    assert cells.count() == n_layers * HEADS_OF_LAYER
    cells.nth(HEADS_OF_LAYER + 2).click()
    one.settle()
    assert panel.get_by_role("heading", name="Layer 1, head 2").count() == 1
    state = one.state()
    assert state["head"] == "2"
    assert re.search(r"\bblocks\.1\.", state["site"])
    large = panel.get_by_label("Attention map").first
    assert one.colours(large) > 3
    before = one.picture(large)
    one.choose("linear")
    assert one.picture(large) != before
    assert one.state()["scale"] == "linear"
    panel.get_by_label("Zoom in").click()
    panel.get_by_label("Show the whole map").click()
    if model == "digits":  # of two choices both are shown
        one.choose("focus (low entropy)")
    else:
        panel.get_by_label("Order by").select_option("entropy")
    scores = [float(text.split()[-1]) for text in cells.evaluate_all("all => all.map(one => one.dataset.score)")]
    assert scores == sorted(scores), "low entropy first"
    # A row in focus shades the tokens by its weights.
    if model == "digits":
        page.get_by_label("The picture and its patches").first.hover()
    else:
        page.locator(".strip [role=option]").last.hover()
        assert page.locator(".strip [role=option][style*='background']").count() >= 1
    assert re.search("attends most to", panel.locator(".readout").inner_text())
    if model == "translator":
        hard = panel.get_by_label("Hard alignment")
        assert hard.is_checked()
        hard.uncheck()
        one.choose("decoder")
        assert one.state()["attention"] == "decoder"


def use_lens(one: Opened, place: Path, model: str) -> None:
    canvas = one.panel.get_by_label("Likeliest token by layer and position").first
    assert one.colours(canvas) > 3
    canvas.click(position={"x": 60, "y": 45})
    one.settle()
    assert one.state()["lens.layer"] == "0"
    bars = one.panel.locator(".cell-top .bars li")
    labels = len(ch.load(place).config.labels)
    assert bars.count() == min(10, labels or 10)
    canvas.focus()
    one.page.keyboard.press("ArrowDown")
    one.settle()
    assert one.state()["lens.layer"] == "1"
    one.choose("rank of the final class" if labels else "rank of the actual token")
    assert one.state()["lens.by"] == "rank"


def use_flow(one: Opened, place: Path, model: str) -> None:
    assert "not an explanation" in one.panel.inner_text()
    assert one.colours(one.panel.get_by_label("Rollout map").first) > 3
    assert "Rollout" in one.panel.locator("figcaption > p").inner_text()
    if model == "translator":
        one.choose("decoder")
        assert one.state()["flow.stack"] == "decoder"


def use_intervene(one: Opened, place: Path, model: str) -> None:
    page, panel = one.page, one.panel
    cells = panel.locator("[role=gridcell]")
    with page.expect_response("**/explore/read"):
        cells.nth(1).click()
    one.settle()
    assert cells.nth(1).get_attribute("aria-selected") == "true"
    assert re.search(r"blocks\.0\.\w+:1:zero", one.state()["changes"])
    text = panel.inner_text()
    assert "Before" in text
    assert "After" in text
    panel.get_by_label("Undo layer 0, head 1").click()
    one.settle()
    assert "changes" not in one.state()
    panel.get_by_role("button", name="Try every head").click()
    panel.get_by_text("The 20 largest changes").wait_for()
    one.settle()
    n_heads = cells.count()
    assert panel.locator("table tbody tr").count() == min(20, n_heads)
    if model == "gpt":
        one.choose("from another text")
        cells.nth(0).click()
        assert "other text" in panel.locator(".error").inner_text()
        panel.get_by_label("The other text, as many tokens as the first").fill(
            "The dog lay on the rug. The cat sat on the mat. The dog"
        )
        page.wait_for_timeout(300)
        with page.expect_response("**/explore/read"):
            cells.nth(0).click()
        one.settle()
        assert one.state()["changes"].endswith(":0:patch")


def use_generate(one: Opened, place: Path, model: str) -> None:
    panel = one.panel
    one.choose("Sampling")
    rows = panel.locator(".chances li")
    assert rows.count() == 24
    drawn = panel.locator(".so-far .drawn").inner_text()
    assert panel.locator(".knobs output").all_inner_texts() == ["1", "off", "off", "off", "off"]
    take = panel.get_by_role("button", name="Take the drawn token")
    take.evaluate("take => { take.click(); take.click(); }")
    one.settle()
    assert len(one.state()["generate.written"].split(",")) == 1, "the second press came before another was drawn"
    panel.get_by_role("button", name="Step back").click()
    one.settle()
    assert panel.locator(".so-far .drawn").inner_text() == drawn, "the same seed draws the same token"
    panel.get_by_label("Top-k").fill("5")
    one.settle()
    assert panel.locator(".chances li.gone").count() == 24 - 5
    one.choose("Beam search")
    assert panel.locator(".results li").count() >= 1
    tree = panel.get_by_label("The tree of beam search; arrow keys move through it").first
    assert one.colours(tree) > 3
    tree.focus()
    one.page.keyboard.press("ArrowRight")
    one.page.keyboard.press("ArrowDown")
    assert re.search(r"step \d+, score", panel.locator(".working").inner_text())
    panel.get_by_label("Beams").fill("2")
    one.settle()
    assert "with 2 beams" in panel.locator("figcaption > p").first.inner_text()


def use_positions(one: Opened, place: Path, model: str) -> None:
    panel = one.panel
    assert panel.locator(".gallery .card").count() >= 3
    assert panel.locator(".gallery .badge").count() == 1
    for canvas in panel.locator(".gallery canvas").all():
        assert one.colours(canvas) > 3
    one.choose("The numbers themselves")
    panel.get_by_label("Positions", exact=True).fill("16")
    one.settle()
    assert one.state()["positions.length"] == "16"


def use_sandbox(one: Opened, place: Path, model: str) -> None:
    panel = one.panel
    panel.get_by_label("Queries, sat, number 1").fill("1.7")
    for scaled in (True, False):
        panel.get_by_label("Divide by √d").set_checked(scaled)
        for causal in (True, False):
            panel.get_by_label("Causal mask").set_checked(causal)
            q, k, v = (numbers(one, name) for name in ("Queries", "Keys", "Values"))
            scores = torch.tensor(q @ k.T / (np.sqrt(q.shape[1]) if scaled else 1))
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            weights = scores.softmax(-1).numpy()
            # Two decimals are shown.
            assert np.allclose(shown(one, "Weights"), weights, atol=0.0051)
            assert np.allclose(shown(one, "Output"), weights @ v, atol=0.0051)


def numbers(one: Opened, name: str) -> np.ndarray:
    cells = one.panel.locator(f"input[aria-label^='{name},']")
    values = cells.evaluate_all("all => all.map(one => one.valueAsNumber)")
    rows = one.panel.locator(f"input[aria-label^='{name},'][aria-label$='number 1']").count()
    return np.array(values).reshape(rows, -1)


def shown(one: Opened, name: str) -> np.ndarray:
    rows = one.panel.locator(f"table[aria-label='{name}'] tbody tr").all()
    return np.array([[float(x.replace("−", "-")) for x in row.locator("td").all_inner_texts()] for row in rows])


def use_geometry(one: Opened, place: Path, model: str) -> None:
    panel = one.panel
    assert one.colours(panel.get_by_label(re.compile("Angles between pairs")).first) > 3
    assert one.colours(panel.get_by_label(re.compile("Tokens in two dimensions")).first) > 3
    panel.get_by_label("Token", exact=True).fill("the")
    panel.get_by_role("button", name="Find").click()
    one.settle()
    found = panel.locator(".bars .token").all_inner_texts()
    likeness = [float(text) for text in panel.locator(".bars b").all_inner_texts()]
    assert likeness == sorted(likeness, reverse=True)
    tokenizer = ch.load_tokenizer(place)
    loaded: Any = ch.load(place)
    directions = torch.nn.functional.normalize(loaded.tokens.weight.detach().float(), dim=-1)
    (at,) = tokenizer.encode("the", special=False)
    best = (directions @ directions[at]).index_fill(0, torch.tensor([at]), -2).topk(len(found))
    assert likeness == pytest.approx([round(float(x), 2) for x in best.values], abs=0.011)


def use_cost(one: Opened, place: Path, model: str) -> None:
    panel = one.panel
    n_params = sum(weight.numel() for weight in ch.load(place).parameters())
    stats = panel.locator(".stats").first
    told = re.search(r"parameters\s+([\d.,]+) ?([kM]?)", stats.inner_text())
    assert told
    factor = {"": 1, "k": 1e3, "M": 1e6}[told[2]]
    assert float(told[1].replace(",", "")) * factor == pytest.approx(n_params, rel=0.01)
    before = stats.inner_text()
    panel.get_by_label("Layers").fill("24")
    one.settle()
    assert stats.inner_text() != before
    panel.get_by_role("button", name="Back to the model as it is").click()
    one.settle()
    assert stats.inner_text() == before
    measure = panel.get_by_role("button", name="Measure here")
    assert measure.count() == (model != "digits"), "a model of pictures has one length only"
    if model != "digits":
        measure.click()
        one.settle()
        panel.locator(".legend").get_by_text("measured, the model").wait_for()
    for canvas in panel.locator("canvas").all():
        assert one.colours(canvas) > 3


def use_model(one: Opened, place: Path, model: str) -> None:
    """Every part opens its panel, by click and by keyboard, and the parameters are the model's."""
    parts = one.panel.locator(".diagram [role=link]")
    n_params = sum(weight.numel() for weight in ch.load(place).parameters())
    one.panel.get_by_text("As a table").click()
    counts = one.panel.locator("table tbody td:last-child").all_inner_texts()
    assert sum(int(each.replace(",", "")) for each in counts) == n_params
    assert parts.count() == len(counts)
    for number, wanted in enumerate(parts.evaluate_all("all => all.map(part => part.dataset.panel)")):
        one.tab("model")
        parts.nth(number).focus()
        one.page.keyboard.press("Enter")
        one.settle()
        tabs = one.page.locator("[role=tab]").evaluate_all("all => all.map(tab => tab.id.slice(4))")
        assert one.state()["panel"] == (wanted if wanted in tabs else "cost"), number
        assert one.errors == [], number
    one.tab("model")
    wanted = {"translator": ("cross-attention", "cross")}.get(model, ("attention", "attention"))
    parts.filter(has_text=wanted[0]).first.click()
    one.settle()
    assert one.state()["attention"] == wanted[1]
    one.tab("model")


USES: dict[str, Callable[[Opened, Path, str], None]] = {
    "model": use_model,
    "heads": use_heads,
    "lens": use_lens,
    "flow": use_flow,
    "intervene": use_intervene,
    "generate": use_generate,
    "positions": use_positions,
    "sandbox": use_sandbox,
    "geometry": use_geometry,
    "cost": use_cost,
}
