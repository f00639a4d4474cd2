"""Plots and heat maps: they show the given numbers, labels never overlap, and no window is needed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.text import Text as Written
from models.tiny import inputs, tiny
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from torch import Tensor

import clearhead as ch
from clearhead.inside import plots
from clearhead.inside.attribution import logit_attribution
from clearhead.inside.figure_grid import PlotFigure
from clearhead.inside.head_scores import HeadScore, head_scores
from clearhead.inside.heatmap import SCALE, SHADES, colour, heat_map, label
from clearhead.inside.logit_lens import logit_lens
from clearhead.inside.plots import (
    plot_alignment,
    plot_attribution,
    plot_effects,
    plot_heads,
    plot_lens,
    plot_map,
    plot_seen,
)
from clearhead.inside.position_plots import plot_positions
from clearhead.layers.positions import Learned, Positions, Rotary, Sinusoidal
from clearhead.layers.relative_positions import Alibi, RelativeBuckets

WORDS = [
    "the",
    "a",
    "Donaudampfschifffahrtsgesellschaft",
    " ",
    r"$\nosuch$",
    "\n",
    "年",
    "naïve",
    "_",
    "{",
    "\\",
    "x" * 40,
]


def words(n: int) -> list[str]:
    return [WORDS[i % len(WORDS)] for i in range(n)]


def shares(T: int, S: int) -> Tensor:
    return (5 * torch.randn(T, S)).softmax(-1)


def assert_readable(figure: PlotFigure) -> list[str]:
    """No drawn text overlaps another or leaves the figure. Returns the texts."""
    drawn: list[Written] = []
    draw = Written.draw

    def keep(text: Written, *args: object) -> None:
        drawn.append(text)
        draw(text, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Written, "draw", keep)
        figure.canvas.draw()
    boxes = {text: text.get_window_extent() for text in drawn if text.get_visible() and text.get_text().strip()}
    for text, box in boxes.items():
        # half a pixel: glyph edges are rounded
        assert min(box.x0, box.y0) >= -0.5, text
        assert box.x1 <= figure.bbox.x1 + 0.5, text
        assert box.y1 <= figure.bbox.y1 + 0.5, text
    for (a, one), (b, other) in itertools.combinations(boxes.items(), 2):
        across = min(one.x1, other.x1) - max(one.x0, other.x0)
        down = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert min(across, down) <= 0.5, f"{a.get_text()!r} lies on {b.get_text()!r}"
    return [text.get_text() for text in boxes]


# Figures.


@pytest.mark.slow
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 40), (2, 3), (27, 27), (60, 9), (1000, 1000), (3, 1000)])
def test_maps_are_readable_at_any_size(T: int, S: int) -> None:
    for figure in (plot_map(shares(T, S), words(T), words(S)), plot_alignment(shares(T, S), words(T), words(S))):
        texts = assert_readable(figure)
        told = [text for text in texts if "each cell is the largest of" in text]
        assert len(told) == (max(T, S) > plots.MAX_CELLS)
        assert any("not an explanation" in text.replace("\n", " ") for text in texts)
        assert max(figure.get_size_inches()) < 12


def test_small_maps_name_every_token() -> None:
    names = [f"t{i}" for i in range(27)]
    texts = assert_readable(plot_map(shares(27, 27), names))
    assert all(texts.count(name) == 2 for name in names)


def test_a_map_shows_the_weights() -> None:
    weights = shares(11, 7)
    figure = plot_map(weights, words(11), words(7), title=r"which $\head$?")
    image = figure.axes[0].images[0]
    assert torch.equal(torch.tensor(image.get_array().data), weights)
    colours = image.get_cmap()(torch.linspace(0, 1, 101).numpy())[:, :3] @ [0.2126, 0.7152, 0.0722]
    assert colours[0] == pytest.approx(1), "nothing is white"
    assert (colours[1:] < colours[:-1]).all(), "and more is darker"
    assert r"which $\head$?" in assert_readable(figure)  # not parsed as a formula


def test_a_large_map_keeps_its_peaks() -> None:
    weights = torch.zeros(1003, 1003)
    weights[777, 333] = weights[1002, 1002] = 1
    shown = torch.tensor(plot_map(weights, words(1003)).axes[0].images[0].get_array().data)
    assert shown.shape == (251, 251)
    assert shown.nonzero().tolist() == [[777 // 4, 333 // 4], [250, 250]]


def test_dots_mark_the_largest() -> None:
    weights = shares(11, 7)
    (line,) = plot_alignment(weights, words(11), words(7)).axes[0].lines
    assert list(line.get_xdata()) == weights.argmax(-1).tolist()


def test_what_the_font_lacks_is_spelt() -> None:
    texts = assert_readable(plot_map(torch.ones(2, 2), ["年", "\x07"]))
    assert "\\u5e74" in texts
    assert "\\x07" in texts


def test_names_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ch.InputError, match="3 tokens were given to name 4 rows"):
        plot_map(shares(4, 4), words(3))
    with pytest.raises(ch.InputError, match="3 columns were given to name 4 columns"):
        plot_alignment(shares(4, 4), words(4), words(3))


@pytest.mark.slow
@pytest.mark.parametrize("head", [None, 1])
def test_what_a_probe_saw(head: int | None) -> None:
    model = tiny("original")
    args = inputs(model.config)
    with ch.probe(model, "*.weights", "*.residual") as seen, torch.no_grad():
        model(*args)
    for site, rows in (("decoder.blocks.1.cross.weights", 11), ("encoder.blocks.0.attention.weights", 13)):
        figure = plot_seen(seen, site, head=head, batch=2)
        expected = seen[site][2].mean(0) if head is None else seen[site][2, head]
        torch.testing.assert_close(torch.tensor(figure.axes[0].images[0].get_array().data), expected.float())
        texts = assert_readable(figure)
        assert any(site.removesuffix(".weights") in text for text in texts)
        assert str(rows - 1) in texts
        again = seen.plot(site, head=head, batch=2)
        assert again._repr_png_() == figure._repr_png_()
    with pytest.raises(ch.InputError, match=r"choose a site that ends in '\.weights'"):
        seen.plot("decoder.blocks.0.residual")


@pytest.mark.parametrize("T", [1, 11, 31, 300])
def test_the_lens_grid(T: int) -> None:
    model = tiny("gpt2", max_len=400)
    tokens = torch.randint(0, 53, (1, T))
    lens = logit_lens(model, tokens)[:, 0]
    figure = plot_lens(lens, [str(id) for id in tokens[0].tolist()], lambda id: f"{id}!")
    texts = assert_readable(figure)
    assert texts.count("after block 1") == 1
    cells = {text.get_position(): text.get_text() for text in figure.axes[0].texts}
    assert bool(cells) == (T <= 31)
    if cells:  # layers run down, as on the explorer's page
        assert [cells[at, 2] for at in range(T)] == [f"{id}!" for id in lens[-1].argmax(-1).tolist()]
        shown = torch.tensor(figure.axes[0].images[0].get_array().data)
        torch.testing.assert_close(shown[0], lens[0].softmax(-1).amax(-1).float())


def test_words_in_cells_are_cut_to_fit() -> None:
    lens = torch.randn(3, 12, 53).cumsum(0)
    texts = assert_readable(plot_lens(lens, words(12), lambda id: f"incomprehensible-{id}"))
    assert sum(text.startswith("incom") and text.endswith("…") for text in texts) == 3 * 12


def test_the_grid_of_heads() -> None:
    model = tiny("marian")
    scores = head_scores(model, *inputs(model.config))
    for kind in ("entropy", "confidence", "positional"):
        texts = assert_readable(plot_heads(scores, kind))
        assert "decoder.blocks.1.cross" in texts
    figure = plot_heads(scores, "previous")
    assert "decoder.blocks.1.cross" not in assert_readable(figure)
    assert figure.axes[0].images[0].get_array()[0, 2] == pytest.approx(scores[2].previous)


@pytest.mark.parametrize(("n_layers", "n_tokens"), [(2, 14), (30, 5), (48, 120)])
def test_effects_of_patching(n_layers: int, n_tokens: int) -> None:
    effects = torch.linspace(-0.3, 1.2, n_layers * n_tokens).unflatten(0, (n_layers, n_tokens))
    layers = [f"after block {layer}" for layer in range(n_layers)]
    figure = plot_effects(effects, layers, words(n_tokens))
    texts = assert_readable(figure)
    assert "share brought back" in [" ".join(text.split()) for text in texts]
    assert figure.axes[0].images[0].get_clim() == pytest.approx((-1.2, 1.2))  # 0 is the middle of the colours
    assert ("-0.30" in texts) == (n_tokens < 100)
    with pytest.raises(ch.InputError, match="were given to name"):
        plot_effects(effects, layers[1:], words(n_tokens))


def test_a_model_with_many_heads_and_one_with_pruned_ones() -> None:
    def score(layer: int, head: int) -> HeadScore:
        return HeadScore(f"blocks.{layer}.attention.weights", head, 1.0, 0.5, 0.5, -1, previous=0.123)

    assert_readable(plot_heads([score(layer, head) for layer in range(96) for head in range(96)], "previous"))
    texts = assert_readable(plot_heads([score(0, 0), score(0, 1), score(1, 0)], "previous"))
    assert texts.count("0.12") == 3


def test_heads_without_a_score_are_refused() -> None:
    scores = head_scores(tiny("gpt2"), torch.tensor([[1, 2, 3]]))
    with pytest.raises(ch.InputError, match="did you mean 'induction'"):
        plot_heads(scores, "inductoin")
    with pytest.raises(ch.InputError, match="use repeated_tokens"):
        plot_heads(scores, "induction")
    with pytest.raises(ch.InputError, match=r"head_scores\(aligned=\.\.\.\)"):
        plot_heads(scores, "alignment")


@pytest.mark.parametrize("name", ["gpt2", "whisper", "vit"])
def test_the_grid_of_an_attribution(name: str) -> None:
    model = tiny(name)
    found = logit_attribution(model, *inputs(model.config))
    figure = plot_attribution(found, batch=1, position=4)
    texts = " ".join(assert_readable(figure)).replace("\n", " ")
    logit = float(found.logit[1, 4] if found.logit.ndim == 2 else found.logit[1])
    assert f"to the logit, {logit:.2f}" in texts
    image = figure.axes[0].images[0]
    assert image.norm.vmin == -image.norm.vmax  # zero is the middle of the scale
    first = found.parts["decoder.blocks.0.attention.2" if name == "whisper" else "blocks.0.attention.2"]
    expected = float(first[1, 4] if first.ndim == 2 else first[1])
    assert image.get_array()[0, 2] == pytest.approx(expected, rel=1e-6)


def test_the_gallery_of_positions() -> None:
    figure = plot_positions()
    texts = assert_readable(figure)
    for kind in ("sinusoidal", "learned", "rotary", "alibi", "t5"):
        assert any(text.startswith(kind) for text in texts), kind


def by_distance(kind: Positions) -> list[list[float]]:
    figure = plot_positions({"mine": kind}, length=9)
    assert_readable(figure)
    lines = next(ax for ax in figure.axes if ax.get_title(loc="left").startswith("by distance")).lines
    return [line.get_ydata().tolist() for line in lines if len(line.get_xdata()) == 9]


def test_similarity_by_distance_is_each_kinds_own() -> None:
    """From the formulas: a dot product of sinusoids is a sum of cosines of distances, like the scores of rotary positions."""
    angles = torch.arange(9.0)[:, None] / 10_000 ** (torch.arange(0, 8, 2) / 8)
    cosines = angles.cos().mean(-1).tolist()
    assert by_distance(Sinusoidal(d_model=8)) == [pytest.approx(cosines, abs=1e-5)]
    assert by_distance(Rotary(d_head=8)) == [pytest.approx(cosines, abs=1e-5)]
    slopes = [2.0 ** -(8 * (head + 1) / 4) for head in range(4)]
    assert by_distance(Alibi(n_heads=4)) == [pytest.approx([-slope * d for d in range(9)]) for slope in slopes]
    t5 = RelativeBuckets(n_heads=2, both_ways=False)
    assert by_distance(t5) == [pytest.approx(t5.weight[:9, head].tolist()) for head in range(2)]
    learned = Learned(d_model=5, max_len=9)
    table = torch.nn.functional.normalize(learned.weight.detach(), dim=-1)
    expected = [sum(float(table[i] @ table[i + d]) for i in range(9 - d)) / (9 - d) for d in range(9)]
    assert by_distance(learned) == [pytest.approx(expected, abs=1e-5)]


def test_a_model_without_positions_has_none_to_draw() -> None:
    with pytest.raises(ch.InputError, match="gives nothing to draw"):
        plot_positions({"none": Positions()})


def test_figures_are_saved_and_shown(tmp_path: Path) -> None:
    figure = plot_map(shares(5, 5), words(5))
    figure.savefig(tmp_path / "map.svg")
    figure.savefig(tmp_path / "map.png")
    assert b"<svg" in (tmp_path / "map.svg").read_bytes()
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG")  # for notebooks


@pytest.mark.slow
def test_without_matplotlib_the_extra_is_named() -> None:
    code = """
