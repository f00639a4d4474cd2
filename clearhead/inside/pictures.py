"""Pictures for the terminal, and what they share with those on paper (figures.py)."""

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

# From dark blue over grey to yellow: rises steadily in lightness, so it reads the same with any colour vision, and in grey.
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
    """Attention of one head: a line a query, a coloured cell a key, as bright as its share of the line's largest.

    `columns` names the keys, where they are not the queries: from top to bottom above their cells. What is larger than
    `width` characters by `height` lines is drawn in fewer cells, each the largest of those it stands for; the picture says so.
    """
    T, S = weights.shape
    rows = [label(token) for token in tokens]
    tall = math.ceil(T / height)
    if tall > 1:
        rows = [elide(f"{at} {rows[at]}") for at in range(0, T, tall)]
    margin = max((cell_len(row) for row in rows), default=0)
    wide = math.ceil(S / max((width - margin - 1) // 2, 1))
    # Places alone where a column stands for several: stacked names would say nothing of the others.
    names = [label(name) for name in columns] if wide == 1 else [str(at) for at in range(0, S, wide)]
    drawn = pool(weights, tall, wide)
    shares = drawn / drawn.amax(-1, keepdim=True).clamp(min=1e-12)
    picture = Text(no_wrap=True)
    if title:
        picture.append(" " * (margin + 1) + title + "\n", style="bold")
    above = max((len(name) for name in names), default=0)
    for line in range(above):
        letters = (name.rjust(above)[line] for name in names)
        picture.append(" " * (margin + 1) + "".join(set_cell_size(letter, 2) for letter in letters) + "\n")
    for row, values in zip(rows, shares.tolist(), strict=True):
        picture.append(" " * (margin - cell_len(row)) + row + " ")
        for value in values:
            paint = "rgb({},{},{})".format(*colour(value))
            # The shade is hidden by its own colour, and is what remains where there are no colours: a pipe, a log.
            picture.append(2 * SHADES[round(value * (len(SHADES) - 1))], style=Style(color=paint, bgcolor=paint))
        picture.append("\n")
    if tall > 1 or wide > 1:
        picture.append(" " * (margin + 1) + told(T, S, tall, wide) + "\n", style="dim")
    return picture


def pool(values: Float[Tensor, "T S"], tall: int, wide: int) -> Float[Tensor, "t s"]:
    """Each block of `tall` by `wide` as its largest: attention is sparse, and a mean would wash its peaks away."""
    return F.max_pool2d(values[None, None], (tall, wide), ceil_mode=True)[0, 0]


def told(T: int, S: int, tall: int, wide: int) -> str:
    """What a picture says that draws fewer cells than there are."""
    return f"{T:,} x {S:,} weights: each cell is the largest of {tall} x {wide}"


def label(token: str) -> str:
    """A token as it can be shown on one line: nothing invisible, nothing longer than LONGEST."""
    token = token.replace("\n", "⏎").replace("\t", "⇥")
    token = "".join(c if unicodedata.category(c)[0] != "C" else f"\\x{ord(c):02x}" for c in token)
    return elide(token if token.strip() else "␣" * max(len(token), 1))


def elide(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
