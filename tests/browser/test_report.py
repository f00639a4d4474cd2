"""report.html in a browser: whole on a phone, its recipe folded, with the way to the explorer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clearhead.training.report import write_report
from clearhead.training.report_figures import AttentionPicture
from tests.browser.conftest import Open
from tests.training.test_report import run_folder

TITLE = "Cross-attention of layer 1, the mean of its heads"


@pytest.mark.parametrize(("width", "theme"), [(1440, "light"), (390, "dark")])
def test_a_report_is_whole(open_page: Open, tmp_path: Path, width: int, theme: str) -> None:
    names = [f"token{n}" for n in range(9)]
    picture = AttentionPicture(TITLE, names, names, torch.randn(9, 9).softmax(-1))
    file = write_report(run_folder(tmp_path), attention=[picture])
    one = open_page("about:blank", width=width, system=theme)
    page = one.page
    page.goto(file.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert f"clearhead explore {file.parent}" in page.locator("header").inner_text()
    assert TITLE in page.locator("figcaption").inner_text()
    assert page.get_by_text("steps = 101").is_hidden(), "the recipe is folded"
    page.get_by_text("Recipe", exact=True).click()
    assert page.get_by_text("steps = 101").is_visible()
    # Axes and names lie within their picture, and are large enough to be read.
    cut = page.locator("svg").evaluate_all(
        """all => all.flatMap(svg => {
             const frame = svg.getBoundingClientRect();
             return [...svg.querySelectorAll('text')].filter(text => {
               const {left, right, top, bottom} = text.getBoundingClientRect();
               return left < frame.left - 1 || right > frame.right + 1 || top < frame.top - 1 || bottom > frame.bottom + 1;
             }).map(text => text.textContent);
           })"""
    )
    assert cut == []
    heights = page.locator(".loss text").evaluate_all("all => all.map(text => text.getBoundingClientRect().height)")
    assert min(heights) >= 10
