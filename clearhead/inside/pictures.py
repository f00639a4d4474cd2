"""Pictures for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text
from torch import Tensor

# From dark blue over grey to yellow: rises steadily in lightness, so it reads the same with any colour vision, and in grey.
SCALE = ((0, 32, 76), (66, 78, 108), (124, 123, 120), (188, 175, 111), (255, 234, 70))

SHADES = " ░▒▓█"


def colour(value: float) -> tuple[int, int, int]:
    """The scale's colour for a value from 0 to 1."""
    at = min(max(value, 0.0), 1.0) * (len(SCALE) - 1)
    low = min(int(at), len(SCALE) - 2)
    near, far, part = SCALE[low], SCALE[low + 1], at - low
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(near, far, strict=True))
    return red, green, blue


def heat_map(
    weights: Float[Tensor, "T S"], tokens: Sequence[str], columns: Sequence[str] = (), *, title: str = ""
) -> Text:
    """Attention of one head: a line a query, a coloured cell a key, as bright as its share of the row's largest.

    `columns` names the keys, where they are not the queries: from top to bottom above their cells.
    """
    peak = weights.amax(-1, keepdim=True).clamp(min=1e-12)
    width = max((cell_len(token) for token in tokens), default=0)
    picture = Text(no_wrap=True)
    if title:
        picture.append(" " * (width + 1) + title + "\n", style="bold")
    height = max((len(name) for name in columns), default=0)
    for line in range(height):
        letters = (name.rjust(height)[line] for name in columns)
        picture.append(" " * (width + 1) + "".join(set_cell_size(letter, 2) for letter in letters) + "\n")
    for token, row in zip(tokens, (weights / peak).tolist(), strict=True):
        picture.append(" " * (width - cell_len(token)) + token + " ")
        for value in row:
            paint = "rgb({},{},{})".format(*colour(value))
            # The shade is hidden by its own colour, and is what remains where there are no colours: a pipe, a log.
            picture.append(2 * SHADES[round(value * (len(SHADES) - 1))], style=Style(color=paint, bgcolor=paint))
        picture.append("\n")
    return picture
