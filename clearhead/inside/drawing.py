"""How figures are drawn: a grid of cells whose labels never lie on each other, on a figure that needs no window."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO

from torch import Tensor

from clearhead.errors import MissingExtraError
from clearhead.inside.pictures import label

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, findfont, get_font
except ImportError:
    raise MissingExtraError("figures need matplotlib, which is missing; pip install 'clearhead[plot]'") from None

SIDE, WRITTEN = 7.0, 10.0  # inches, of the longest side of a grid, and of one with words in its cells
BAR = 1.2  # the least that a scale with its numbers needs
SMALL, LARGE = 8.0, 10.0  # points
LINE = 1.35  # line height
RISING, TWO_SIDED = "cividis", "PuOr"  # both keep their order with any colour vision; the first also in grey


class Picture(Figure):
    """A figure that has a canvas of its own, so that it draws anywhere, and that a notebook shows by itself."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), dpi=110)
        self.agg = FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        out = BytesIO()
        self.savefig(out, format="png")
        return out.getvalue()

    def extent(self, text: str, points: float) -> float:
        """How wide a text will be, in inches."""
        renderer = self.agg.get_renderer()
        return renderer.get_text_width_height_descent(text, FontProperties(size=points), False)[0] / self.dpi


@dataclass
class Grid:
    """Values as cells, with labels on the left and below, a title, a scale, and a note at the foot. Sizes are in inches."""

    values: Tensor
    rows: Sequence[str]
    columns: Sequence[str]
    title: str
    note: str
    scale: str
    cell: tuple[float, float]
    texts: Sequence[Sequence[str]] | None = None
    axes: tuple[str, str] = ("", "")
    lowest: float = 0.0
    highest: float | None = None
    colours: str = RISING
    dots: bool = False

    def draw(self) -> Picture:
        n_rows, n_columns = self.values.shape
        wide = min(self.cell[0], (SIDE if self.texts is None else WRITTEN) / n_columns)
        tall = min(self.cell[1], SIDE / n_rows)
        line = SMALL * LINE / 72
        rows, columns = ([spell(name) for name in names] for names in (self.rows, self.columns))
        ruler = Picture(1.0, 1.0)
        level = max(ruler.extent(name, SMALL) for name in columns) < wide - 0.06
        left = max(ruler.extent(name, SMALL) for name in rows) + 0.15 + (line + 0.05 if self.axes[0] else 0)
        below = (line if level else max(ruler.extent(name, SMALL) for name in columns)) + 0.12
        below += line + 0.05 if self.axes[1] else 0
        bar = 0.85  # the scale, its numbers and its name
        width = max(left + n_columns * wide + bar + 0.25, 4.2)
        title, note = wrap(self.title, width, LARGE), wrap(self.note, width, SMALL)
        top, foot = len(title) * LARGE * LINE / 72 + 0.2, len(note) * line + 0.15
        middle = max(n_rows * tall + below, BAR + 0.15)
        height = top + middle + foot
        figure = Picture(width, height)
        figure.text(
            0.1 / width, 1 - 0.1 / height, "\n".join(title), size=LARGE, va="top", parse_math=False, weight="bold"
        )
        figure.text(
            0.1 / width, 0.08 / height, "\n".join(note), size=SMALL, va="bottom", parse_math=False, color="0.35"
        )
        base = foot + middle - n_rows * tall
        ax = figure.add_axes((left / width, base / height, n_columns * wide / width, n_rows * tall / height))
        image = ax.imshow(
            self.values.numpy(),
            aspect="auto",
            cmap=self.colours,
            vmin=self.lowest,
            vmax=self.highest,
            interpolation="nearest",
        )
        ax.set_facecolor("0.9")
        shown = [range(0, n, math.ceil(line / size)) for n, size in ((n_rows, tall), (n_columns, wide))]
        ax.set_yticks(list(shown[0]), [rows[at] for at in shown[0]], size=SMALL, parse_math=False)
        shown[1] = range(n_columns) if level else shown[1]
        ax.set_xticks(
            list(shown[1]), [columns[at] for at in shown[1]], size=SMALL, parse_math=False, rotation=0 if level else 90
        )
        ax.tick_params(length=2, pad=2)
        if self.axes[0]:
            figure.text(
                0.1 / width, (base + n_rows * tall / 2) / height, self.axes[0], size=SMALL, rotation=90, va="center"
            )
        if self.axes[1]:
            at = (left + n_columns * wide / 2) / width, (base - below + 0.03) / height
            figure.text(*at, self.axes[1], size=SMALL, ha="center", va="bottom")
        if self.dots:
            ax.plot(
                self.values.argmax(1), range(n_rows), "o", color="white", markeredgecolor="black", markersize=2.5, lw=0
            )
        self._write_texts(figure, ax, wide, tall)
        long = max(n_rows * tall, BAR)
        at = (left + n_columns * wide + 0.15) / width, (foot + middle - long) / height, 0.12 / width, long / height
        side = figure.add_axes(at)
        figure.colorbar(image, cax=side)
        side.locator_params(nbins=4)
        side.tick_params(labelsize=SMALL, length=2, pad=2)
        spelt = wrap(self.scale, long, SMALL)
        side.set_ylabel("\n".join(spelt), size=SMALL)
        return figure

    def _write_texts(self, figure: Picture, ax: Axes, wide: float, tall: float) -> None:
        """What stands in the cells, cut to fit; nothing, where cells are too small to read in."""
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
                # Dark on the light half of the scale: of the two-sided one, that is the middle.
                dark = share > 0.55 if self.colours == RISING else 0.25 < share < 0.75
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
    """With the escape of each character that the font can not draw, so that two such tokens can be told apart."""
    return "".join(c if ord(c) in _glyphs() else c.encode("unicode_escape").decode() for c in text)


def wrap(text: str, width: float, points: float) -> list[str]:
    """Lines that fit into so many inches; a letter takes about 0.6 of its size."""
    return textwrap.wrap(spell(text), max(int((width - 0.2) * 72 / (0.6 * points)), 8)) or [""]
