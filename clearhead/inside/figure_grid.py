"""A matplotlib figure of a grid of cells with labels that never overlap. No window is needed."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO

from torch import Tensor

from clearhead.errors import MissingExtraError
from clearhead.inside.heatmap import label

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import Colormap, LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, findfont, get_font
except ImportError:
    raise MissingExtraError("figures need matplotlib, which is missing; pip install 'clearhead[plot]'") from None

SIDE, TEXT_SIDE = 7.0, 10.0  # inches: the longest side of a grid, and the width of one with text in its cells
BAR, BAR_WIDTH = 1.2, 0.85  # inches: the least height of a colour bar, and the width of it with its numbers and name
SMALL, LARGE = 8.0, 10.0  # points
LINE = 1.35  # line height, in letter sizes
ROW = SMALL * LINE / 72  # inches: the height of a line of small letters
# The explorer's colours: white is nothing, and more is always darker, so that they are readable in grey and with any colour vision.
RISING = LinearSegmentedColormap.from_list(
    "rising", ["#ffffff", "#deebf0", "#9ecad3", "#529eb2", "#226c92", "#1b3e6e", "#161640"]
)
TWO_SIDED = LinearSegmentedColormap.from_list("two-sided", ["#8a3506", "#d98a55", "#ffffff", "#529eb2", "#146a80"])


class PlotFigure(Figure):
    """A figure with its own canvas, so that it needs no display. A notebook shows it as a picture."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), dpi=110)
        self.agg = FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        out = BytesIO()
        self.savefig(out, format="png")
        return out.getvalue()

    def extent(self, text: str, points: float) -> float:
        """The width of a text in inches."""
        renderer = self.agg.get_renderer()
        return renderer.get_text_width_height_descent(text, FontProperties(size=points), False)[0] / self.dpi


@dataclass(frozen=True)
class _Layout:
    """Sizes in inches from the lower left corner, and the labels as they are written."""

    width: float
    height: float
    left: float  # of the grid
    below: float  # room for the labels below the grid
    base: float  # of the grid
    top: float  # of the grid
    wide: float  # of a cell
    tall: float
    is_level: bool  # the columns' names fit their cells; else they are turned by 90 degrees
    rows: list[str]
    columns: list[str]
    title: list[str]
    note: list[str]

    def share(self, left: float, base: float, width: float, height: float) -> tuple[float, float, float, float]:
        """A rectangle as matplotlib wants it: in shares of the figure."""
        return left / self.width, base / self.height, width / self.width, height / self.height