import sys
sys.modules["matplotlib"] = None
import clearhead.inside  # needs no matplotlib
try:
    import clearhead.inside.plots
except clearhead.MissingExtraError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'clearhead[plot]'" in ran.stdout


# In the terminal.


def printed(picture: Text) -> list[str]:
    console = Console(width=400, file=StringIO(), color_system="truecolor", record=True)
    console.print(picture, end="")
    return console.export_text().splitlines()


@pytest.mark.parametrize(("T", "S"), [(1, 1), (7, 7), (11, 13), (1000, 1000), (1, 1000), (1000, 3)])
def test_terminal_maps_fit(T: int, S: int) -> None:
    lines = printed(heat_map(shares(T, S), words(T), words(S), title="head 0", width=100, height=40))
    assert max(cell_len(line) for line in lines) <= 100
    assert sum("each cell is the largest of" in line for line in lines) == (T > 40 or S > 41)
    assert len(lines) <= 1 + 16 + 40 + 1


def test_a_terminal_map_line_by_line() -> None:
    lines = printed(heat_map(torch.tensor([[1.0, 0, 0], [0.25, 0.5, 0.0]]), ["one", "two"], ["a", "bc", "d"]))
    assert lines == ["      b   ", "    a c d ", "one ██    ", "two ▒▒██  "]


