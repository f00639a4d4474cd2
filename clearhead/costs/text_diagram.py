"""A model drawn in letters, for a terminal 80 columns wide: the residual stream is the line on the left of each stack."""

from __future__ import annotations

import textwrap
from itertools import zip_longest

from clearhead.config import Config
from clearhead.costs.flops import Lengths
from clearhead.costs.model_parts import Part, figures, input_of, is_before, is_passed, measure, output_of

WIDTH, MARGIN = 39, 6  # of one stack, and what stands before its names; two stand side by side
THROUGH, ADDED, READ, STREAM = "█", "⊕", "├", "│"


def write_model(config: Config, stacks: dict[str, list[Part]], at: Lengths) -> str:
    """The same as the SVG, to be read from the bottom up."""
    width = WIDTH if len(stacks) == 2 else WIDTH + 12
    columns = [_column(config, stack, parts, width) for stack, parts in stacks.items()]
    tall = max(map(len, columns))
    columns = [[""] * (tall - len(column)) + column for column in columns]  # both stand on the ground
    lines = ["  ".join(f"{line:{width}}" for line in row).rstrip() for row in zip_longest(*columns, fillvalue="")]
    return "\n".join([*lines, "", measure(at)])


def _column(config: Config, stack: str, parts: list[Part], width: int) -> list[str]:
    """The lines of one stack, its output first."""
    lines = [f"    ↑ {output_of(config, stack)}"]
    depth = f"×{max(part.n for part in parts)}"
    block = [part for part in parts if part.in_block]
    for i in reversed(range(len(parts))):
        part = parts[i]
        added = part.kind in ("attention", "cross", "feedforward", "positions") and part.name != "t5 positions"
        mark = THROUGH if is_passed(config, parts, i) else ADDED if added else READ
        # The blocks are framed on the left; how many they are stands at the top.
        frame = "┊" if part.in_block else " "
        margin = f"{depth:>3}" if block and part is block[-1] else f"{frame:>3}"
        if part.kind == "norm":
            mark = READ if is_before(config, part) else THROUGH
        names = textwrap.wrap(part.words, width - MARGIN) if part.kind != "norm" else []
        lines.append(f"{margin} {mark} {part.name:{width - MARGIN - 1 - len(figures(part))}} {figures(part)}")
        lines += [f"{frame:>3} {STREAM} {words}" for words in names]
    lines.append(f"    ↑ {input_of(config, stack)}")
    return lines
