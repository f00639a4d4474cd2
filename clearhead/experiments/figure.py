"""A result's charts side by side, as a matplotlib figure. The same result gives the same bytes of SVG."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from clearhead.errors import MissingExtraError
from clearhead.experiments.result import Chart, Result

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("figures need matplotlib, which is missing; pip install 'clearhead[plot]'") from None

# Okabe and Ito's colours: told apart with any colour vision. Lines also differ by their signs, for print in grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#999999")
GREY = "#808080"  # of text and axes: readable on white and on black
SIGNS = "osD^vPX*"
WIDTH, HEIGHT = 4.6, 3.5  # inches of one chart


def draw(result: Result) -> Any:
    """One row of charts."""
    figure = Figure(figsize=(WIDTH * len(result.charts), HEIGHT), layout="constrained")
    for axes, chart in zip(figure.subplots(1, len(result.charts), squeeze=False)[0], result.charts, strict=True):
        draw_chart(axes, chart)
    return figure


def draw_chart(axes: Any, chart: Chart) -> None:
    if any(isinstance(x, str) for curve in chart.curves for x in curve.x):
        _draw_bars(axes, chart)
    elif chart.is_map:
        _draw_map(axes, chart)
    else:
        for n, curve in enumerate(chart.curves):
            shown = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
            style = dict(color=COLOURS[n % 8], marker=SIGNS[n % 8] if len(shown) <= 20 else "", markersize=4)
            axes.plot([x for x, _ in shown], [y for _, y in shown], label=curve.label, **style)
    axes.set_title(chart.title, fontsize=10)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({x for curve in chart.curves for x in curve.x}), minor=False)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.tick_params(axis="x", labelsize=8, labelrotation=45 if is_turned(chart) else 0)
        axes.minorticks_off()
    if chart.log_y:
        axes.set_yscale("log")
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.curves) > 1:
        below = -0.32 if chart.log_x and is_turned(chart) else -0.2
        axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, below), ncols=2)


def is_turned(chart: Chart) -> bool:
    """Whether the places of a logarithmic axis are too many to be written side by side."""
    return len({x for curve in chart.curves for x in curve.x}) > 5


def _draw_bars(axes: Any, chart: Chart) -> None:
    names, width = chart.curves[0].x, 0.8 / len(chart.curves)
    for n, curve in enumerate(chart.curves):
        at = [i + (n - (len(chart.curves) - 1) / 2) * width for i in range(len(names))]
        axes.bar(at, curve.y, width, label=curve.label, color=COLOURS[n % 8])
    crowded = sum(len(str(name)) for name in names) > 34
    axes.set_xticks(range(len(names)), [str(name) for name in names], rotation=35 if crowded else 0)
    if crowded:
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")


def _draw_map(axes: Any, chart: Chart) -> None:
    for n, curve in enumerate(chart.curves):
        axes.plot(curve.x, curve.y, SIGNS[n % 8], color=COLOURS[n % 8], markersize=4, label=curve.label)
        for word, x, y in zip(curve.words, curve.x, curve.y, strict=False):
            axes.annotate(word, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=7)
    axes.margins(0.12)
    axes.set_aspect("equal", adjustable="datalim")


def write(result: Result, file: Path) -> None:
    """Save the figure; the format is that of the file's ending."""
    style: dict[Any, Any] = {"svg.hashsalt": "clearhead", "svg.fonttype": "none", "font.family": "sans-serif"}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY)
    with matplotlib.rc_context(style):
        metadata = {"Date": None} if file.suffix == ".svg" else None
        draw(result).savefig(file, metadata=metadata, dpi=130, transparent=True)
