"""A server in a process of its own, as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(models: Mapping[str, Path], *options: str) -> Generator[tuple[str, int]]:
    """Its address and process, with these models under these names."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "clearhead", "serve", "--port", "0", "--device", "cpu"]
        command += [*(f"{name}={place}" for name, place in models.items()), *options]
        with log.open("w") as out, subprocess.Popen(command, stderr=out, stdout=out) as process:
            try:
                while not (found := re.search(r"running on (http://\S+)", log.read_text())):
                    if process.poll() is not None:
                        raise SystemExit(log.read_text())
                    time.sleep(0.1)
                yield found[1], process.pid
            finally:
                process.terminate()
