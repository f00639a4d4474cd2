"""Follow a token: what the page shows is what `ch.probe` records, and the walk ends at the answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch
from tests.browser.conftest import Open
from tests.browser.opened import Opened
from tests.browser.test_access import load_axe, violations

TEXT = "the cat sat on the mat"
# Weights and scores are shown with four or five digits after the point: half of the last is lost.
SHOWN = 5.1e-5


def seen_by_probe(place: Path) -> tuple[Any, torch.Tensor]:
    """Every site of the model on this text, and its output."""
    model: Any = ch.load(place).eval()
    tokenizer = ch.load_tokenizer(place)
    ids = tokenizer.encode(TEXT)
    inputs = [torch.tensor([ids])]
    if model.config.shape == "encoder-decoder":
        inputs = [
            torch.tensor([[*ids, tokenizer.eos]]),
            torch.tensor([[tokenizer.bos, *tokenizer.encode("a dog", special=False)]]),
        ]
    with torch.no_grad(), ch.probe(model) as seen:
        out = model(*inputs)
    return seen, out


def stops(one: Opened) -> list[str]:
    return one.panel.locator(".stops button").all_inner_texts()


def go(one: Opened, name: str) -> None:
    one.panel.locator(".stops").get_by_role("button", name=name, exact=True).first.click()
    one.settle()


def column(one: Opened) -> list[float]:
    """The numbers of the step that is open."""
    return [float(text.replace("−∞", "-inf")) for text in one.panel.locator(".keys td.now").all_inner_texts()]


@pytest.mark.parametrize(
    ("name", "site", "head", "at"),
    [
        ("gpt", "blocks.1.attention", 2, 4),
        ("masked", "blocks.2.attention", 3, 1),
        ("classes", "blocks.0.attention", 0, 2),
        ("states", "blocks.1.attention", 1, 0),
        ("translator", "encoder.blocks.1.attention", 2, 3),
        ("translator", "decoder.blocks.2.attention", 0, 1),
        ("translator", "decoder.blocks.1.cross", 3, 2),
    ],
)
def test_what_is_shown_is_what_probe_records(
    open_page: Open, places: dict[str, Path], name: str, site: str, head: int, at: int
) -> None:
    attention = "cross" if "cross" in site else site.partition(".")[0] if name == "translator" else "attention"
    state: dict[str, Any] = {"attention": attention, "site": site, "head": head, "follow.at": at}
    one = open_page(model=name, panel="follow", text=TEXT, target="a dog", **state)
    seen, out = seen_by_probe(places[name])
    scores, weights = seen[f"{site}.scores"][0, head, at], seen[f"{site}.weights"][0, head, at]
    go(one, "Scale")
    assert column(one) == pytest.approx(scores.tolist(), abs=SHOWN)
    go(one, "Mask")
    assert column(one) == pytest.approx(
        [float(s) if w else -torch.inf for s, w in zip(scores, weights, strict=True)], abs=SHOWN
    )
    go(one, "Softmax")
    assert column(one) == pytest.approx(weights.tolist(), abs=SHOWN / 10)
    # Of a vector every number can be read: with the keyboard here.
    block = site.rpartition(".")[0]
    for step, line, wanted in (
        ("Q, K, V", 0, seen[f"{site}.q"][0, head, at]),
        ("W_O", 0, seen[f"{site}.out"][0, head, at]),
        ("Feed-forward", 1, seen[f"{block}.feedforward.hidden"][0, at]),
        ("Last", 0, seen[f"{block}.residual"][0, at]),
        ("Embedding", -1, seen[f"{site.partition('blocks.')[0]}embedding"][0, at]),
    ):
        go(one, step)
        canvas = one.panel.locator("canvas").first
        lines = canvas.evaluate("canvas => canvas.clientHeight / 54")
        canvas.focus()
        for _ in range(1 + line % round(lines)):
            canvas.press("ArrowDown")
        for number in range(3):
            shown = one.panel.locator(".readout").first.inner_text()
            assert float(shown.rpartition(": ")[2]) == pytest.approx(float(wanted[number]), abs=1e-5), (
                step,
                number,
                shown,
            )
            canvas.press("ArrowRight")
    ends(one, name, attention, out, at)


def ends(one: Opened, name: str, attention: str, out: torch.Tensor, at: int) -> None:
    """The last step: the next token and its probability, or why there is none."""
    go(one, stops(one)[-1])
    if attention == "encoder" or name == "states":
        assert re.search("cross-attention|no head", one.panel.inner_text())
        return
    p = (out[0] if name == "classes" else out[0, at]).softmax(-1)
    shown = one.panel.locator(".bars b").all_inner_texts()
    wanted = [f"{round(float(each) * 100)}%" for each in p.topk(len(shown)).values if float(each) >= 0.0995]
    assert shown[: len(wanted)] == wanted
    go(one, "Logits")
    logits = (out[0] if name == "classes" else out[0, at]).topk(min(10, out.shape[-1])).values
    assert column(one) == pytest.approx(logits.tolist(), abs=SHOWN)


def test_a_patch_is_followed_to_the_class(open_page: Open) -> None:
    one = open_page(model="digits", panel="follow", text="sample:3", **{"follow.at": 5})
    assert "row" not in one.panel.locator(".equation").inner_text()
    go(one, "Softmax")
    assert sum(column(one)) == pytest.approx(1, abs=1e-3)
    go(one, stops(one)[-1])
    above = one.page.locator(".answer .bars li").all_inner_texts()
    assert one.panel.locator(".bars li").all_inner_texts()[: len(above)] == above


def test_by_keyboard_to_the_next_token(open_page: Open) -> None:
    """From the first step to the last by one key; the end is the card above."""
    one = open_page(model="gpt", panel="follow", text=TEXT)
    title = one.panel.locator("#follow-title")
    assert title.inner_text().startswith("1.")
    one.panel.get_by_role("button", name="Next").focus()
    for number in range(2, len(stops(one)) + 1):
        one.page.keyboard.press("ArrowRight")
        assert title.inner_text().startswith(f"{number}.")
    one.settle()
    above = one.page.locator(".answer .bars li").all_inner_texts()
    assert one.panel.locator(".bars li").all_inner_texts()[: len(above)] == above
    assert one.panel.get_by_role("button", name="Next").is_disabled()
    one.page.keyboard.press("ArrowLeft")
    assert title.inner_text().startswith(f"{len(stops(one)) - 1}.")
    assert one.state()["follow.step"] == str(len(stops(one)) - 2)


def test_it_plays_slowly_and_stands_still_where_motion_is_unwanted(open_page: Open) -> None:
    one = open_page(model="gpt", panel="follow", text=TEXT, **{"follow.step": 5})
    play, title = one.panel.get_by_role("button", name="Play"), one.panel.locator("#follow-title")
    play.click()
    assert title.inner_text().startswith("7.")
    assert one.page.locator(".coming").count() == 0  # the contexts of these tests ask for no motion
    one.panel.get_by_role("button", name="Pause").click()
    one.page.emulate_media(reduced_motion="no-preference")
    play.click()
    assert one.page.locator(".coming").count() > 0
    one.page.locator(".coming").first.wait_for(state="detached")
    one.panel.get_by_role("heading", name="9.").wait_for()
    one.panel.get_by_role("button", name="Pause").click()
    one.page.wait_for_timeout(3500)
    assert title.inner_text().startswith("9.")


def test_on_a_phone(open_page: Open) -> None:
    one = open_page(model="gpt", panel="follow", text=TEXT, width=390, height=844)
    for name in dict.fromkeys(stops(one)):
        go(one, name)
        assert one.page.evaluate("document.documentElement.scrollWidth") <= 390, name
    go(one, "Softmax")
    cell = one.panel.locator(".keys td.now").first
    box = cell.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 390


@pytest.mark.parametrize(("model", "theme"), [("gpt", "light"), ("translator", "dark")])
def test_axe_finds_nothing(open_page: Open, model: str, theme: str) -> None:
    one = open_page(model=model, panel="follow", text=TEXT, system=theme, script=load_axe())
    for name in ("Embedding", "Q, K, V", "Softmax", "Logits"):
        go(one, name)
        assert violations(one) == [], name


def test_a_head_in_the_sandbox(open_page: Open, places: dict[str, Path]) -> None:
    """Its q, k and v are there, and over the same tokens so are its weights."""
    text = "the cat"
    one = open_page(model="gpt", panel="follow", text=text, site="blocks.1.attention", head=2)
    go(one, "Q, K, V")
    one.panel.get_by_role("button", name="Open this head in the Sandbox").click()
    one.settle()
    model: Any = ch.load(places["gpt"]).eval()
    ids = ch.load_tokenizer(places["gpt"]).encode(text)
    assert len(ids) <= 6
    with torch.no_grad(), ch.probe(model, "blocks.1.attention.*") as seen:
        model(torch.tensor([ids]))
    for part, title in (("q", "Queries"), ("k", "Keys"), ("v", "Values")):
        fields = one.panel.locator(f"input[aria-label^='{title}']")
        shown = torch.tensor([float(each.input_value()) for each in fields.all()]).view(len(ids), -1)
        torch.testing.assert_close(shown, seen[f"blocks.1.attention.{part}"][0, 2], atol=5.1e-4, rtol=0)
    assert all(field.evaluate("field => field.scrollWidth <= field.clientWidth") for field in fields.all()), (
        "no digit is cut"
    )
    for table in one.panel.locator(".hand table").all():
        assert table.evaluate("table => table.scrollWidth <= table.clientWidth"), "no number is out of sight"
    cells = one.panel.locator("[role=grid] [role=gridcell]").all_inner_texts()
    weights = seen["blocks.1.attention.weights"][0, 2].flatten().tolist()
    assert [float(each) for each in cells] == pytest.approx(weights, abs=0.02)
    assert one.errors == []
