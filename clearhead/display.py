"""Short texts and HTML tables of results, for the Python prompt and for notebooks. Strings only: no torch, no other room."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_ITEMS = 4  # of a tuple
STYLE = "text-align:right;font-variant-numeric:tabular-nums;padding:0 .6em"


def short_repr(name: str, fields: Mapping[str, Any]) -> str:
    """`Name(field=value, ...)`; long tuples are cut."""
    return f"{name}({', '.join(f'{field}={short_value(value)}' for field, value in fields.items())})"


def short_value(value: Any) -> str:
    if not isinstance(value, tuple) or len(value) <= MOST_ITEMS:
        return repr(value)
    return f"({', '.join(map(repr, value[:MOST_ITEMS]))}, ... {len(value)} in all)"


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """A table for a notebook: the first column to the left, the others to the right."""

    def line(cells: Sequence[object], kind: str) -> str:
        first, *others = (html.escape(str(cell)) for cell in cells)
        return f'<tr><{kind} style="text-align:left">{first}</{kind}>' + "".join(
            f'<{kind} style="{STYLE}">{cell}</{kind}>' for cell in others
        )

    body = "".join(line(row, "td") for row in rows)
    below = f"<small>{html.escape(note)}</small>" if note else ""
    return f"<div><b>{html.escape(title)}</b><table>{line(columns, 'th')}{body}</table>{below}</div>"


def html_shaded(parts: Iterable[tuple[str, float | None, str]]) -> str:
    """A text for a notebook, of parts with a share each: the larger, the darker its ground. None: no ground. The last is shown
    under the pointer."""

    def part(text: str, share: float | None, title: str) -> str:
        ground = "" if share is None else f' style="background:rgba(0,150,136,{0.5 * share:.2f})"'
        return f'<span{ground} title="{html.escape(title)}">{html.escape(text)}</span>'

    return f'<div style="white-space:pre-wrap;font-family:monospace">{"".join(part(*each) for each in parts)}</div>'