def test_a_large_terminal_map_says_where_its_rows_begin() -> None:
    weights = torch.zeros(100, 90)
    weights[:, 0], weights[57, 80], weights[56, 20] = (
        0.1,
        0.1,
        0.01,
    )  # brightness is relative to the largest weight of all rows of a line
    lines = printed(heat_map(weights, [f"t{i}" for i in range(100)], [f"s{i}" for i in range(90)], width=37, height=50))
    row = next(line for line in lines if line.startswith("56 t56"))
    # 37 characters less a label of 6 and a space leave 15 cells: 90 columns in sixes, the 80th in the 13th
    assert row == "56 t56 ██" + 12 * "  " + "██" + "  "
    assert "100 x 90 weights: each cell is the largest of 2 x 6" in lines[-1]


def test_labels_show_what_is_invisible() -> None:
    assert [label(token) for token in (" ", "", "a\nb", "\t", "\x00", "x" * 20)] == [
        "␣",
        "␣",
        "a⏎b",
        "⇥",
        "\\x00",
        "x" * 15 + "…",
    ]


def test_the_scale_rises_in_lightness_for_every_eye() -> None:
    """As seen with all cones, and without the red, the green or the blue ones: values keep their order.

    The matrices are Machado, Oliveira & Fernandes 2009, severity 1, on linear light.
    """
    eyes = [
        torch.eye(3),
        torch.tensor(
            [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
        ),
        torch.tensor(
            [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
        ),
        torch.tensor(
            [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
        ),
    ]
    scale = torch.tensor([to_rgb(tuple(c / 255 for c in colour(at / 40))) for at in range(41)])
    linear = torch.where(scale <= 0.04045, scale / 12.92, ((scale + 0.055) / 1.055) ** 2.4)
    for eye in eyes:
        seen = (linear @ eye.T).clamp(0, 1) @ torch.tensor([0.2126, 0.7152, 0.0722])
        assert (seen.diff() > 0).all()
    assert len(SCALE) == len(SHADES)