@dataclass
class Grid:
    """Values as cells, with labels on the left and below, a title, a colour bar, and a note at the foot. Sizes are in inches."""

    values: Tensor
    rows: Sequence[str]
    columns: Sequence[str]
    title: str
    note: str
    scale: str  # the colour bar's name
    cell: tuple[float, float]  # the largest width and height of a cell
    texts: Sequence[Sequence[str]] | None = None
    axes: tuple[str, str] = ("", "")
    lowest: float = 0.0
    highest: float | None = None
    colours: Colormap = field(default_factory=lambda: RISING)
    dots: bool = False  # on each row's maximum

    def draw(self) -> PlotFigure:
        layout = self._lay_out()
        figure = PlotFigure(layout.width, layout.height)
        width, height = layout.width, layout.height
        title, note = "\n".join(layout.title), "\n".join(layout.note)
        figure.text(0.1 / width, 1 - 0.1 / height, title, size=LARGE, va="top", parse_math=False, weight="bold")
        figure.text(0.1 / width, 0.08 / height, note, size=SMALL, va="bottom", parse_math=False, color="0.35")
        n_rows, n_columns = self.values.shape
        ax = figure.add_axes(layout.share(layout.left, layout.base, n_columns * layout.wide, n_rows * layout.tall))
        image = ax.imshow(
            self.values.numpy(),
            aspect="auto",
            cmap=self.colours,
            vmin=self.lowest,
            vmax=self.highest,
            interpolation="nearest",
        )
        ax.set_facecolor("0.9")
        if self.dots:
            ax.plot(
                self.values.argmax(1), range(n_rows), "o", color="white", markeredgecolor="black", markersize=2.5, lw=0
            )
        self._write_labels(figure, ax, layout)
        self._write_texts(figure, ax, layout.wide, layout.tall)
        long = max(n_rows * layout.tall, BAR)
        bar = figure.add_axes(layout.share(layout.left + n_columns * layout.wide + 0.15, layout.top - long, 0.12, long))
        figure.colorbar(image, cax=bar)
        bar.locator_params(nbins=4)
        bar.tick_params(labelsize=SMALL, length=2, pad=2)
        bar.set_ylabel("\n".join(wrap(self.scale, long, SMALL)), size=SMALL)
        return figure

    def _lay_out(self) -> _Layout:
        n_rows, n_columns = self.values.shape
        wide = min(self.cell[0], (SIDE if self.texts is None else TEXT_SIDE) / n_columns)
        tall = min(self.cell[1], SIDE / n_rows)
        rows, columns = ([spell(name) for name in names] for names in (self.rows, self.columns))
        ruler = PlotFigure(1.0, 1.0)
        longest = max(ruler.extent(name, SMALL) for name in columns)
        is_level = longest < wide - 0.06
        left = max(ruler.extent(name, SMALL) for name in rows) + 0.15 + (ROW + 0.05 if self.axes[0] else 0)
        below = (ROW if is_level else longest) + 0.12 + (ROW + 0.05 if self.axes[1] else 0)
        width = max(left + n_columns * wide + BAR_WIDTH + 0.25, 4.2)
        title, note = wrap(self.title, width, LARGE), wrap(self.note, width, SMALL)
        foot = len(note) * ROW + 0.15
        top = foot + max(n_rows * tall + below, BAR + 0.15)
        height = len(title) * LARGE * LINE / 72 + 0.2 + top
        base = top - n_rows * tall
        return _Layout(width, height, left, below, base, top, wide, tall, is_level, rows, columns, title, note)

    def _write_labels(self, figure: PlotFigure, ax: Axes, layout: _Layout) -> None:
        """Names of rows, columns and axes; of crowded names every nth."""
        n_rows, n_columns = self.values.shape
        y = range(0, n_rows, math.ceil(ROW / layout.tall))
        x = range(0, n_columns, 1 if layout.is_level else math.ceil(ROW / layout.wide))
        ax.set_yticks(list(y), [layout.rows[n] for n in y], size=SMALL, parse_math=False)
        turned = 0 if layout.is_level else 90
        ax.set_xticks(list(x), [layout.columns[n] for n in x], size=SMALL, parse_math=False, rotation=turned)
        ax.tick_params(length=2, pad=2)
        if self.axes[0]:
            middle = (layout.base + n_rows * layout.tall / 2) / layout.height
            figure.text(0.1 / layout.width, middle, self.axes[0], size=SMALL, rotation=90, va="center")
        if self.axes[1]:
            middle = (layout.left + n_columns * layout.wide / 2) / layout.width
            under = (layout.base - layout.below + 0.03) / layout.height
            figure.text(middle, under, self.axes[1], size=SMALL, ha="center", va="bottom")

    def _write_texts(self, figure: PlotFigure, ax: Axes, wide: float, tall: float) -> None:
        """The texts in the cells, cut to fit; none if the cells are too small."""
        points = SMALL - 1
        if self.texts is None or tall < points * LINE / 72 or wide < 0.28:
            return
        span = (self.highest if self.highest is not None else float(self.values.nan_to_num().max())) - self.lowest
        for i, row in enumerate(self.texts):
            for j, text in enumerate(row):
                text, value = spell(label(text) if text else ""), float(self.values[i, j])
                while text and figure.extent(text, points) > wide - 0.05:
                    text = text.removesuffix("…")[:-1] + "…" if len(text.removesuffix("…")) > 1 else ""
                share = (value - self.lowest) / span if span else 0.0
                # Dark text on light cells: the lower half of the rising scale, the middle of the two-sided one.
                dark = share < 0.5 if self.colours is RISING else 0.2 < share < 0.8
                ax.text(
                    *(j, i, text),
                    size=points,
                    ha="center",
                    va="center",
                    color="black" if dark else "white",
                    parse_math=False,
                )


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties())).get_charmap())


def spell(text: str) -> str:
    """The text with an escape for each character that the font lacks, so that two such tokens look different."""
    return "".join(c if ord(c) in _glyphs() else c.encode("unicode_escape").decode() for c in text)


def wrap(text: str, width: float, points: float) -> list[str]:
    """The text in lines that fit `width` inches; a letter is about 0.6 of its size wide."""
    return textwrap.wrap(spell(text), max(int((width - 0.2) * 72 / (0.6 * points)), 8)) or [""]
