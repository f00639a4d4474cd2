"""`report.html`: what a run did, on one page. The drawings are SVG inside it; it needs no script and no network.

It is made from the files of the run folder alone, so it can be written again at any time, also for a run that was killed:
what is missing, cut off or not finite is said on the page. In metrics.jsonl `seconds` and `tokens` count from the run's start.
"""

from __future__ import annotations

import html
import json
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clearhead.errors import InputError
from clearhead.training.folder import write_text

Records = dict[str, list[dict[str, Any]]]  # by kind
Points = list[tuple[float, float]]  # step, value
Curves = dict[str, dict[str, Points]]  # by metric, by kind

FILES = ("metrics.jsonl", "recipe.toml", "config.json", "environment.json")
KINDS = {"train": "training", "valid": "validation", "result": "result"}  # a result: of the weights that were saved
NOT_DRAWN = ("step", "kind", "seconds", "tokens", "epoch", "samples")
LOGARITHMIC = ("loss", "perplexity", "grad_norm")  # where they change more than tenfold
SAMPLES, SAMPLE_LETTERS, TEXT_LETTERS, PICTURE_BYTES = 20, 400, 10_000, 200_000  # keep the page under 300 kB
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 34, 46  # a chart's margins
TOKENS, SIDE, LINE, LETTER, LEVELS = 200, 520, 13, 7.4, 5  # a picture: most tokens, size, room for a label, shades

# Blue and orange stay apart with any colour vision, and the validation line has dots. Inks for paper, and for a dark screen.
STYLE = """
:root{--paper:#fff;--ink:#222;--soft:#667;--rule:#dde;--train:#0072b2;--valid:#c04f00;color-scheme:light dark}
@media screen and (prefers-color-scheme:dark){
:root{--paper:#16181c;--ink:#dde;--soft:#99a;--rule:#334;--train:#56b4e9;--valid:#e69f00}}
body{margin:0 auto;max-width:44rem;padding:3rem 1rem;background:var(--paper);color:var(--ink);font:1rem/1.6 system-ui,sans-serif}
h1{margin:0;font:600 1.8rem/1.2 system-ui,sans-serif;overflow-wrap:anywhere}h2{margin:3rem 0 1rem;font-size:1.15rem}
header p,.soft,dt,figcaption,th{color:var(--soft);font-size:.9rem;font-weight:400}
.note{border-left:3px solid var(--valid);padding-left:1rem}dl{display:flex;flex-wrap:wrap;gap:1.2rem 2.5rem;margin:2rem 0}
dd{margin:0;font-size:.85rem;color:var(--soft)}dd b{font-size:1.7rem;font-weight:500;line-height:1.3;color:var(--ink)}
figure{margin:0 0 2rem}figure,svg{break-inside:avoid}svg{display:block;width:100%;height:auto}
text{fill:var(--soft);font:12px system-ui,sans-serif}.name{fill:var(--ink)}.map text{font-family:ui-monospace,monospace}
.grid,.frame{fill:none;stroke:var(--rule)}.train,.valid{fill:none;stroke:var(--train);stroke-linecap:round;stroke-linejoin:round}
.valid{stroke:var(--valid);stroke-width:2}circle.valid{fill:var(--paper)}.cells{stroke:var(--train);shape-rendering:crispEdges}
.small{display:grid;grid-template-columns:repeat(auto-fill,minmax(12.5rem,1fr));gap:1rem}.small text{font-size:15px}
@media(max-width:36rem){.loss text{font-size:20px}}@media print{details::details-content{content-visibility:visible;display:block}}
table{width:100%;border-collapse:collapse;table-layout:fixed;font-size:.9rem}
td,th{padding:.4rem .8rem .4rem 0;text-align:start;vertical-align:top}td b{color:var(--valid)}
tr{border-bottom:1px solid var(--rule);break-inside:avoid}summary{margin:2rem 0;cursor:pointer}
td,pre{white-space:pre-wrap;overflow-wrap:anywhere}pre{font:.85rem/1.5 ui-monospace,monospace}
"""


