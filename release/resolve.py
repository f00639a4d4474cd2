"""Check constraints.txt for every Python and system that is supported: all of it can be installed without a compiler.

    python release/resolve.py

Nothing is installed. uv chooses the packages as if it were on the other system; this needs the package index. A package that
is chosen and has no line in constraints.txt is an error: two computers would get different versions of it.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
SYSTEMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31", "aarch64-apple-darwin", "x86_64-pc-windows-msvc")
EXTRAS = ("dev", "release", "bench")  # with these, all the others
# What torch pins on its own.
OF_TORCH = ("nvidia-", "cuda-", "triton")


def main() -> int:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {plain(line.partition("==")[0]) for line in lines if line and not line.startswith("#")}
    wrong = 0
    for python, system in itertools.product(PYTHONS, SYSTEMS):
        found = resolve(python, system)
        problem = found.stderr.strip()
        if not found.returncode:
            chosen = {plain(line.partition("==")[0]) for line in found.stdout.splitlines()}
            loose = sorted(name for name in chosen - pinned if not name.startswith(OF_TORCH))
            problem = f"constraints.txt has no line for {', '.join(loose)}; add one" if loose else ""
            print(f"Python {python} on {system}: {len(chosen)} packages")
        if problem:
            wrong += 1
            print(f"error: Python {python} on {system}: {problem}", file=sys.stderr)
    return 1 if wrong else 0


def resolve(python: str, system: str) -> subprocess.CompletedProcess[str]:
    # No macOS before 14 has a build of torch 2.13.
    env = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    extras = [f"--extra={name}" for name in EXTRAS]
    form = ["--quiet", "--no-header", "--no-annotate", "--only-binary=:all:", "--constraint=constraints.txt"]
    target = [f"--python-version={python}", f"--python-platform={system}"]
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", *extras, *form, *target]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    raise SystemExit(main())
