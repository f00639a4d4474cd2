"""A model drawn from its config, as in Figure 1 of the paper: the residual stream is the spine, each part stands beside it.

`draw` is public (`ch.draw`); the page's Model panel, `clearhead draw` and a run's report show the same SVG.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

from clearhead.config import Config
from clearhead.costs.flops import Lengths, check_lengths
from clearhead.costs.model_parts import Part, figures, input_of, is_before, is_passed, measure, output_of, parts_of
from clearhead.costs.pattern_picture import SIDE, draw_pattern
from clearhead.costs.text_diagram import write_model
from clearhead.errors import InputError

# Figures are in SVG's units; a column is one stack.
COLUMN, SPINE, LEFT, WIDE, HIGH, SLIM, GAP, BELOW = 432, 62, 104, 308, 48, 24, 18, 56
LINE, FITS = 15, 46  # the height of a further line of words, and the letters of one
STYLE = """<style>
svg { font: 14px system-ui, sans-serif; color: #191b20; background: #fff }
.part rect { fill: #e2eff2; stroke: #146a80 } .norm rect { fill: #f0eeea; stroke: #8b8f97 } .pattern path { fill: #146a80 }
.frame { fill: none; stroke: #8b8f97; stroke-dasharray: 4 4 } .spine { stroke: #146a80; stroke-width: 3; fill: none }
.way { stroke: #8b8f97; fill: none } .plus { fill: #fff; stroke: #146a80 } text { fill: currentColor }
.small { font-size: 12px; fill: #5c616b } .end { text-anchor: end }
@media (prefers-color-scheme: dark) { svg { color: #eceae4; background: #181a1f } .part rect { fill: #1c3338; stroke: #6cc5b9 }
  .norm rect { fill: #22252c } .pattern path { fill: #6cc5b9 }
  .spine { stroke: #6cc5b9 } .plus { fill: #181a1f; stroke: #6cc5b9 } .small { fill: #a0a5af } }
</style>"""


@dataclass(frozen=True)
class Drawing:
    """A model's drawing, part by part: `print(drawing)` in a terminal, `drawing.save("gpt2.svg")`; a notebook shows it."""

    config: Config
    lengths: Lengths  # for which FLOPs are counted

    @cached_property
    def stacks(self) -> dict[str, list[Part]]:
        return parts_of(self.config, self.lengths)

    @property
    def parts(self) -> list[Part]:
        """All parts, in the order in which a forward pass meets them."""
        return [part for stack in self.stacks.values() for part in stack]

    @property
    def svg(self) -> str:
        return draw_model(self)

    def save(self, path: str | Path) -> None:
        """Write the SVG: it opens in a browser, light or dark as its reader has chosen."""
        if Path(path).suffix != ".svg":
            raise InputError(f"a drawing is an SVG; got {str(path)!r}; name a file that ends in .svg")
        Path(path).write_text(self.svg, encoding="utf-8")

    def __repr__(self) -> str:
        return write_model(self.config, self.stacks, self.lengths)

    def _repr_svg_(self) -> str:
        return self.svg


def draw(model: Any, *, length: int | None = None, source_length: int | None = None) -> Drawing:
    """The drawing of a config, or of a model: every part with its size, its parameters and its operations.

    The operations are those of one forward pass of one row; lengths that are not given are the longest that the config allows.
    Nothing is loaded or built.
    """
    config = model if isinstance(model, Config) else getattr(model, "config", None)
    if not isinstance(config, Config):
        raise InputError(f"draw needs a Config or a model; got {model!r}; for a preset: ch.draw(ch.preset('gpt2'))")
    return Drawing(config, check_lengths(config, length, source_length))


def draw_model(drawing: Drawing, *, style: bool = True) -> str:
    """An SVG of the model, bottom to top. Each part is a link with `data-panel`, the page's panel that shows it.

    style   with its own colours; the page has them in its style sheet
    """
    stacks = drawing.stacks
    columns = [_Column(drawing.config, stack, parts, n * COLUMN) for n, (stack, parts) in enumerate(stacks.items())]
    height = max(column.height for column in columns)
    drawn = [line for column in columns for line in column.draw(height)]
    drawn.append(_text(14, height - 12, measure(drawing.lengths), "small"))
    if len(columns) == 2:  # from the encoder's output to the decoder's cross-attention
        (x, y), (to_x, to_y) = columns[0].top, columns[1].cross
        drawn.insert(0, f'<path class="spine" d="M{x} {y}H{COLUMN - 2}V{to_y}H{to_x}"/>')
    size = f'viewBox="0 0 {COLUMN * len(columns)} {height}" width="{COLUMN * len(columns)}" height="{height}"'
    kind = "pair" if len(columns) == 2 else "single"
    open_tag = f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" {size} role="group" aria-label="The model, part by part">'
    return "\n".join([open_tag, *([STYLE] if style else []), *drawn, "</svg>"])


class _Column:
    """One stack, drawn upwards from `y`. The spine is the residual stream."""

    def __init__(self, config: Config, stack: str, parts: list[Part], x: int) -> None:
        self.config, self.stack, self.parts, self.x = config, stack, parts, x
        self.spine, self.left = x + SPINE, x + LEFT
        self.top = self.cross = (0, 0)
        self.height = BELOW + 60 + sum(_room(part) for part in parts)

    def draw(self, height: int) -> list[str]:
        y = height - BELOW
        lines = [_text(self.left, y + 20, input_of(self.config, self.stack), "small")]
        stream, ends = f"M{self.spine} {y + 12}", list[int]()
        for i, part in enumerate(self.parts):
            if len(ends) == (0 if part.in_block else 1):  # here the blocks begin, or end
                ends.append(y)
            top = y - GAP // 2 - _high(part)
            if is_passed(self.config, self.parts, i):
                stream += f"V{top + _high(part) - 6}H{self.left}M{self.left} {top + 6}H{self.spine}"
            else:
                lines += self._way(i, top)
            lines += self._box(part, top)
            if part.kind == "cross":
                self.cross = (self.left, top + _high(part) - 9)
            y -= _room(part)
        ends += [y] * (2 - len(ends))
        self.top = (self.spine, y - 8)
        box = f'x="{self.x + 12}" y="{ends[1] - 2}" width="{COLUMN - 24}" height="{ends[0] - ends[1]}" rx="10"'
        count = _text(self.spine - 16, ends[1] + 20, f"× {self._depth()}", "small end")
        lines.append(_text(self.left, y - 14, output_of(self.config, self.stack), "small"))
        return [f'<rect class="frame" {box}/>', f'<path class="spine" d="{stream}V{y - 8}"/>', *lines, count]

    def _way(self, i: int, top: int) -> list[str]:
        """From the spine into a step, or through its norm, and from the step back to a plus on the spine."""
        part, (x, left) = self.parts[i], (self.spine, self.left)
        middle, bottom = top + _high(part) // 2, top + _high(part)
        if is_before(self.config, part):
            return [f'<path class="way" d="M{x} {middle}H{left}M{left + 24} {top}v{-GAP}"/>']
        if part.kind == "positions" and self.config.positions == "t5":
            return []  # added to the scores, not to the stream
        if part.kind == "head":
            return [f'<path class="way" d="M{x} {middle}H{left}"/>']
        into = (
            ""
            if part.kind == "positions" or is_before(self.config, self.parts[i - 1])
            else f"M{x} {bottom + 7}H{left + 24}V{bottom}"
        )
        plus = f'<circle class="plus" cx="{x}" cy="{middle}" r="9"/>'
        return [
            f'<path class="way" d="{into}M{left} {middle}H{x}"/>',
            plus,
            f'<path class="way" d="M{x - 5} {middle}h10M{x} {middle - 5}v10"/>',
        ]

    def _box(self, part: Part, top: int) -> list[str]:
        pair = self.config.shape == "encoder-decoder"
        group = "cross" if part.kind == "cross" else part.stack if pair else "attention"
        opens = f'data-panel="{part.panel}" data-attention="{group}"'
        kind = "norm" if part.kind == "norm" else "part"
        line = top + (17 if kind == "norm" else 20)
        lines = [_text(self.left + 12, line, part.name, "small" if kind == "norm" else "")]
        if kind == "part":
            words = wrap(part.words, FITS)
            lines += [_text(self.left + 12, top + 38 + LINE * at, line, "small") for at, line in enumerate(words)]
        if numbers := figures(part):
            lines.append(_text(self.left + WIDE - 12, line, numbers, "small end"))
        if part.is_sparse:
            lines += self._pattern(part, self.left + 12, top + _high(part) - SIDE - 10)
        rect = f'<rect x="{self.left}" y="{top}" width="{WIDE}" height="{_high(part)}" rx="8"/>'
        return [f'<g class="{kind}" role="link" tabindex="0" {opens}>', rect, *lines, "</g>"]

    def _pattern(self, part: Part, x: int, y: int) -> list[str]:
        """The sparse pattern, and beside it its fields, two on a line."""
        (pattern,), is_causal = self.config.patterns, part.stack == "decoder"
        pair = self.config.shape == "encoder-decoder"
        length = self.config.max_source_len if pair and not is_causal else self.config.max_len or self.config.n_patches
        drawn, share = draw_pattern(pattern, x, y, length, causal=is_causal)
        fields = str(pattern).split(", ")
        words = [", ".join(fields[at : at + 2]) for at in range(0, len(fields), 2)]
        return drawn + [
            _text(x + SIDE + 10, y + 11 + 15 * at, line, "small") for at, line in enumerate([*words, share])
        ]

    def _depth(self) -> int:
        return max(part.n for part in self.parts)


def _high(part: Part) -> int:
    """Of its box."""
    if part.kind == "norm":
        return SLIM
    return HIGH + LINE * (len(wrap(part.words, FITS)) - 1) + (SIDE + 10 if part.is_sparse else 0)


def _room(part: Part) -> int:
    return _high(part) + GAP


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind or "name"}">{escape(words)}</text>'