@dataclass(frozen=True, eq=False)
class AttentionPicture:
    """How much the token of each row attends to the token of each column: weights (rows, columns) from 0 to 1."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    weights: NDArray[Any] | Tensor

    def __post_init__(self) -> None:
        shape, labels = tuple(self.weights.shape), (len(self.rows), len(self.columns))
        if shape != labels or 0 in labels:
            raise InputError(
                f"the picture {self.title!r} needs one weight for each row and column: weights of shape {shape} came with "
                f"{labels[0]} rows and {labels[1]} columns; pass the weights of one head and the tokens they belong to"
            )


def write_report(folder: Path, *, attention: Sequence[AttentionPicture] = ()) -> Path:
    """Write `report.html` into a run folder, from what the folder holds. Returns the page's path."""
    if not folder.is_dir():
        raise InputError(f"no run to report on: {str(folder)!r} is not a folder; give one that `clearhead train` wrote")
    write_text(folder / "report.html", _page(folder, attention))
    return folder / "report.html"


def _page(folder: Path, attention: Sequence[AttentionPicture]) -> str:
    files = {name: (folder / name).read_text("utf-8", "replace") for name in FILES if (folder / name).is_file()}
    records, notes = read_metrics(files.get("metrics.jsonl", ""))
    if missing := [name for name in FILES if name not in files]:
        notes.insert(0, f"Missing from the run folder: {', '.join(missing)}. The run may have been stopped early.")
    title, recipe, config = escape(folder.resolve().name), files.get("recipe.toml", ""), files.get("config.json", "")
    task = re.search(r"""^\s*task\s*=\s*["'](.*?)["']""", recipe, re.MULTILINE)
    written = (folder / "metrics.jsonl" if "metrics.jsonl" in files else folder).stat().st_mtime
    date = datetime.fromtimestamp(written, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/><title>{title}</title>',
        f'<meta name="viewport" content="width=device-width"/><style>{STYLE}</style></head><body>',
        f"<header><h1>{title}</h1><p>{f'Task: {escape(task[1])}. ' if task else ''}Last logged {date}.</p></header>",
        _verdict(records),
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        _charts(curves(records, "train", "valid")),
        _samples(records["valid"] + records["result"]),
        _pictures(attention),
        f"<h2>Recipe</h2><pre>{clip(recipe, TEXT_LETTERS)}</pre>" if recipe else "",
        _environment(files.get("environment.json", "{}")),
        f"<details><summary>config.json</summary><pre>{clip(config, TEXT_LETTERS)}</pre></details>" if config else "",
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def escape(text: object) -> str:
    """Text from data as HTML. Control characters and half surrogates, which a page can not hold, become U+FFFD."""
    return html.escape(re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", str(text)))


def clip(text: object, letters: int) -> str:
    more = len(str(text)) - letters
    return escape(str(text)[:letters]) + (f" <i>… {more:,} letters more</i>" if more > 0 else "")


def show(value: float) -> str:
    """A number for people."""
    if not math.isfinite(value):
        return "not finite"
    if abs(value) >= 1e5:
        power = min(int(math.log10(abs(value)) // 3), 4)
        return f"{value / 1000.0**power:.4g}{' kMGT'[power]}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}".replace("e-0", "e-")


def read_metrics(text: str) -> tuple[Records, list[str]]:
    """The records of each kind in order, and what is to be said of them. Steps logged again after a resume count once."""
    found: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in KINDS}
    broken: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line:
                record = json.loads(line)
                found[record["kind"]][int(record["step"])] = {**record, "step": int(record["step"])}
        except (ValueError, TypeError, KeyError, OverflowError):
            broken.append(str(number))
    records = {kind: [steps[step] for step in sorted(steps)] for kind, steps in found.items()}
    notes = [f"Not readable, perhaps cut off: line {', '.join(broken[:9])} of metrics.jsonl."] if broken else []
    for name, lines in curves(records, *KINDS).items():
        for kind, points in lines.items():
            if gaps := [step for step, value in points if not math.isfinite(value)]:
                count = f"values not finite: {len(gaps)}, the first at step {gaps[0]:,.0f}"
                notes.append(f"{name} ({KINDS[kind]}), {count}. Its line has gaps there.")
    return records, notes


def curves(records: Records, *kinds: str) -> Curves:
    """The points of every metric, those of the evaluation first. A null is a NaN, as strict JSON writes it."""
    found: Curves = {}
    for kind in kinds:
        for record in records[kind]:
            for name, value in record.items():
                if name not in NOT_DRAWN and (value is None or type(value) in (int, float)):
                    point = (float(record["step"]), math.nan if value is None else float(value))
                    found.setdefault(name, {}).setdefault(kind, []).append(point)
    return {name: found[name] for name in sorted(found, key=lambda name: "valid" not in found[name])}


def _verdict(records: Records) -> str:
    """What came out: one line, and the last numbers (of the result, where there is one) beside those at the lowest loss."""
    every = [record for kind in KINDS for record in records[kind]]
    if not every:
        return "<p>No step was logged.</p>"
    steps, seconds, tokens = (max(record.get(name) or 0 for record in every) for name in ("step", "seconds", "tokens"))
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    time = f"{hours:.0f} h {minutes:.0f} min" if hours else f"{minutes:.0f} min {seconds % 60:.0f} s"
    found, kind = curves(records, *KINDS), "valid" if records["valid"] else "train"
    losses = [(value, step) for step, value in found.get("loss", {}).get(kind, []) if math.isfinite(value)]
    loss, best = min(losses, default=(math.nan, math.nan))
    lowest = f"lowest {KINDS[kind]} loss {show(loss)} at step {best:,.0f}" if losses else f"no {KINDS[kind]} loss"
    shown, tiles = next(shown for shown in ("result", "valid", "train") if records[shown]), ""
    for name, lines in ((name, lines) for name, lines in found.items() if shown in lines):
        then = dict(lines.get(kind, []))
        tiles += f"<div><dt>{escape(name)} ({KINDS[shown]})</dt><dd><b>{show(lines[shown][-1][1])}</b></dd>"
        tiles += f"<dd>at step {best:,.0f}: {show(then[best])}</dd></div>" if best in then else "</div>"
    return f"<p>{steps:,} steps · {time} · {show(float(tokens))} tokens · {lowest}</p><dl>{tiles}</dl>"


def thin(points: Points, limit: int) -> list[Points]:
    """At most `limit` points: means of equal buckets and, as they are, the first, last, lowest and highest.

    Returned as pieces of line. A bucket with a value that is not finite has a gap on both sides.
    """
    size = math.ceil(len(points) / (limit - 4)) or 1
    finite = [point for point in points if math.isfinite(point[1])]
    by_value = sorted(finite, key=lambda point: point[1])
    kept = {*finite[:1], *finite[-1:], *by_value[:1], *by_value[-1:]}
    pieces: list[Points] = [[]]
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        usual = [point for point in bucket if point not in kept and math.isfinite(point[1])]
        mean = [(sum(p[0] for p in usual) / len(usual), sum(p[1] for p in usual) / len(usual))] if usual else []
        drawn = sorted([*mean, *(point for point in bucket if point in kept)])
        if all(math.isfinite(value) for _, value in bucket):
            pieces[-1] += drawn
        else:
            pieces += [drawn, []]
    return [piece for piece in pieces if piece]


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from at most `low` to at least `high`: 1, 2 or 5 times a power of ten apart, about `count` steps."""
    least = (high - low) / count
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * times for times in (1, 2, 5, 10) if power * times > least * 0.999)
    return [float(f"{n * step:.12g}") for n in range(math.floor(low / step), math.ceil(high / step) + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers between `low` and `high`, which are at least a decade apart."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        found = [value for n in powers for m in digits if low <= (value := float(f"{m}e{n}")) <= high]
        if len(found) <= count + 1:
            return found
    return found[:: math.ceil(len(found) / count)]


def chart(name: str, lines: dict[str, Points], *, width: int, height: int, limit: int) -> str:
    """One metric over steps: training a thin line, validation a line with dots; a log axis where the range asks for it."""
    pieces = {kind: thin(points, limit if kind == "train" else limit // 4) for kind, points in lines.items()}
    values = [value for drawn in pieces.values() for piece in drawn for _, value in piece] or [0.0]
    low, high, count = min(values), max(values), height // 55
    log = name in LOGARITHMIC and low > 0 and high / low > 10
    if high - low <= 0.005 * max(abs(low), abs(high)):  # as good as constant: seen against zero
        low, high = min(low, 0.0), max(high, 0.0) or float(low == 0)
    marks = log_ticks(low, high, count) if log else linear_ticks(low, high, count)
    low, high = (low, high) if log else (marks[0], marks[-1])
    last = max([1.0, *(step for points in lines.values() for step, _ in points)])
    right, floor = width - RIGHT, height - BOTTOM

    def x(step: float) -> float:
        return round(LEFT + step / last * (right - LEFT), 1)

    def y(value: float) -> float:
        part = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        return round(floor - part * (floor - TOP), 1)

    ends = [f"{KINDS[kind]} {show(points[0][1])} to {show(points[-1][1])}" for kind, points in lines.items()]
    title = escape(f"{name} over {last:,.0f} steps: {', '.join(ends)}")
    svg = f'<svg viewBox="0 0 {width} {height}" role="img"><title>{title}</title>'
    svg += f'<text class="name" x="{LEFT}" y="16">{escape(name)}{" (log scale)" if log else ""}</text>'
    for value in marks:
        svg += f'<path class="grid" d="M{LEFT} {y(value)}H{right}"/>'
        svg += f'<text x="{LEFT - 8}" y="{y(value)}" dy=".32em" text-anchor="end">{show(value)}</text>'
    for step in (step for step in linear_ticks(0.0, last, width // 130) if step <= last):
        svg += f'<text x="{x(step)}" y="{floor + 20}" text-anchor="middle">{show(step)}</text>'
    svg += f'<text x="{right}" y="{height - 5}" text-anchor="end">step</text>\n'
    for at, (kind, drawn) in zip((right - 290, right - 150), pieces.items(), strict=False):
        path = "".join("M" + " ".join(f"{x(step)} {y(value)}" for step, value in piece) + "h0" for piece in drawn)
        svg += f'<path class="{kind}" d="{path}"/>\n'
        for step, value in (point for piece in drawn for point in piece if kind == "valid"):
            tip = f"<title>step {step:,.0f}: {show(value)}</title>"
            svg += f'<circle class="valid" cx="{x(step)}" cy="{y(value)}" r="3">{tip}</circle>'
        if name == "loss":  # the small charts' legend too
            dot = f'<circle class="valid" cx="{at + 12}" cy="12" r="3"/>' if kind == "valid" else ""
            svg += f'<path class="{kind}" d="M{at} 12h24"/>{dot}<text x="{at + 32}" y="16">{KINDS[kind]}</text>'
    return svg + "</svg>"


def _charts(found: Curves) -> str:
    loss = chart("loss", found.get("loss", {}), width=640, height=300, limit=600)
    small = [chart(name, found[name], width=300, height=180, limit=150) for name in found if name != "loss"]
    return (
        f'<h2>Curves</h2><figure class="loss">{loss}</figure><div class="small">{"".join(small)}</div>' if found else ""
    )


def _samples(evaluations: list[dict[str, Any]]) -> str:
    """What the model made of some inputs at the last evaluation. A difference is marked by a sign and a word."""
    samples: list[dict[str, Any]] = next((record["samples"] for record in evaluations[::-1] if "samples" in record), [])
    columns = [name for name in ("input", "output", "wanted") if any(name in sample for sample in samples)]
    body = "".join(f"<th>{name}</th>" for name in columns)
    for sample in samples[:SAMPLES]:
        cells = [clip(sample.get(name, ""), SAMPLE_LETTERS) for name in columns]
        if "wanted" in sample and str(sample["wanted"]).strip() != str(sample.get("output")).strip():
            cells[-1] += "<br/><b>✗ differs</b>"
        body += "</tr>\n<tr>" + "".join(f'<td dir="auto">{cell}</td>' for cell in cells)
    more = f'<p class="soft">The first {SAMPLES} of {len(samples)}.</p>' if len(samples) > SAMPLES else ""
    return f"<h2>Samples</h2><table><tr>{body}</tr></table>{more}" if samples else ""


def place_labels(count: int, cell: float) -> list[tuple[int, float]]:
    """Which tokens along a side are named, and where the middles of their names are: as many as do not touch."""
    return [(n, (n + 0.5) * cell) for n in range(0, count, math.ceil(LINE / cell))]


def label(token: str) -> tuple[str, float]:
    """A token's name in a picture, and its width: spaces and line ends can be seen, a long one is cut."""
    text = token.replace(" ", "␣").replace("\n", "⏎")
    text = text if len(text) <= 16 else text[:15] + "…"
    return escape(text), LETTER * sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _cells(weights: NDArray[Any]) -> str:
    """One path for each shade; neighbours of one shade are one stroke, so that 40,000 cells stay under 200 kB."""
    shades = np.rint(weights / np.maximum(weights.max(axis=1, keepdims=True), 1e-12) * LEVELS)
    paths = ""
    for level in range(1, LEVELS + 1):
        strokes = ""
        for n, row in enumerate(shades == level):
            edges: list[int] = np.flatnonzero(np.diff(row, prepend=False, append=False)).tolist()
            runs = zip([0, *edges[1::2]], edges[::2], edges[1::2], strict=False)
            strokes += f"M0 {n}.5" * bool(edges) + "".join(
                f"m{start - end} 0h{stop - start}" for end, start, stop in runs
            )
        paths += f'<path stroke-opacity="{level / LEVELS:.2f}" d="{strokes}"/>\n'
    return paths


def draw_attention(picture: AttentionPicture) -> str:
    """The picture as a figure: a row a query, a column a key; of more than 200 tokens, the first 200."""
    rows, columns = ([label(token) for token in side[:TOKENS]] for side in (picture.rows, picture.columns))
    weights = (
        picture.weights.detach().double().cpu().numpy() if isinstance(picture.weights, Tensor) else picture.weights
    )
    weights = np.asarray(weights[:TOKENS, :TOKENS], dtype=np.float64)
    cell = min(26.0, SIDE / len(rows), SIDE / len(columns))
    widest = max(width for _, width in columns)
    turn, room = ('rotate(-90)" dy=".32em"', widest) if widest > cell - 4 else ('" text-anchor="middle"', LINE)
    left, top = round(8 + max(width for _, width in rows)), round(8 + room)
    width, height = left + round(cell * len(columns)), top + round(cell * len(rows))
    title = f"<title>{escape(picture.title)}: attention of {len(rows)} tokens to {len(columns)}</title>"
    svg = f'<svg class="map" viewBox="0 0 {width + 4} {height + 4}" style="max-width:{width + 4}px" role="img">{title}'
    for n, at in place_labels(len(rows), cell):
        svg += f'<text x="{left - 6}" y="{top + at:.1f}" dy=".32em" text-anchor="end">{rows[n][0]}</text>'
    for n, at in place_labels(len(columns), cell):
        svg += f'<text transform="translate({left + at:.1f} {top - 6}){turn}>{columns[n][0]}</text>'
    svg += (
        f'<g class="cells" transform="translate({left} {top}) scale({cell:.4f})">{_cells(np.nan_to_num(weights))}</g>'
    )
    svg += f'<path class="frame" d="M{left} {top}H{width}V{height}H{left}z"/></svg>'
    said = f" The first {TOKENS} tokens." if weights.shape != tuple(picture.weights.shape) else ""
    lost = np.count_nonzero(~np.isfinite(weights))
    said += f" Not finite, left blank: {lost} weights." if lost else ""
    return f"<figure>{svg}<figcaption>{escape(picture.title)}.{said}</figcaption></figure>"


def _pictures(attention: Sequence[AttentionPicture]) -> str:
    """The pictures that the page's size allows; those left out are named."""
    drawn, left_out = "", list[str]()
    for picture in attention:
        figure = draw_attention(picture)
        if len(drawn) + len(figure) <= PICTURE_BYTES:
            drawn += figure
        else:
            left_out.append(escape(picture.title))
    more = f'<p class="soft">Left out to keep the page small: {", ".join(left_out)}.</p>' if left_out else ""
    text = (
        "Each row is a token that looks, each column a token it looks at. The stronger the colour, the larger the weight, "
        "against the largest of its row. A picture shows where a head looks, not why the model answers as it does: "
        "it is not an explanation."
    )
    return f'<h2>Attention</h2><p class="soft">{text}</p>{drawn}{more}' if attention else ""


def _environment(text: str) -> str:
    try:
        values = json.loads(text).items()
    except (ValueError, AttributeError):
        return '<p class="note">environment.json can not be read.</p>'
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{clip(value, SAMPLE_LETTERS)}</td></tr>" for name, value in values)
    return f"<h2>Environment</h2><table>{rows}</table>" if rows else ""
