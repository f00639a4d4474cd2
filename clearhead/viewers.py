"""Viewers: functions that display a result of one room and live in a room to its right, which it may not import.

`Seen.show` (inside/) displays the explorer's page. The front door, `clearhead/__init__.py`, knows every room and sets them.
"""

from __future__ import annotations

from typing import Any


def show_seen(*given: Any, **options: Any) -> Any:
    """Set by the front door to `clearhead.explorer.show_seen`."""
    raise NotImplementedError
