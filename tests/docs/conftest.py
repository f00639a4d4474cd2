"""The built site."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.building import ROOT, build_site

sys.path.insert(0, str(ROOT / "book"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return build_site(tmp_path_factory)
