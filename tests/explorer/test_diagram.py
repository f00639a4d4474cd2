"""The drawing of a model: every parameter is on one part, and the sums are those of `ch.cost`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.costs.parameters import count_parameters
from clearhead.explorer.diagram import draw_model, parts_of

ROOMS = {"positions": "embedding", "cross": "attention"}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", ch.presets())
def test_parts_sum_to_the_forecast(name: str) -> None:
    config = ch.preset(name)
    found: Counter[str] = Counter()
    for part in (part for stack in parts_of(config).values() for part in stack):
        found[ROOMS.get(part.kind, part.kind)] += part.params
    assert found == Counter(count_parameters(config))


def test_the_parts_of_a_pruned_model() -> None:
    config = ch.preset("gpt2", n_layers=2, pruned_heads=("blocks.1.attention.3",))
    (parts,) = parts_of(config).values()
    assert sum(part.params for part in parts) == sum(count_parameters(config).values())


@pytest.mark.parametrize("name", ["gpt2", "transformer-base", "bert-base", "vit-b-16", "t5-small", "whisper-tiny"])
def test_the_drawing(name: str) -> None:
    config = ch.preset(name)
    drawn = ElementTree.fromstring(draw_model(config))
    links = [each for each in drawn.iter(f"{SVG}g") if each.get("role") == "link"]
    parts = [part for stack in parts_of(config).values() for part in stack]
    assert len(links) == len(parts)
    assert all(link.get("data-panel") and link.get("tabindex") == "0" for link in links)
    # What a step computes is added at a plus; so are positions, but not those that act inside attention.
    pluses = list(drawn.iter(f"{SVG}circle"))
    added = [part for part in parts if part.kind in ("attention", "cross", "feedforward")]
    added += [part for part in parts if part.kind == "positions" and config.positions != "t5"]
    assert len(pluses) == len(added)
    words = " ".join(drawn.itertext())
    assert f"\u00d7 {config.n_layers}" in words
    assert "causal attention" in words or config.shape == "encoder"


def test_the_norm_is_where_the_config_says() -> None:
    def order(**changes: bool) -> list[str]:
        (parts,) = parts_of(ch.preset("gpt2", **changes)).values()
        return [part.kind for part in parts if part.in_block]

    assert order(norm_first=True) == ["norm", "attention", "norm", "feedforward"]
    assert order(norm_first=False) == ["attention", "norm", "feedforward", "norm"]


def test_draw_command(tmp_path: Path) -> None:
    file = tmp_path / "gpt2.svg"
    ran = CliRunner().invoke(app, ["draw", "gpt2", "--out", str(file)])
    assert ran.exit_code == 0, ran.output
    assert "124,439,808 parameters" in ran.output
    assert file.read_text(encoding="utf-8") == draw_model(ch.preset("gpt2"))
    ran = CliRunner().invoke(app, ["draw", "gpt2", "--json"])
    assert sum(row["parameters"] for row in json.loads(ran.output)) == 124_439_808
    ran = CliRunner().invoke(app, ["draw", "gtp2"])
    assert ran.exit_code == 1
    assert "gpt2" in str(ran.exception)
