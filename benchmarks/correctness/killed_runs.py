"""Kill a training run at random moments, resume it, and compare what comes out with a run that was left alone.

    python benchmarks/correctness/killed_runs.py                              the demo's recipe, 20 runs killed once each
    python benchmarks/correctness/killed_runs.py --set train.steps=60         the same, shorter
    python benchmarks/correctness/killed_runs.py my.toml --kills 5 --times 3  your recipe, each of 5 runs killed three times

Every kill is SIGKILL, which a process can not see coming. Half of the runs are killed at a random time of the whole run, from
reading the data to saving the result. The other half are killed just before a random one of their changes to the disk
(a file opened for writing, renamed or removed), where a half-written state would be left if there were one.

Prints a table; exits with 1 if any model.safetensors, or any loss in metrics.jsonl, is not the same to the last bit.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from clearhead.training import Recipe, find_recipe, train
from clearhead.training.metrics_log import read_repeatable

CHANGES = (
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
)  # Python's own events; and "open", for writing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="dates")
    parser.add_argument("--kills", type=int, default=20, help="runs that are killed")
    parser.add_argument("--times", type=int, default=1, help="kills of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--set", action="append", default=[], metavar="PART.FIELD=VALUE")
    options = parser.parse_args()
    recipe = find_recipe(options.recipe).with_set(["train.tensorboard=false", *options.set])
    # Runs are forked from this process, which loads torch once and computes nothing itself.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    importlib.import_module("torch._inductor")  # building a model loads it: better once here than in every run
    place = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        sys.exit(compare(recipe, place, options))
    finally:
        shutil.rmtree(place)


def compare(recipe: Recipe, place: Path, options: argparse.Namespace) -> int:
    """Run once in peace and `kills` times not; returns 1 if any differs."""
    began = time.perf_counter()
    changes = int(Run(recipe, place / "alone" / "run", options.threads).end().split()[0])
    seconds = time.perf_counter() - began
    wanted = outcome(place / "alone" / "run")
    print(f"left alone: {seconds:.1f} s, {changes} changes to the disk, {len(wanted[1])} lines of metrics\n")
    print("| run | killed | weights | losses |\n|---|---|---|---|", flush=True)
    lots, wrong = random.Random(options.seed), 0
    for number in range(options.kills):
        out, kills = place / str(number) / "run", []
        for _ in range(options.times):
            if number % 2:
                kills.append(kill_at_time(recipe, out, options.threads, seconds * lots.random()))
            else:
                run = Run(recipe, out, options.threads, kill_at=lots.randrange(1, changes + 1))
                kills.append(f"before change {run.end()}")
        Run(recipe, out, options.threads).end()
        same = [got == want for got, want in zip(outcome(out), wanted, strict=True)]
        wrong += not all(same)
        marks = " | ".join("the same" if each else "OTHER" for each in same)
        print(f"| {number + 1} | {', then '.join(kills)} | {marks} |", flush=True)
        shutil.rmtree(out.parent)
    print(f"\n{options.kills - wrong} of {options.kills} killed runs ended as the one left alone")
    return int(wrong > 0)


def kill_at_time(recipe: Recipe, out: Path, threads: int, seconds: float) -> str:
    run = Run(recipe, out, threads)
    time.sleep(seconds)
    os.kill(run.pid, signal.SIGKILL)
    run.end()
    saved = max((path.name for path in (out / "checkpoints").glob("step-*")), default="nothing")
    return f"after {seconds:.2f} s, {saved} saved"


class Run:
    """A run, begun or resumed, in a process of its own; it kills itself before its change number `kill_at` to the disk."""

    def __init__(self, recipe: Recipe, out: Path, threads: int, kill_at: int = 0) -> None:
        self.reading, writing = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            os.close(writing)
            return
        code = 1
        try:
            torch.set_num_threads(threads)
            changes = Changes(out.parent, kill_at, lambda text: os.write(writing, text.encode()))
            sys.addaudithook(changes)
            result = train(recipe, out, resume=(out / "recipe.toml").is_file())
            code = int(not result.is_complete)
            changes.tell("the last")
        except BaseException:
            traceback.print_exc()
        os._exit(code)

    def end(self) -> str:
        """Wait for it; returns what it wrote about its changes to the disk. Anything but success or a kill stops this program."""
        with os.fdopen(self.reading, encoding="utf-8") as stream:
            changes = stream.read()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if status not in (0, -signal.SIGKILL):
            sys.exit(f"a run ended with {status}")
        return changes


class Changes:
    """An audit hook: counts changes below a folder, and kills this process before one of them."""

    def __init__(self, root: Path, kill_at: int, say: Callable[[str], Any]) -> None:
        self.root, self.kill_at, self.say, self.count = str(root), kill_at, say, 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        is_change = event in CHANGES or (event == "open" and writes(arguments))
        if not (is_change and isinstance(arguments[0], str | os.PathLike) and self.root in os.fspath(arguments[0])):
            return
        self.count += 1
        if self.count == self.kill_at:
            self.tell(f"{event} {os.path.relpath(arguments[0], self.root)}")
            os.kill(os.getpid(), signal.SIGKILL)

    def tell(self, what: str) -> None:
        self.say(f"{self.count} ({what})")


def writes(arguments: tuple[Any, ...]) -> bool:
    """Whether these arguments of open are for writing."""
    _, mode, flags = arguments
    return any(letter in mode for letter in "wax+") if mode else bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))


def outcome(out: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """What a run leaves: its weights' file, and its metrics without what a clock says."""
    return (out / "model.safetensors").read_bytes(), read_repeatable(out)


if __name__ == "__main__":
    main()
