"""The report: a page that is well formed, safe, small and says what is missing. Drawings are parsed as XML."""

from __future__ import annotations

import base64
import json
import math
import re
import time
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.errors import InputError
from clearhead.training import report
from clearhead.training import report_figures as figures
from clearhead.training.report import write_report
from clearhead.training.report_figures import AttentionPicture

SAMPLES = [
    {"input": "le 3 mars 1987", "output": "1987-03-03", "wanted": "1987-03-03"},
    {"input": "3. März 1987", "output": "1987-03-08", "wanted": "1987-03-03"},
]


def run_folder(path: Path, steps: int = 101) -> Path:
    folder = path / "dates"
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = 5 * math.exp(-step / 11) + 0.1
        rows.append(
            {"step": step, "kind": "train", "loss": loss, "lr": 3e-4, "seconds": step * 0.7, "tokens": step * 97}
        )
        if step % 20 == 0:
            rows.append(
                {"step": step, "kind": "valid", "loss": abs(step - 60) / 10 + 1, "bleu": step / 3, "samples": SAMPLES}
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "recipe.toml").write_text('task = "translate"\n[train]\nsteps = 101\n', encoding="utf-8")
    (folder / "config.json").write_text('{"d_model": 67}', encoding="utf-8")
    (folder / "environment.json").write_text('{"torch": "2.13.0"}', encoding="utf-8")
    return folder


def tree(page: str) -> ElementTree.Element:
    """The page's body as XML: a tag left open or a letter left unescaped fails here."""
    return ElementTree.fromstring(page[page.index("<body>") : page.index("</html>")])


def text_of(page: str) -> str:
    return " ".join("".join(tree(page).itertext()).split())


def charts(page: str) -> dict[str, ElementTree.Element]:
    """Every chart by its metric."""
    found = [svg for svg in tree(page).iter("svg") if svg.get("class") != "map"]
    return {svg.findtext("text", "").removesuffix(" (log scale)"): svg for svg in found}


def picture(rows: int, columns: int, name: str = "token") -> AttentionPicture:
    weights = torch.softmax(3 * torch.randn(rows, columns), -1)
    return AttentionPicture(
        "a head", [f"{name}{n}" for n in range(rows)], [f"{name}{n}" for n in range(columns)], weights
    )


def test_a_whole_run(tmp_path: Path):
    path = write_report(run_folder(tmp_path), attention=[picture(5, 7)])
    page = path.read_text(encoding="utf-8")
    assert path.name == "report.html"
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(".")] == []
    text = text_of(page)
    for words in (
        "dates",
        "Task: translate",
        "101 steps · 1 min 11 s · 9,797 tokens",
        "lowest validation loss 1 at step 60",
    ):
        assert words in text
    for words in ("steps = 101", '"d_model": 67', "2.13.0", "not an explanation", "UTC"):
        assert words in text
    assert "Missing" not in text
    assert "not finite" not in text
    assert set(charts(page)) == {"loss", "bleu", "lr"}
    for svg in tree(page).iter("svg"):
        assert svg[0].tag == "title"


