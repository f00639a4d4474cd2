"""Several training runs side by side on one GPU, each a recipe with some fields changed: which is best on held-out data?

    python3 benchmarks/quality/recipe_sweep.py RECIPE LINES [--source ... as `clearhead train`]

LINES is a file with one run a line: the settings of `--set`, parted by spaces. All runs start together; the table at the end has
each run's best and last held-out metrics. Runs that share a GPU are slow: their times say nothing, their losses do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

RUNNER = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from clearhead.training import find_recipe, train
recipe = find_recipe({recipe!r}).with_files(**{files!r}).with_set({settings!r})
train(recipe, Path({out!r}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("lines", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--metric", default="loss")
    for name in ("files", "source", "target", "valid", "valid_source", "valid_target"):
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="*", default=[])
    given = parser.parse_args()
    files = {
        name: getattr(given, name) for name in ("files", "source", "target", "valid", "valid_source", "valid_target")
    }
    root = str(Path(__file__).resolve().parents[2])
    runs: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
    given.out.mkdir(parents=True, exist_ok=True)
    for number, line in enumerate(given.lines.read_text().strip().split("\n")):
        out = given.out / f"run-{number}"
        # Each has its own cache: they would all tokenise at once.
        settings = [*line.split(), f"data.cache={out}-data"]
        code = RUNNER.format(root=root, recipe=given.recipe, files=files, settings=settings, out=str(out))
        log = (given.out / f"run-{number}.log").open("wb")
        runs.append((line, out, subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log)))
    start = time.time()
    for _, _, process in runs:
        process.wait()
    print(f"{len(runs)} runs in {time.time() - start:.0f} s")
    for number, (line, out, process) in enumerate(runs):
        if not (out / "metrics.jsonl").exists():
            print(f"{number}: failed: {(given.out / f'run-{number}.log').read_text()[-1500:]}")
            continue
        rows = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
        valid = [row for row in rows if row["kind"] == "valid"]
        steps = [row for row in rows if row["kind"] == "train"]
        result = [row for row in rows if row["kind"] == "result"]
        curve = " ".join(f"{row['step']}:{row[given.metric]:.4f}" for row in valid)
        last = {k: round(v, 4) for k, v in (result or valid or [{}])[-1].items() if isinstance(v, float)}
        seconds = steps[-1]["seconds"] if steps else 0
        print(f"{number} [{line}] {seconds:.0f} s, train {steps[-1]['loss']:.4f}, exit {process.returncode}")
        print(f"   {curve}\n   result {last}")


if __name__ == "__main__":
    main()
