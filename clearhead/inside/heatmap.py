"""Attention as a coloured heat map in a terminal, and the labels and pooling that plots.py shares with it."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

import torch.nn.functional as F
from jaxtyping import Float
from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text
from torch import Tensor

# From dark blue over grey to yellow: lightness rises steadily, so the order is the same with any colour vision, and in grey.
SCALE = ((0, 32, 76), (66, 78, 108), (124, 123, 120), (188, 175, 111), (255, 234, 70))

SHADES = " ░▒▓█"

LONGEST = 16  # characters of a token's label


def colour(value: float) -> tuple[int, int, int]:
    """The scale's colour for a value from 0 to 1."""
    at = min(max(value, 0.0), 1.0) * (len(SCALE) - 1)
    low = min(int(at), len(SCALE) - 2)
    near, far, part = SCALE[low], SCALE[low + 1], at - low
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(near, far, strict=True))
    return red, green, blue


def heat_map(
    weights: Float[Tensor, "T S"],
    tokens: Sequence[str],
    columns: Sequence[str] = (),
    *,
    title: str = "",
    width: int = 160,
    height: int = 60,
) -> Text:
    """Attention of one head: one line per query, one coloured cell per key, as bright as its share of the line's maximum.

    `columns` names the keys if they are not the queries; each name is written from top to bottom above its cell. A map larger
    than `width` characters by `height` lines is max-pooled, and a line below says so.
    """
    T, S = weights.shape
    rows = [label(token) for token in tokens]
    tall = math.ceil(T / height)
    if tall > 1:
        rows = [elide(f"{at} {rows[at]}") for at in range(0, T, tall)]
    margin = max((cell_len(row) for row in rows), default=0)
    wide = math.ceil(S / max((width - margin - 1) // 2, 1))
    # A column that stands for several keys gets the number of its first one: a name would be that of one key only.
    names = [label(name) for name in columns] if wide == 1 else [str(at) for at in range(0, S, wide)]
    pooled = max_pool(weights, tall, wide)
    shares = pooled / pooled.amax(-1, keepdim=True).clamp(min=1e-12)
    drawing = Text(no_wrap=True)
    if title:
        drawing.append(" " * (margin + 1) + title + "\n", style="bold")
    above = max((len(name) for name in names), default=0)
    for line in range(above):
        letters = (name.rjust(above)[line] for name in names)
        drawing.append(" " * (margin + 1) + "".join(set_cell_size(letter, 2) for letter in letters) + "\n")
    for row, values in zip(rows, shares.tolist(), strict=True):
        drawing.append(" " * (margin - cell_len(row)) + row + " ")
        for value in values:
            paint = "rgb({},{},{})".format(*colour(value))
            # With colours the shade is invisible; without them (a pipe, a log) it is all that is left.
            drawing.append(2 * SHADES[round(value * (len(SHADES) - 1))], style=Style(color=paint, bgcolor=paint))
        drawing.append("\n")
    if tall > 1 or wide > 1:
        drawing.append(" " * (margin + 1) + pooling_note(T, S, tall, wide) + "\n", style="dim")
    return drawing


def max_pool(values: Float[Tensor, "T S"], tall: int, wide: int) -> Float[Tensor, "t s"]:
    """The maximum of each block of `tall` x `wide` values. Attention is sparse: a mean would hide its peaks."""
    return F.max_pool2d(values[None, None], (tall, wide), ceil_mode=True)[0, 0]


def pooling_note(T: int, S: int, tall: int, wide: int) -> str:
    """The sentence below a map with fewer cells than weights."""
    return f"{T:,} x {S:,} weights: each cell is the largest of {tall} x {wide}"


def label(token: str) -> str:
    """A token as a label on one line: with signs for invisible characters, at most LONGEST characters."""
    token = token.replace("\n", "⏎").replace("\t", "⇥")
    token = "".join(c if unicodedata.category(c)[0] != "C" else f"\\x{ord(c):02x}" for c in token)
    return elide(token if token.strip() else "␣" * max(len(token), 1))


def elide(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
