"""The drawing of a model: every parameter is on one part, and the sums are those of `ch.cost`."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.costs.diagram import WIDE
from clearhead.costs.flops import check_lengths, count_forward
from clearhead.costs.model_parts import figures
from clearhead.costs.parameters import count_parameters
from clearhead.costs.pattern_picture import draw_pattern
from clearhead.errors import InputError
from clearhead.sparsity import Pattern

ROOMS = {"positions": "embedding", "cross": "attention"}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", ch.presets())
def test_parts_sum_to_the_forecast(name: str) -> None:
    config = ch.preset(name)
    found: Counter[str] = Counter()
    drawing = ch.draw(config)
    for part in drawing.parts:
        found[ROOMS.get(part.kind, part.kind)] += part.params
    assert found == Counter(count_parameters(config))
    assert sum(part.flops for part in drawing.parts) == sum(count_forward(config, 1, drawing.lengths).values())
    # No words are wider than their box, at 6 units a letter of small text and 7.6 of a name, as wide fonts have.
    for part in drawing.parts:
        is_norm = part.kind == "norm"
        assert (6 if is_norm else 7.6) * len(part.name) + 6 * len(figures(part)) + 8 <= WIDE - 24, part
        assert is_norm or 6 * len(part.words) <= WIDE - 24, part
    letters = repr(drawing)
    assert max(map(len, letters.splitlines())) <= 80
    assert all(part.name in letters and figures(part) in letters for part in drawing.parts)


def test_the_parts_of_a_pruned_model() -> None:
    config = ch.preset("gpt2", n_layers=2, pruned_heads=("blocks.1.attention.3",))
    assert sum(part.params for part in ch.draw(config).parts) == sum(count_parameters(config).values())


@pytest.mark.parametrize("name", ["gpt2", "transformer-base", "bert-base", "vit-b-16", "t5-small", "whisper-tiny"])
def test_the_drawing(name: str) -> None:
    config = ch.preset(name)
    drawn = ElementTree.fromstring(ch.draw(config).svg)
    links = [each for each in drawn.iter(f"{SVG}g") if each.get("role") == "link"]
    parts = ch.draw(config).parts
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


def keeps_at(drawn: list[str], column: float, row: float) -> bool:
    """Whether the path of rectangles covers this point of a picture at 0, 0."""
    found = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)", drawn[-1])
    return any(
        x <= column < x + wide and y <= row < y + high for x, y, wide, high in (map(float, each) for each in found)
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "text", ["block=64, window=2, n_global=1, n_random=3", "window=3, dilation=2", "block=8, window=1, stride=3"]
)
def test_the_picture_of_a_pattern(text: str, causal: bool) -> None:
    """Each cell is dark where the pattern keeps a pair of its blocks."""
    pattern = Pattern.parse(text)
    drawn, words = draw_pattern(pattern, 0, 0, 20 * pattern.block, causal=causal)
    for i in range(20):
        for j in range(20):
            kept = bool(pattern.keeps(i * pattern.block, j * pattern.block)) and (not causal or j <= i)
            assert keeps_at(drawn, 3 * j + 1.5, 3 * i + 1.5) == kept, (i, j)
    assert re.fullmatch(r"keeps [\d.]+% of the pairs", words)


def test_a_wide_pattern_is_drawn_in_groups_of_blocks() -> None:
    drawn, words = draw_pattern(Pattern.parse("window=257, n_global=16"), 0, 0, 1024, causal=True)
    assert keeps_at(drawn, 0.5, 59.5), "global keys"
    assert keeps_at(drawn, 59.5, 59.5)
    assert not keeps_at(drawn, 20.5, 59.5), "outside the window"
    assert not keeps_at(drawn, 59.5, 20.5), "the future"
    assert words == "keeps 46% of the pairs"


def test_a_sparse_model_is_drawn_with_its_pattern() -> None:
    for shape, n in (("gpt2", 1), ("bert-base", 1), ("transformer-base", 2)):
        drawn = ElementTree.fromstring(ch.draw(ch.preset(shape, sparsity="block=16, window=2")).svg)
        assert len([each for each in drawn.iter(f"{SVG}g") if each.get("class") == "pattern"]) == n
        assert "block=16, window=2" in " ".join(drawn.itertext())
    assert 'class="pattern"' not in ch.draw(ch.preset("gpt2")).svg


def test_the_norm_is_where_the_config_says() -> None:
    def order(**changes: bool) -> list[str]:
        return [part.kind for part in ch.draw(ch.preset("gpt2", **changes)).parts if part.in_block]

    assert order(norm_first=True) == ["norm", "attention", "norm", "feedforward"]
    assert order(norm_first=False) == ["attention", "norm", "feedforward", "norm"]


def test_draw_command(tmp_path: Path) -> None:
    file = tmp_path / "gpt2.svg"
    ran = CliRunner().invoke(app, ["draw", "gpt2", "--out", str(file)])
    assert ran.exit_code == 0, ran.output
    assert "124,439,808 parameters" in ran.output
    assert file.read_text(encoding="utf-8") == ch.draw(ch.preset("gpt2")).svg
    ran = CliRunner().invoke(app, ["draw", "gpt2", "--json"])
    assert sum(row["parameters"] for row in json.loads(ran.output)) == 124_439_808
    ran = CliRunner().invoke(
        app, ["draw", "gpt2", "--set", "sparsity=block=64, window=2", "--set", "n_kv_heads=4", "--json"]
    )
    assert "12 heads of 64, 4 kv, sparse" in [row["size"] for row in json.loads(ran.output)]
    ran = CliRunner().invoke(app, ["draw", "gtp2"])
    assert ran.exit_code == 1
    assert "gpt2" in str(ran.exception)


def test_draw_command_takes_lengths() -> None:
    def operations(*words: str) -> int:
        ran = CliRunner().invoke(app, ["draw", "t5-small", *words, "--json"])
        return sum(row["operations"] for row in json.loads(ran.output))

    config = ch.preset("t5-small")
    at = check_lengths(config, 7, 11)
    assert operations("--length", "7", "--source-length", "11") == sum(count_forward(config, 1, at).values())


def test_the_drawing_in_letters() -> None:
    lines = repr(ch.draw(ch.preset("gpt2"), length=128)).splitlines()
    assert lines[0].endswith("↑ logits: T × 50,257")
    assert any(line.startswith("×12 ⊕ feed-forward") for line in lines)
    assert lines[-1] == "on each part: parameters · operations for 128 tokens"


def test_names_and_figures_stay_apart_in_letters() -> None:
    config = ch.preset("transformer-base", norm="rms", norm_first=True, qk_norm=True, d_model=1024, n_heads=16)
    lines = str(ch.draw(config)).splitlines()
    assert any(re.search(r"rms norm, q and k too  +\S", line) for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_model_draws_as_its_config() -> None:
    config = ch.preset("gpt2", n_layers=2, d_model=48, n_heads=4, d_ff=96)
    drawing = ch.draw(ch.build(config))
    assert drawing == ch.draw(config)
    assert drawing._repr_svg_() == drawing.svg


def test_what_can_not_be_drawn_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"draw needs a Config or a model; got 'gpt2'.*ch\.preset"):
        ch.draw("gpt2")
    with pytest.raises(InputError, match=r"a drawing is an SVG; got .*gpt2\.png.*ends in \.svg"):
        ch.draw(ch.preset("gpt2")).save(tmp_path / "gpt2.png")
