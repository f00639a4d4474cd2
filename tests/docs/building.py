"""The site, built once for all test processes: strictly, without the experiments, which take minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "node_modules" / "katex"


def build_site(factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder, and what the build printed."""
    if not PACKAGES.is_dir():
        pytest.skip(f"no node packages at {PACKAGES.parent}; make tools, then make check installs them")
    together = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    folder, log = together / "site", together / "site.log"
    with FileLock(together / "site.lock"):
        if not log.exists():
            ran = subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
                cwd=ROOT,
                env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "CLEARHEAD_DOCS_DRAFT": "1", "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=False,
            )
            log.write_text(ran.stdout + ran.stderr + (f"exit code {ran.returncode}" if ran.returncode else ""))
    return folder, log.read_text()
