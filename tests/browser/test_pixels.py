"""The page draws the server's numbers, and these are what the hand-built model must give."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest

from clearhead.explorer.wire_format import unpack
from tests.browser.conftest import Open
from tests.browser.models import LETTERS, known_pattern
from tests.browser.opened import Opened

SITE = "blocks.0.attention"
# One pass over the drawn map: at each point its colour and its tooltip. Nothing is drawn in between, since drawing waits for the
# next frame.
SURVEY = """canvas => {
  const {width, height} = canvas, box = canvas.getBoundingClientRect(), ratio = width / box.width;
  const colours = canvas.getContext('2d').getImageData(0, 0, width, height).data;
  const found = {};
  for (let y = 1; y < box.height; y += 6) for (let x = 1; x < box.width; x += 6) {
    canvas.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + x, clientY: box.top + y}));
    const tip = document.querySelector('.tip');
    const cell = tip && !tip.hidden ? tip.textContent.replace(/[\\u2068\\u2069]/g, '') : null;
    if (cell) (found[cell] ??= []).push([x, y]);
  }
  return Object.entries(found).map(([cell, points]) => {
    const [x, y] = [0, 1].map(i => Math.round(points.reduce((sum, point) => sum + point[i], 0) / points.length * ratio));
    return [cell, Array.from(colours.slice(4 * (y * width + x), 4 * (y * width + x) + 3))];
  });
}"""
LEGEND = "c => Array.from(c.getContext('2d').getImageData(0, 0, 256, 1).data)"
PICTURE = """async image => {
  await image.decode();
  const canvas = Object.assign(document.createElement('canvas'), {width: image.naturalWidth, height: image.naturalHeight});
  const context = canvas.getContext('2d');
  context.drawImage(image, 0, 0);
  return Array.from(context.getImageData(0, 0, canvas.width, canvas.height).data);
}"""


def ask(address: str, name: str, params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    body = json.dumps(params).encode()
    with urlopen(Request(f"{address}/explore/{name}", body, {"content-type": "application/json"})) as answer:
        return unpack(answer.read())


def run_of(model: str, text: str) -> dict[str, Any]:
    return {"model": model, "text": text, "target": None, "second": None, "changes": []}


def legend(one: Opened) -> np.ndarray:
    """The 256 colours that the map's own key shows, from 0 to 1."""
    return np.array(one.page.locator("canvas.ramp").evaluate(LEGEND)).reshape(256, 4)[:, :3]


def test_server_says_what_the_model_was_built_to_do(address: str) -> None:
    expected = known_pattern(len(LETTERS)).numpy()
    for head in range(4):
        asked = {"run": run_of("pattern", LETTERS), "site": SITE, "head": head, "box": None, "most": 256}
        _, arrays = ask(address, "map", asked)
        # The token embeddings are not quite zero, so that logits differ.
        assert np.abs(arrays["map"] - expected[head]).max() < 2e-3


@pytest.mark.parametrize(("scale", "theme"), [("sqrt", "light"), ("linear", "dark"), ("row max", "light")])
def test_every_cell_of_the_map_has_its_values_colour(open_page: Open, address: str, scale: str, theme: str) -> None:
    one = open_page(model="pattern", text=LETTERS, site=SITE, head=3, scale=scale, theme=theme)
    colours = legend(one)
    cells = dict(one.panel.get_by_label("Attention map").first.evaluate(SURVEY))
    assert len(cells) == len(LETTERS) ** 2
    asked = {"run": run_of("pattern", LETTERS), "site": SITE, "head": 3, "box": None, "most": 256}
    _, arrays = ask(address, "map", asked)
    weights = arrays["map"]
    scaled = {"sqrt": np.sqrt(weights), "linear": weights, "row max": weights / weights.max(1, keepdims=True)}[scale]
    for i, row in enumerate(LETTERS):
        for j, column in enumerate(LETTERS):
            said = f"“{row}” → “{column}”: {weights[i, j]:.4f}"
            assert said in cells
            drawn, wanted = np.array(cells[said]), colours[round(255 * float(scaled[i, j]))]
            assert np.abs(drawn - wanted).max() <= 2, (said, drawn, wanted)  # 2: half a step of rounding in the colours


def test_the_colours_only_ever_grow_darker_or_lighter(open_page: Open) -> None:
    for theme, sign in (("light", -1), ("dark", 1)):
        one = open_page(model="pattern", text=LETTERS, theme=theme)
        luminance = legend(one) @ np.array([0.2126, 0.7152, 0.0722])
        assert (sign * np.diff(luminance) >= -1).all()  # 8 bits a channel
        assert sign * (luminance[-1] - luminance[0]) > 150


@pytest.mark.slow
def test_thumbnails_are_the_servers_bytes_in_the_same_colours(open_page: Open, address: str) -> None:
    one = open_page(model="gpt", theme="light")
    colours = legend(one)
    text = one.page.get_by_label("Text", exact=True).input_value()
    pictures = one.panel.locator("[role=gridcell] img")
    for layer in range(3):
        asked = {"run": run_of("gpt", text), "attention": "attention", "layer": layer, "size": 32}
        _, arrays = ask(address, "grid", asked)
        for head, thumb in enumerate(arrays["thumbs"]):
            drawn: Any = pictures.nth(layer * 4 + head).evaluate(PICTURE)
            assert np.array_equal(np.array(drawn).reshape(*thumb.shape, 4)[..., :3], colours[thumb])