def test_the_model_is_drawn(tmp_path: Path):
    config = ch.preset("gpt2", n_layers=2, d_model=48, n_heads=4, d_ff=96)
    ch.save(ch.build(config), tmp_path)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    (picture,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert base64.b64decode(picture).decode() == ch.draw(config).svg
    (tmp_path / "config.json").write_text('{"d_model": 67}', encoding="utf-8")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "the model is not drawn" in page
    assert "data:image" not in page


def test_it_stands_alone(tmp_path: Path):
    page = write_report(run_folder(tmp_path), attention=[picture(5, 7)]).read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|<img|https?:|url\(|@import", page)
    assert "prefers-color-scheme:dark" in page
    assert 'name="viewport"' in page


def test_last_and_best_evaluation(tmp_path: Path):
    tiles = [
        " ".join(tile.itertext())
        for tile in tree(write_report(run_folder(tmp_path)).read_text("utf-8")).findall("dl/div")
    ]
    assert tiles == ["loss (validation) 5 at step 60: 1", "bleu (validation) 33.333 at step 60: 20"]


def test_the_result_comes_first(tmp_path: Path):
    folder = run_folder(tmp_path)
    row = {
        "step": 101,
        "kind": "result",
        "loss": 0.97,
        "chrf": 61.0,
        "samples": [{"input": "a", "output": "the saved model's"}],
    }
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")
    page = write_report(folder).read_text("utf-8")
    tiles = [" ".join(tile.itertext()) for tile in tree(page).findall("dl/div")]
    assert tiles == ["loss (result) 0.97 at step 60: 1", "chrf (result) 61"]
    assert "the saved model's" in text_of(page)
    assert "Not readable" not in text_of(page)
    assert set(charts(page)) == {"loss", "bleu", "lr"}


def test_a_run_that_was_never_evaluated(tmp_path: Path):
    text = text_of(write_report(run_folder(tmp_path, steps=19)).read_text("utf-8"))
    assert "19 steps · 0 min 13 s · 1,843 tokens · lowest training loss 0.98884 at step 19" in text
    assert "Samples" not in text


def test_wrong_samples_are_marked_in_words(tmp_path: Path):
    rows = tree(write_report(run_folder(tmp_path)).read_text("utf-8")).findall("table")[0].findall("tr")
    assert ["differs" in "".join(row.itertext()) for row in rows] == [False, False, True]


def test_a_language_models_own_continuation_is_not_wrong(tmp_path: Path):
    folder = run_folder(tmp_path)
    (folder / "recipe.toml").write_text('task = "language"\n', encoding="utf-8")
    rows = tree(write_report(folder).read_text("utf-8")).findall("table")[0].findall("tr")
    assert not any("differs" in "".join(row.itertext()) for row in rows)
    assert "how the text goes on" in "".join(rows[0].itertext())


NASTY = "<script>alert(1)</script> & \"quoted\" 'x' \x00\x1b\ud800 ]]> \u2028 </pre></svg>"


def test_everything_from_data_is_escaped(tmp_path: Path):
    folder = tmp_path / "<i>&name"
    folder.mkdir()
    row = {
        "step": 1,
        "kind": "valid",
        "loss": 1.0,
        NASTY: 2.0,
        "samples": [dict.fromkeys(("input", "output", "wanted"), NASTY)],
    }
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps({NASTY: NASTY}), encoding="utf-8")
    for name in ("recipe.toml", "config.json"):
        (folder / name).write_bytes(f'task = "{NASTY}"'.encode("utf-8", "surrogatepass"))
    attention = [AttentionPicture(NASTY, [NASTY, "a\nb"], ["<", "&", " "], np.full((2, 3), 1 / 3))]
    page = write_report(folder, attention=attention).read_text(encoding="utf-8")
    assert "<script" not in page
    assert text_of(page).count("<script>alert(1)</script>") >= 8
    assert "a⏎b" in page


@pytest.mark.parametrize("name", report.FILES)
def test_a_missing_file_is_said(tmp_path: Path, name: str):
    folder = run_folder(tmp_path)
    (folder / name).unlink()
    assert f"Missing from the run folder: {name}." in text_of(write_report(folder).read_text("utf-8"))


def test_an_empty_folder(tmp_path: Path):
    text = text_of(write_report(tmp_path).read_text("utf-8"))
    assert "No step was logged" in text
    assert all(name in text for name in report.FILES)


def test_no_folder_is_an_error(tmp_path: Path):
    with pytest.raises(InputError, match=r"'.*nowhere' is not a folder; give one that `clearhead train` wrote"):
        write_report(tmp_path / "nowhere")


def test_a_run_killed_while_writing(tmp_path: Path):
    folder = run_folder(tmp_path)
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(whole + '{"step": 102, "kind": "train", "loss": "ü'.encode()[:-1])
    (folder / "environment.json").write_text('{"torch": "2.1', encoding="utf-8")
    text = text_of(write_report(folder).read_text("utf-8"))
    assert "line 107 of metrics.jsonl" in text
    assert "environment.json can not be read" in text
    assert "101 steps" in text


def test_a_step_logged_again_counts_once():
    lines = [{"step": step, "kind": "train", "loss": loss} for step, loss in ((1, 5.0), (2, 9.0), (1, 5.0), (2, 4.0))]
    records, notes = report.read_metrics("\n".join(map(json.dumps, lines)))
    assert report.curves(records, "train") == {"loss": {"train": [(1, 5.0), (2, 4.0)]}}
    assert notes == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_what_is_not_finite_is_a_gap_and_is_said(tmp_path: Path, value: float | None):
    losses = [3.0, 2.5, value, value, 2.0, 1.5]
    rows = [{"step": step, "kind": "train", "loss": loss} for step, loss in enumerate(losses, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    page = write_report(tmp_path).read_text("utf-8")
    assert "loss (training), values not finite: 2, the first at step 3" in text_of(page)
    line = charts(page)["loss"].find("path[@class='train']")
    assert line is not None
    assert line.get("d", "").count("M") == 2
    assert "nan" not in line.get("d", "")


@pytest.mark.parametrize(
    "losses", [[math.nan], [0.0], [2.0, 2.0], [-3.0, -3.0], [1e-12, 1e12], [5e8, -7e-9], ["text"], [True]]
)
def test_any_values_give_a_chart_within_its_frame(tmp_path: Path, losses: list[Any]):
    rows = [{"step": step, "kind": "valid", "loss": loss} for step, loss in enumerate(losses)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for dot in tree(write_report(tmp_path).read_text("utf-8")).iter("circle"):
        assert figures.LEFT <= float(dot.get("cx", "nan")) <= 640 - figures.RIGHT
        assert 12 <= float(dot.get("cy", "nan")) <= 300 - figures.BOTTOM


def test_thinning_keeps_ends_and_extremes():
    values = np.random.default_rng(0).normal(size=7919)
    values[1234], values[4321] = 99, -99
    points = [(float(step), float(value)) for step, value in enumerate(values)]
    (piece,) = figures.thin(points, 600)
    assert len(piece) <= 600
    assert {points[0], points[-1], points[1234], points[4321]} <= set(piece)
    assert piece == sorted(piece)
    assert figures.thin(points[:500], 600) == [points[:500]]


def test_thinning_breaks_the_line_where_values_are_lost():
    points = [(float(step), math.nan if 1000 <= step < 2000 else 1.0) for step in range(5003)]
    before, *_, after = figures.thin(points, 101)
    assert before[-1][0] < 1000
    assert after[0][0] >= 2000
    assert figures.thin([(1.0, math.nan)], 101) == []


def is_round(value: float, digits: tuple[int, ...]) -> bool:
    first = f"{value:.8e}".split("e")[0]
    return float(first) in digits


@given(st.floats(-1e6, 1e6), st.floats(0.005, 1e3), st.integers(2, 7))
def test_linear_ticks_are_round_and_hold_the_range(low: float, part: float, count: int):
    span = part * max(abs(low), 1e-6)  # narrower ranges are drawn against zero
    ticks = figures.linear_ticks(low, low + span, count)
    assert ticks[0] <= low + 1e-6 * span
    assert ticks[-1] >= low + span - 1e-6 * span
    assert 2 <= len(ticks) <= count + 3
    step = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
    assert is_round(float(f"{step:.3g}"), (1, 2, 5))


@given(st.floats(1e-9, 1e6), st.floats(10, 1e9), st.integers(3, 7))
def test_log_ticks_are_round_and_inside(low: float, ratio: float, count: int):
    ticks = figures.log_ticks(low, low * ratio, count)
    assert 1 <= len(ticks) <= count + 1
    assert all(low <= tick <= low * ratio and is_round(tick, (1, 2, 3, 5)) for tick in ticks)


def test_the_axis_is_logarithmic_where_the_loss_falls_tenfold(tmp_path: Path):
    for start, is_log in ((9.0, False), (11.0, True)):
        lines = {"train": [(1.0, start), (2.0, 1.0)]}
        assert ("log scale" in figures.chart("loss", lines, width=640, height=300, limit=600)) == is_log
        assert "log scale" not in figures.chart("lr", lines, width=640, height=300, limit=600)


@pytest.mark.parametrize("steps", [1, 7, 999, 10_007, 250_007, 30_000_001])
def test_tick_labels_of_a_chart_do_not_touch(steps: int):
    lines = {"train": [(1.0, 0.00031), (float(steps), 0.02)]}
    for width, height, letter in ((640, 300, 11.5), (300, 180, 8.7)):  # letters as wide as on a phone
        svg = ElementTree.fromstring(figures.chart("lr", lines, width=width, height=height, limit=150))
        middle = [text for text in svg.iter("text") if text.get("text-anchor") == "middle"]
        spans = [(float(t.get("x", "")), letter * len(t.text or "") / 2) for t in middle]
        assert len(spans) >= 2 or steps == 1
        for (x1, half1), (x2, half2) in pairwise(spans):
            assert x1 + half1 < x2 - half2


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 200), (200, 1), (11, 37), (200, 200)])
@pytest.mark.parametrize("name", ["x", "日本語", "a long token, longer than any"])
def test_labels_of_a_picture_do_not_touch(rows: int, columns: int, name: str):
    figure = ElementTree.fromstring(figures.draw_attention(picture(rows, columns, name)))
    svg = figure.find("svg")
    assert svg is not None
    width, height = map(float, svg.get("viewBox", "").split()[2:])
    assert width <= 704  # the column's width: no scrolling
    left = [
        (float(text.get("y", "")), text.text or "") for text in svg.iter("text") if text.get("text-anchor") == "end"
    ]
    above = [text for text in svg.iter("text") if text.get("transform")]
    assert all(b[0] - a[0] >= 12 for a, b in pairwise(left))
    places = [list(map(float, re.findall(r"[\d.]+", text.get("transform", ""))[:2])) for text in above]
    needed = [12 if "rotate" in text.get("transform", "") else figures.label(text.text or "")[1] for text in above]
    for n in range(1, len(places)):
        assert places[n][0] - places[n - 1][0] >= (needed[n] + needed[n - 1]) / 2
    # no name leaves the picture: turned ones have their width above them, the others on their left
    assert all(
        at >= (figures.label(t.text or "")[1] if "rotate" in t.get("transform", "") else 12)
        for (_, at), t in zip(places, above, strict=True)
    )
    edge = float(next(text.get("x", "") for text in svg.iter("text") if text.get("text-anchor") == "end"))
    assert all(figures.label(token)[1] <= edge for _, token in left)
    assert left[-1][0] < height


def test_cells_are_where_the_weights_are():
    weights = torch.tensor([[0.0, 1.0, 1.0, 0.0, 0.5], [0.2, 0.2, 0.2, 0.2, 0.2], [0.0, 0.0, 0.0, 0.0, 0.0]])
    figure = figures.draw_attention(AttentionPicture("a head", list("abc"), list("defgh"), weights))
    paths = {
        path.get("stroke-opacity"): path.get("d") for path in ElementTree.fromstring(figure).iterfind("svg/g/path")
    }
    assert paths["1.00"] == "M0 0.5m1 0h2M0 1.5m0 0h5"
    assert paths["0.40"] == "M0 0.5m4 0h1"  # half of the row's largest, at the nearest of five shades
    assert not any(paths[shade] for shade in ("0.20", "0.60", "0.80"))


def test_weights_that_are_not_finite_are_said():
    weights = np.array([[math.nan, 0.3], [0.5, 0.5]])
    assert "Not finite, left blank: 1 weights" in figures.draw_attention(
        AttentionPicture("a", ["x", "y"], ["x", "y"], weights)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_picture_takes_any_tensor(dtype: torch.dtype):
    weights = torch.full((2, 3), 1 / 3, dtype=dtype, requires_grad=True)
    assert "M0 0.5m0 0h3" in figures.draw_attention(AttentionPicture("a", ["x", "y"], ["u", "v", "w"], weights))


@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 2, 3)])
def test_weights_must_match_their_tokens(shape: tuple[int, ...]):
    with pytest.raises(
        InputError, match=r"'a'.*shape \(.*\) came with 2 rows and 3 columns; pass the weights of one head"
    ):
        AttentionPicture("a", ["x", "y"], ["u", "v", "w"], np.zeros(shape))


def test_the_page_stays_small(tmp_path: Path):
    folder = run_folder(tmp_path, steps=20_011)
    for name in ("recipe.toml", "config.json"):
        (folder / name).write_text("x" * 10**6, encoding="utf-8")
    noise = np.random.default_rng(0).random((211, 223))
    pictures = [AttentionPicture(f"head {n}", ["word"] * 211, ["word"] * 223, noise) for n in range(3)]
    start = time.perf_counter()
    path = write_report(folder, attention=pictures)
    assert time.perf_counter() - start < 5
    assert path.stat().st_size < 300_000
    text = text_of(path.read_text("utf-8"))
    assert "head 0. The first 200 tokens." in text
    assert "Left out to keep the page small: head 1, head 2." in text
    assert text.count("990,000 letters more") == 2


def test_a_failed_write_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = run_folder(tmp_path)
    old = write_report(folder).read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        write_report(folder, attention=[picture(2, 3)])
    assert (folder / "report.html").read_bytes() == old
    assert not list(folder.glob(".report*"))
