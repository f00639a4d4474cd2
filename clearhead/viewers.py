"""Viewers: functions that display a result of one room and live in a room to its right, which it may not import.

`Seen.show` (inside/) displays the explorer's page; a model (models/) counts its weights, also packed ones (quantization/).
The front door, `clearhead/__init__.py`, knows every room and sets them.
"""

from __future__ import annotations

import html
from typing import Any


def show_seen(*given: Any, **options: Any) -> Any:
    """Set by the front door to `clearhead.explorer.show_seen`."""
    raise NotImplementedError


def describe_model(model: Any) -> str:
    """Set by the front door to `clearhead.quantization.model_weights.describe_model`."""
    raise NotImplementedError


class Described:
    """A model as one line at the Python prompt; in a notebook, with its modules to unfold."""

    def __repr__(self) -> str:
        return describe_model(self)

    def tree(self) -> str:
        """All modules, indented, as torch prints them."""
        return super().__repr__()

    def _repr_html_(self) -> str:
        return f"<details><summary>{html.escape(repr(self))}</summary><pre>{html.escape(self.tree())}</pre></details>"
