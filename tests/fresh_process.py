"""A file of tests in a process of its own, without the shape checks: torch.compile can't trace through them (conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_in_fresh_process(path: Path) -> None:
    ran = subprocess.run(
        # no:logging leaves out the thousands of lines torch.compile logs about itself when a test fails
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:logging", str(path)],
        cwd=path.parents[2],
        env=os.environ | {"CLEARHEAD_SHAPES": "unchecked", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # pytest answers 0 only where it found tests and all passed; a skipped one would hide behind it.
    assert ran.returncode == 0, ran.stdout
    assert "skipped" not in ran.stdout, ran.stdout
