"""The drawings of a report, as SVG: a metric over steps, and a map of attention."""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clearhead.errors import InputError

Points = list[tuple[float, float]]  # step, value

KINDS = {"train": "training", "valid": "validation", "result": "result"}  # a result: of the weights that were saved
LOGARITHMIC = ("loss", "perplexity", "grad_norm")  # where they change more than tenfold
LEFT, RIGHT, TOP, BOTTOM = 80, 24, 34, 46  # a chart's margins
TOKENS, SIDE, LINE, LETTER, LEVELS = 200, 520, 13, 7.4, 5  # a picture: most tokens, size, room for a label, shades


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


def escape(text: object) -> str:
    """Text from data as HTML. Control characters and half surrogates, which a page can not hold, become U+FFFD."""
    return html.escape(re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", str(text)))


def format_number(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    if abs(value) >= 1e5:
        power = min(int(math.log10(abs(value)) // 3), 4)
        return f"{value / 1000.0**power:.4g}{' kMGT'[power]}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}".replace("e-0", "e-")


def thin(points: Points, limit: int) -> list[Points]:
    """At most `limit` points: the means of equal buckets, and the first, last, lowest and highest point unchanged.

    Returns pieces of line: a bucket with a value that is not finite has a gap on both sides.
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
    """One metric over steps: training a thin line, validation a line with dots; a log axis if the range is large."""
    pieces = {kind: thin(points, limit if kind == "train" else limit // 4) for kind, points in lines.items()}
    values = [value for drawn in pieces.values() for piece in drawn for _, value in piece] or [0.0]
    low, high, count = min(values), max(values), height // 55
    log = name in LOGARITHMIC and low > 0 and high / low > 10
    if high - low <= 0.005 * max(abs(low), abs(high)):  # nearly constant: drawn against zero
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

    ends = [
        f"{KINDS[kind]} {format_number(points[0][1])} to {format_number(points[-1][1])}"
        for kind, points in lines.items()
    ]
    title = escape(f"{name} over {last:,.0f} steps: {', '.join(ends)}")
    svg = f'<svg viewBox="0 0 {width} {height}" role="img"><title>{title}</title>'
    svg += f'<text class="name" x="{LEFT}" y="19">{escape(name)}{" (log scale)" if log else ""}</text>'
    for value in marks:
        svg += f'<path class="grid" d="M{LEFT} {y(value)}H{right}"/>'
        svg += f'<text x="{LEFT - 8}" y="{y(value)}" dy=".32em" text-anchor="end">{format_number(value)}</text>'
    for step in (step for step in linear_ticks(0.0, last, width // 130) if step <= last):
        svg += f'<text x="{x(step)}" y="{floor + 20}" text-anchor="middle">{format_number(step)}</text>'
    svg += f'<text x="{right}" y="{height - 5}" text-anchor="end">step</text>\n'
    for at, (kind, drawn) in zip((right - 290, right - 150), pieces.items(), strict=False):
        path = "".join("M" + " ".join(f"{x(step)} {y(value)}" for step, value in piece) + "h0" for piece in drawn)
        svg += f'<path class="{kind}" d="{path}"/>\n'
        for step, value in (point for piece in drawn for point in piece if kind == "valid"):
            tip = f"<title>step {step:,.0f}: {format_number(value)}</title>"
            svg += f'<circle class="valid" cx="{x(step)}" cy="{y(value)}" r="3">{tip}</circle>'
        if name == "loss":  # the small charts' legend too
            dot = f'<circle class="valid" cx="{at + 12}" cy="15" r="3"/>' if kind == "valid" else ""
            svg += f'<path class="{kind}" d="M{at} 15h24"/>{dot}<text x="{at + 32}" y="19">{KINDS[kind]}</text>'
    return svg + "</svg>"


def place_labels(count: int, cell: float) -> list[tuple[int, float]]:
    """Which tokens along a side get a label, and the middle of each label: as many as do not touch."""
    return [(n, (n + 0.5) * cell) for n in range(0, count, math.ceil(LINE / cell))]


def label(token: str) -> tuple[str, float]:
    """A token's label in a picture, and its width: spaces and line ends are made visible, a long one is cut."""
    text = token.replace(" ", "␣").replace("\n", "⏎")
    text = text if len(text) <= 16 else text[:15] + "…"
    return escape(text), LETTER * sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _cells(weights: NDArray[Any]) -> str:
    """One path for each shade. Neighbours of one shade are one stroke, so that 40,000 cells stay under 200 kB."""
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
    """The picture as a figure, one row for each query and one column for each key; at most 200 tokens."""
    rows, columns = ([label(token) for token in side[:TOKENS]] for side in (picture.rows, picture.columns))
    weights = (
        picture.weights.detach().cpu().double().numpy() if isinstance(picture.weights, Tensor) else picture.weights
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
