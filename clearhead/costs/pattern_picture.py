"""A small picture of a sparse attention pattern, for the drawing of a model: which keys a query may look at."""

from __future__ import annotations

from clearhead.sparsity import Pattern

SIDE = 60  # of the picture, in SVG's units, and its cells each way at most
SHOWN = 20  # blocks each way, if the text has as many
FINEST = 16  # places of a cell that are looked at, each way


def draw_pattern(pattern: Pattern, x: int, y: int, length: int, *, causal: bool) -> tuple[list[str], str]:
    """SVG of the pattern's first blocks, queries from top to bottom, and a line that says how many pairs it keeps."""
    import numpy as np  # here, so that commands which only count start without it

    # Enough to see past the window, and a second stride.
    blocks = max(SHOWN, 3 * pattern.reach, 2 * pattern.stride, 2 * pattern.n_global)
    blocks = min(blocks, -(-length // pattern.block))
    group = -(-blocks // SIDE)  # blocks in a cell; it is dark if a pair in it is kept
    n = -(-blocks // group)
    inside = np.unique(np.linspace(0, group - 1, min(group, FINEST)).astype(np.int64))
    places = (np.arange(n)[:, None] * group + inside).ravel() * pattern.block
    pairs = pattern.keeps(places[:, None], places[None])
    if causal:
        pairs &= places[:, None] >= places[None]
    kept = pairs.reshape(n, len(inside), n, len(inside)).any((1, 3))
    path, cell = "", SIDE / n
    for row, flags in enumerate(kept):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], flags, [0]]).astype(np.int8)))
        for start, end in edges.reshape(-1, 2):
            wide = cell * (end - start)
            path += f"M{x + cell * start:.2f} {y + cell * row:.2f}h{wide:.2f}v{cell:.2f}h{-wide:.2f}z"
    share = pattern.count_pairs(length, length, causal=causal) / (length * (length + 1) / 2 if causal else length**2)
    side = min(length, n * group * pattern.block)
    label = f"The pattern {pattern} for the first {side:,} tokens: queries downwards, keys to the right"
    drawn = [
        f'<g class="pattern" role="img" aria-label="{label}">',
        f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}"/>',
        f'<path d="{path}"/></g>',
    ]
    return drawn, f"keeps {100 * share:.2g}% of the pairs"
