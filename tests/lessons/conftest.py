"""Students' files in a test of their own."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A student's folder is searched for modules; in a test, only until it ends."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "attention", raising=False)
