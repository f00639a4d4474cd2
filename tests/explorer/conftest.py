"""One explorer for each kind of model."""

from __future__ import annotations

import pytest

from clearhead.explorer import Explorer
from tests.explorer.models import KINDS, make_explorer


@pytest.fixture(scope="module")
def explorers() -> dict[str, Explorer]:
    return {kind: make_explorer(kind) for kind in KINDS}
