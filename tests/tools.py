"""Programs that some tests need beside Python: Chromium, node and its packages, a C++ compiler.

Without one of them these tests are skipped, and the last line of the run counts them and names the command that brings it.
Where all tools must be there (CLEARHEAD_ALL_TOOLS=1), such a run fails.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from tests import chromium

ROOT = Path(__file__).resolve().parents[1]
# Each reason for such a skip has one of these in it; tests of the compiled kernels take theirs from `native.why_not`.
MISSING = {"Chromium": "no Chromium", "node": "no node", "a C++ compiler": "no C++ compiler"}
NO_COMPILER = "no C++ compiler or no Python headers found"


def what_is_missing(item: pytest.Item) -> str | None:
    """Why this test can not run here, by its folder; None: it can."""
    room = item.path.relative_to(ROOT / "tests").parts[0] if item.path.is_relative_to(ROOT / "tests") else ""
    if room == "browser" and chromium.find_chromium() is None:
        return chromium.why_not()
    if room == "compiled" and not can_compile():
        return NO_COMPILER
    return None


def can_compile() -> bool:
    """What torch.compile looks for: $CXX or g++, and the headers that it includes."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return shutil.which(os.environ.get("CXX") or "g++") is not None and headers.is_file()


def count_skips(reports: list[pytest.TestReport]) -> Counter[str]:
    """How many tests were skipped for want of each tool."""
    reasons = [report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple)]
    return Counter(tool for reason in reasons for tool, words in MISSING.items() if words in reason)


def all_tools_needed() -> bool:
    return os.environ.get("CLEARHEAD_ALL_TOOLS") == "1"
