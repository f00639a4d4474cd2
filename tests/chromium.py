"""Which Chromium the browser tests drive: $CHROMIUM if it is set; else the system's; else one that playwright downloaded.

python tests/chromium.py    # prints its path; exits with 1 if there is none
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
CACHES = ("~/.cache/ms-playwright", "~/Library/Caches/ms-playwright", "~/AppData/Local/ms-playwright")
INSIDE = ("chromium-*/chrome-*/chrome", "chromium-*/chrome-*/*.app/Contents/MacOS/*", "chromium-*/chrome-*/chrome.exe")


def find_chromium() -> str | None:
    if named := os.environ.get("CHROMIUM"):
        return shutil.which(named)
    return next(filter(None, map(shutil.which, NAMES)), None) or find_downloaded()


def find_downloaded() -> str | None:
    """The newest Chromium in playwright's cache."""
    folders = [os.environ.get("PLAYWRIGHT_BROWSERS_PATH"), *CACHES]
    found = [
        path for folder in folders if folder for inside in INSIDE for path in Path(folder).expanduser().glob(inside)
    ]
    return str(max(found, key=lambda path: path.stat().st_mtime)) if found else None


def why_not() -> str:
    """Why there is none, for a message."""
    if named := os.environ.get("CHROMIUM"):
        return f"no Chromium found: CHROMIUM={named} is no program"
    return f"no Chromium found: looked for {', '.join(NAMES[:3])}, in playwright's cache, and CHROMIUM is not set"


if __name__ == "__main__":
    found = find_chromium()
    print(found or why_not())
    sys.exit(found is None)
