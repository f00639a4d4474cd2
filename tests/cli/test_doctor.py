"""`clearhead doctor`: true on this machine, and honest about what is missing."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from clearhead.cli import app, doctor
from clearhead.kernels import native, native_library

try:
    import tomllib
except ImportError:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def findings() -> dict[str, dict[str, dict[str, Any]]]:
    result = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    return {title: {each["name"]: each for each in part} for title, part in json.loads(result.stdout).items()}


def test_it_says_what_is_here(findings: dict[str, dict[str, dict[str, Any]]]) -> None:
    here = findings["machine"]
    assert here["python"]["found"].startswith(platform.python_version())
    assert here["torch"]["found"].startswith(f"{torch.__version__}, {torch.get_num_threads()} threads")
    assert all(each["remedy"] is None for each in here.values())
    assert float(findings["speed"]["memory"]["found"].split()[0]) > 0
    assert ("decoding" in findings["speed"]) == native.is_there()
    if native.is_there():
        assert findings["kernels"]["cpu"]["found"].startswith(native_library.choose_level())
    extras = {name: each["found"].startswith("here: ") for name, each in findings["extras"].items()}
    extras.pop("llamacpp")  # half an hour of compiling, which the tests do without
    extras.pop("executorch")  # brings pandas and coremltools; its tests run where it is installed
    assert all(extras.values()), f"tests have every other extra; got {extras}"


def test_every_extra_is_named() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared = set(tomllib.load(file)["project"]["optional-dependencies"])
    assert set(doctor.EXTRAS) == declared - {"all", "bench", "dev", "docs", "fuzz", "lens", "mutation", "release"}


def test_what_is_missing_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_installed", lambda package: package not in ("fastapi", "uvicorn", "pyarrow"))
    found = {each.name: each for each in doctor.extras()}
    assert found["serve"].found.startswith("missing (fastapi, uvicorn): clearhead serve")
    assert found["serve"].remedy == "pip install 'clearhead[serve]'"
    assert found["parquet"].remedy == "pip install 'clearhead[parquet]'"
    assert found["plot"].remedy is None


def test_a_busy_machine_is_said_to_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (1.9, 0.0, 0.0), raising=False)
    assert doctor.busy() == []
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (9.5, 0.0, 0.0), raising=False)
    (found,) = doctor.busy()
    assert found.found == "9.5 on 4 cores: other programs are running"
    assert "run clearhead doctor again when it is idle" in (found.remedy or "")
    monkeypatch.delattr(doctor.os, "getloadavg")  # Windows
    assert doctor.busy() == []


def test_decoding_is_compared_with_the_memory(findings: dict[str, dict[str, dict[str, Any]]]) -> None:
    if native.is_there():
        assert re.search(r"one row, \d+% of the memory's speed$", findings["speed"]["decoding"]["found"])


@pytest.mark.parametrize(
    ("system", "hint"), [("win32", "Visual Studio"), ("darwin", "xcode-select"), ("linux", "apt ")]
)
def test_the_hint_is_of_this_system(system: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "platform", system)
    assert hint in doctor.install_hint("g++")


@pytest.mark.slow
def test_a_machine_without_compiler(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": "", "CXX": "", "CLEARHEAD_CACHE": str(tmp_path), "NO_COLOR": "1", "FORCE_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "clearhead", "doctor"], capture_output=True, text=True, env=env, check=True, cwd=ROOT
    )
    assert "torch's operators: no C++ compiler was found" in done.stdout
    hint = doctor.install_hint("g++ python3-dev")
    assert f"not on the CPU: no g++\n{'':17}-> {hint}" in done.stdout
    assert "\x1b[3" not in done.stdout, "NO_COLOR"
