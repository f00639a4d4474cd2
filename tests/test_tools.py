"""Tests that need a tool are skipped without it, counted at the end, and a failure where every tool must be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import chromium

ROOT = Path(__file__).resolve().parents[1]


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_chromium_of_the_system_of_playwright_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHROMIUM", "PLAYWRIGHT_BROWSERS_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(chromium, "NAMES", ("chromium",))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert chromium.find_chromium() is None
    assert "looked for chromium" in chromium.why_not()
    downloaded = program(tmp_path / ".cache" / "ms-playwright" / "chromium-1200" / "chrome-linux64" / "chrome")
    assert chromium.find_chromium() == str(downloaded)
    system = program(tmp_path / "bin" / "chromium")
    assert chromium.find_chromium() == str(system)
    named = program(tmp_path / "mine" / "browser")
    monkeypatch.setenv("CHROMIUM", str(named))
    assert chromium.find_chromium() == str(named)
    monkeypatch.setenv("CHROMIUM", "/nowhere")
    assert chromium.find_chromium() is None, "another one instead of the named one would be a surprise"
    assert chromium.why_not() == "no Chromium found: CHROMIUM=/nowhere is no program"


@pytest.mark.slow
@pytest.mark.parametrize("needed", [False, True])
def test_a_bare_machine(needed: bool, tmp_path: Path) -> None:
    """No g++, no node, no Chromium: the tests that need one are skipped and counted, and fail a run that needs them all."""
    env = {**os.environ, "PATH": str(tmp_path), "HOME": str(tmp_path), "CLEARHEAD_CACHE": str(tmp_path / "cache")}
    for name in ("CXX", "CHROMIUM", "PLAYWRIGHT_BROWSERS_PATH", "CI", "CLEARHEAD_ALL_TOOLS"):
        env.pop(name, None)
    if needed:
        env["CLEARHEAD_ALL_TOOLS"] = "1"
    asked = ["tests/browser/test_pixels.py", "tests/compiled", "tests/kernels/test_native.py", "tests/test_arrows.py"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *asked]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    last = next(line for line in done.stdout.splitlines() if "SKIPPED FOR WANT OF A TOOL" in line)
    assert "without Chromium" in last
    assert "without a C++ compiler" in last
    assert last.rstrip("! ").endswith("make tools")
    assert ("here that is a failure" in last) == needed
    assert done.returncode == (1 if needed else 0), done.stdout[-2000:]
