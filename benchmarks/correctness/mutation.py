"""Mutation score: small changes to the code, one at a time, and whether the tests notice each.

    pip install -c constraints.txt -e ".[mutation]"
    python benchmarks/correctness/mutation.py --sample 500                      layers, sampling, engine, checkpoint
    python benchmarks/correctness/mutation.py --sample 40 --rooms sampling      one room
    python benchmarks/correctness/mutation.py --only "sampling/strategy.py 17"  one mutant again
    python benchmarks/correctness/mutation.py --show                            only what is known so far, and the survivors

The mutants are those of mutmut: a number plus one, < for <=, `and` for `or`, an argument left out, None for a value, a string
changed. Those that change only words for people are left out before the sample is drawn from the seed (mutants.py has the rule).
Each mutant runs the tests that execute its lines, in a forked process, until one fails (mutation_server.py).

Noticed: a test failed, the process crashed, or a test took more than ten times its usual time and ten seconds: an endless loop.
Not noticed: all tests passed, those within --seconds passed, or none executes the line. Results are appended to a file: a run that
is stopped goes on where it was. Needs Python 3.11. `--draw FILE` writes the sample, and `--mutants FILE` takes it on a machine
that has no mutmut.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.correctness.mutants import ROOMS, ROOT, Mutant, draw
from benchmarks.correctness.mutation_server import Server

# Tests of a server are left out: they wait for clocks, and would seem to notice what another process did to them.
TESTS = (
    "layers",
    "models",
    "sampling",
    "engine",
    "generation",
    "checkpoint",
    "families",
    "quantization",
    "faults",
    "inside",
)
TESTS += ("kernels", "training", "laws", "costs")
NOTICED = ("killed", "time limit", "crashed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--tests", nargs="+", default=[f"tests/{room}" for room in TESTS])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=60, help="of the processor, for the tests of one mutant")
    parser.add_argument("--slow", action="store_true", help="also run the tests marked slow")
    parser.add_argument("--only", nargs="+", default=[], metavar="MUTANT", help="these again")
    parser.add_argument("--results", type=Path, default=Path("mutation"), help="a folder")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write the sample; run nothing")
    parser.add_argument("--mutants", type=Path, metavar="FILE", help="a sample that was drawn")
    parser.add_argument("--show", action="store_true", help="run nothing")
    args = parser.parse_args()
    for name in ("results", "draw", "mutants"):
        if (path := getattr(args, name)) is not None:
            setattr(args, name, path.absolute())
    os.chdir(ROOT)  # mutmut reads pyproject.toml there
    args.results.mkdir(parents=True, exist_ok=True)
    if args.mutants:
        stored = json.loads(args.mutants.read_text(encoding="utf-8"))
        chosen, n_all, n_words = [Mutant(**one) for one in stored["mutants"]], stored["all"], stored["words"]
    else:
        chosen, n_all, n_words = draw(args.rooms, args.sample, args.seed)
    print(
        f"{n_all:,} mutants in {', '.join(args.rooms)}, without {n_words:,} of words; {len(chosen)} drawn", flush=True
    )
    if args.draw:
        stored = {"all": n_all, "words": n_words, "mutants": [dataclasses.asdict(one) for one in chosen]}
        args.draw.write_text(json.dumps(stored), encoding="utf-8")
        return 0
    log = args.results / "ends.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    ends = {one["mutant"]: one for one in map(json.loads, lines)}
    if not args.show:
        again = [one for one in chosen if (one.name in args.only if args.only else one.name not in ends)]
        run(args, again, log, ends)
    show(chosen, ends)
    return 0


def run(args: argparse.Namespace, mutants: list[Mutant], log: Path, ends: dict[str, dict[str, str]]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    began = time.monotonic()

    def ended(mutant: Mutant, end: str, by: str) -> None:
        ends[mutant.name] = {"mutant": mutant.name, "end": end, "by": by}
        with log.open("a", encoding="utf-8") as file:
            print(json.dumps(ends[mutant.name]), file=file)
        print(f"{time.monotonic() - began:.0f} s: {end}: {mutant.name} {by}", flush=True)

    trace = args.results / "trace.json.gz"
    server = Server(mutants, jobs=args.jobs, seconds=args.seconds, trace=trace, ended=ended)
    marks = [] if args.slow else ["-m", "not slow"]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--continue-on-collection-errors", *marks]
    pytest.main([*options, *args.tests], plugins=[server])


def show(chosen: list[Mutant], ends: dict[str, dict[str, str]]) -> None:
    by_room: dict[str, Counter[str]] = {}
    for mutant in chosen:
        if (one := ends.get(mutant.name)) is not None:
            for room in (mutant.file.split("/")[0], "all"):
                by_room.setdefault(room, Counter())[one["end"]] += 1
            if one["end"] not in NOTICED:
                print(f"{one['end']}: {mutant.show()}")
    for room, counts in sorted(by_room.items(), key=lambda pair: pair[0] == "all"):
        n = counts.total() - counts["not run"]
        noticed = sum(counts[end] for end in NOTICED)
        print(f"{room}: {noticed} of {n} mutants noticed ({noticed / max(n, 1):.1%}): {dict(counts)}")


if __name__ == "__main__":
    sys.exit(main())
