"""Mutation score: small changes to the code, one at a time, and whether the tests notice each.

    pip install -c constraints.txt -e ".[mutation]"
    python benchmarks/correctness/mutation.py --sample 500                      layers, sampling, engine, checkpoint
    python benchmarks/correctness/mutation.py --sample 40 --rooms sampling      one room
    python benchmarks/correctness/mutation.py --sample 500 --show               only what is known so far, and the survivors

The mutants are those of mutmut: a number plus one, < for <=, `and` for `or`, an argument left out, None for a value, a string
changed. A sample is drawn from the seed. Each mutant is written into a copy of the project, where the tests of its room and of
those that use it run (without those marked slow, unless --slow), until one fails or the time is up. Only a test that fails counts
as noticing; a mutant whose time is up is counted apart, as it may be an endless loop or a slow machine. Results are appended to a
file: a run that is stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The rooms, and the folders of tests that call what is in them.
ROOMS = {
    "layers": ["layers", "models"],
    "sampling": ["sampling", "generation", "engine"],
    "engine": ["engine", "generation", "faults"],
    "checkpoint": ["checkpoint", "families", "training"],
}
# Only a GPU runs these; their tests need one.
LEFT_OUT = ("engine/gpu_step.py", "engine/cuda_graphs.py")


@functools.cache
def mutations_of(file: Path) -> tuple[Any, list[Any]]:
    """The parsed file, and mutmut's mutations of its functions."""
    from mutmut.mutation.file_mutation import create_mutations

    module, mutations, *_ = create_mutations(str(file), file.read_text(encoding="utf-8"))
    return module, [mutation for mutation in mutations if mutation.contained_by_top_level_function is not None]


def mutant(file: Path, at: int) -> str:
    """The file's text with one change."""
    module, mutations = mutations_of(file)
    return module.deep_replace(mutations[at].original_node, mutations[at].mutated_node).code


def tests_of(file: Path, room: str) -> list[list[str]]:
    """Test files in two groups: those that name the module, the likeliest to fail; the others of the room and its users."""
    word = re.compile(rf"\b{file.stem}\b")
    found = [test for folder in ROOMS[room] for test in sorted((ROOT / "tests" / folder).glob("test_*.py"))]
    near = [test for test in found if word.search(test.read_text("utf-8"))]
    groups = near, [test for test in found if test not in near]
    return [[str(test.relative_to(ROOT)) for test in group] for group in groups if group]


def run_tests(copy: Path, tests: list[str], seconds: float, slow: bool) -> str:
    """killed, survived or timeout. In a forked process: torch is imported once."""
    if (child := os.fork()) == 0:
        os.setsid()
        log = os.open(copy / "tests.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        import pytest

        marks = [] if slow else ["-m", "not slow"]
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *marks, *tests])))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return "survived" if code == 0 else "no tests" if code == 5 else "killed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def all_mutants(rooms: list[str]) -> list[tuple[str, int]]:
    """Each mutant by its file and its number there."""
    found: list[tuple[str, int]] = []
    for room in rooms:
        for file in sorted((ROOT / "clearhead" / room).glob("*.py")):
            name = f"{room}/{file.name}"
            if name not in LEFT_OUT and file.name != "__init__.py":
                found += [(name, at) for at in range(len(mutations_of(file)[1]))]
    return found


def difference(name: str, at: int) -> str:
    file = ROOT / "clearhead" / name
    before, after = file.read_text(encoding="utf-8"), mutant(file, at)
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, lineterm="", n=0))[2:]
    return "\n".join(lines)


def show(results: dict[str, str], chosen: list[tuple[str, int]]) -> None:
    ends: Counter[str] = Counter()
    by_room: dict[str, Counter[str]] = {}
    for name, at in chosen:
        if (end := results.get(f"{name} {at}")) is not None:
            ends[end] += 1
            by_room.setdefault(name.split("/")[0], Counter())[end] += 1
            if end in ("survived", "no tests"):
                print(f"{end}: {name} {at}\n{difference(name, at)}\n")
    for room, counts in [*by_room.items(), ("all", ends)]:
        caught = counts["killed"]
        print(
            f"{room}: {caught} of {counts.total()} mutants noticed ({caught / max(counts.total(), 1):.0%}): {dict(counts)}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--seconds", type=float, default=300, help="for the tests of one mutant")
    parser.add_argument("--slow", action="store_true", help="also run the tests marked slow")
    parser.add_argument("--results", type=Path, default=Path("mutation.jsonl"))
    parser.add_argument("--show", action="store_true", help="run nothing")
    args = parser.parse_args()
    args.results = args.results.absolute()
    os.chdir(ROOT)  # mutmut reads pyproject.toml there
    every = all_mutants(args.rooms)
    chosen = random.Random(args.seed).sample(every, min(args.sample, len(every)))
    lines = args.results.read_text(encoding="utf-8").splitlines() if args.results.is_file() else []
    results: dict[str, str] = {key: end for line in lines for key, end in json.loads(line).items()}
    print(f"{len(every):,} mutants in {', '.join(args.rooms)}; {len(chosen)} drawn with seed {args.seed}", flush=True)
    if not args.show:
        run(args, [one for one in chosen if f"{one[0]} {one[1]}" not in results], results)
    show(results, chosen)
    return 0


GREEN: dict[tuple[str, ...], bool] = {}


def is_green(copy: Path, tests: list[str], args: argparse.Namespace, target: Path, file: Path) -> bool:
    """Whether these tests pass without a mutant; asked once. Those that do not can not notice one, and are left out aloud."""
    if (key := tuple(tests)) not in GREEN:
        mutated = target.read_text(encoding="utf-8")
        shutil.copyfile(file, target)
        GREEN[key] = run_tests(copy, tests, 10 * args.seconds, args.slow) in ("survived", "no tests")
        target.write_text(mutated, encoding="utf-8")
        if not GREEN[key]:
            print(f"left out, as they fail without a mutant: {' '.join(tests)}: {copy / 'tests.log'}", flush=True)
            print((copy / "tests.log").read_text(encoding="utf-8", errors="replace")[-800:], flush=True)
    return GREEN[key]


def run(args: argparse.Namespace, chosen: list[tuple[str, int]], results: dict[str, str]) -> None:
    import torch  # once, for all tests

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as made:
        copy = Path(made) / "project"
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in names.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, copy / name)
        for number, (name, at) in enumerate(chosen, 1):
            file = ROOT / "clearhead" / name
            target = copy / "clearhead" / name
            target.write_text(mutant(file, at), encoding="utf-8")
            began = time.monotonic()
            end = "no tests"
            for tests in tests_of(file, name.split("/")[0]):
                if end in ("survived", "no tests") and is_green(copy, tests, args, target, file):
                    last, end = end, run_tests(copy, tests, args.seconds, args.slow)
                    end = last if end == "no tests" else end
            shutil.copyfile(file, target)
            results[f"{name} {at}"] = end
            with args.results.open("a", encoding="utf-8") as log:
                log.write(json.dumps({f"{name} {at}": end}) + "\n")
            print(f"{number} of {len(chosen)}: {end} in {time.monotonic() - began:.0f} s: {name} {at}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
