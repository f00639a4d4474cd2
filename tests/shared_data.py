"""The folder of real data and real weights that lies beside the repository, for tests that can use it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def shared_data(name: str) -> Path:
    """A file or folder of the shared data; where it is missing the test is skipped, and the reason says what."""
    root = os.environ.get("CLEARHEAD_SHARED")
    shared = Path(root) if root else Path(__file__).resolve().parents[2] / "shared"
    path = shared / "data" / name
    if not path.exists():
        pytest.skip(f"{path} is missing; set CLEARHEAD_SHARED to the folder that holds data/{name}")
    return path
