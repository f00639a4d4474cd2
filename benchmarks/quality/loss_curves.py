"""Does a less exact step learn as well? GPT-2 124M on a text: the same data and seed with each precision, and other seeds.

    python3 benchmarks/quality/loss_curves.py TEXT --steps 2000 --out benchmarks/results/loss_curves.json
    python3 benchmarks/quality/loss_curves.py --draw docs/pictures/loss_curves.png --out benchmarks/results/loss_curves.json

    python3 benchmarks/quality/loss_curves.py TEXT --runs "not compiled":{0..3} "in two parts":{0..3} "float32 stream":{0..3}

Every run is a run of `clearhead train`, in a process of its own. What differs between seeds is the noise that a difference between
precisions is to be held against. The last lines compare the first kind of run with the others, seed by seed: "in two parts" differs
from "not compiled" by the order of sums alone, "float32 stream" is the same run compiled.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import platform
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

KINDS = {
    "float32 stream": ["train.precision=bfloat16", "train.stream=float32"],
    "not compiled": ["train.precision=bfloat16", "train.stream=float32", "train.compile=false"],
    # The same sums in another order: how far rounding alone takes a run.
    "in two parts": [
        *("train.precision=bfloat16", "train.stream=float32", "train.compile=false", "train.accumulate=2"),
    ],
    "bfloat16 stream": ["train.precision=bfloat16", "train.stream=bfloat16"],
    "fp8": ["train.precision=fp8", "train.stream=bfloat16"],
}
LAST = 10  # logged rows that a curve's end is the mean of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="*")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument(
        "--runs", nargs="*", default=[*(f"{kind}:0" for kind in KINDS), "float32 stream:1", "float32 stream:2"]
    )
    parser.add_argument("--set", nargs="*", default=[], help="more settings, for all runs")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--work", type=Path, default=Path("runs/loss-curves"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", type=Path, help="a picture of what --out holds")
    options = parser.parse_args()
    if options.draw:
        if options.out is None or not options.out.is_file():
            raise SystemExit(f"--draw takes its figures from a file that --out names; got {options.out}")
        draw(options.draw, json.loads(options.out.read_text(encoding="utf-8")))
        return
    if not options.text or not all(Path(file).is_file() for file in options.text):
        raise SystemExit(f"loss_curves.py takes text files that exist; got {' '.join(options.text) or 'none'}")
    shutil.rmtree(options.work, ignore_errors=True)
    prepare(options)
    import torch

    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    }
    results |= {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "steps": options.steps}
    results |= {"batch_tokens": options.batch_tokens, "text": [Path(file).name for file in options.text], "runs": {}}
    with mp.get_context("spawn").Pool(options.at_once, maxtasksperchild=1) as pool:
        for name, found in pool.imap_unordered(work, [(name, vars(options)) for name in options.runs], chunksize=1):
            results["runs"][name] = found
            if options.out:  # what is there, should the rest not come
                options.out.write_text(json.dumps(results) + "\n")
    show({name: results["runs"][name] for name in options.runs})


def recipe(name: str, options: dict[str, Any]) -> Any:
    import clearhead as ch

    kind, _, seed = name.partition(":")
    base = {"task": "language", "model": {"preset": "gpt2", "dropout": 0.0, "attention_dropout": 0.0}}
    base["data"] = dict(files=options["text"], length=1024, vocab_size=8192, cache=str(options["work"] / "data"))
    base["train"] = dict(steps=options["steps"], batch_tokens=options["batch_tokens"], lr=6e-4, compile=True)
    base["train"] |= dict(log_every=10, evaluate_every=options["steps"], checkpoint_every=options["steps"])
    base["train"] |= dict(samples=0, tensorboard=False, seed=int(seed or 0))
    return ch.Recipe.from_tables(base).with_set([*KINDS[kind], *options["set"]])


def prepare(options: argparse.Namespace) -> None:
    """The text is tokenised once, by a run of one step."""
    shared = vars(options) | {"steps": 1, "set": [*options.set, "train.compile=false"]}
    mp.get_context("spawn").Pool(1).map(work, [(options.runs[0], shared)])


def work(asked: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    import clearhead as ch

    name, options = asked
    folder = options["work"] / f"{name.replace(':', '-').replace(' ', '-')}-{options['steps']}"
    result = ch.train(recipe(name, options), folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    shutil.rmtree(folder)
    train = [row for row in rows if row["kind"] == "train"]
    return name, {
        "curve": [(row["step"], round(row["loss"], 5)) for row in train],
        "end": statistics.mean(row["loss"] for row in train[-LAST:]),
        "held_out": result.metrics["loss"],
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in train),
    }


def show(table: dict[str, dict[str, Any]]) -> None:
    first = next(iter(table))
    print(f"{'run':24} {'last losses':>12} {'beside ' + first:>24} {'held out':>10} {'tokens/s':>12}")
    for name, results in table.items():
        far = results["end"] - table[first]["end"]
        print(
            f"{name:24} {results['end']:12.4f} {far:+24.4f} {results['held_out']:10.4f} {results['tokens_per_second']:12,.0f}"
        )
    for line in compare(table):
        print(line)


def compare(table: dict[str, dict[str, Any]]) -> list[str]:
    """How far each kind of run ends from the first kind with the same seed, and how far seeds of the first kind are apart."""
    kinds = list(dict.fromkeys(name.partition(":")[0] for name in table))
    ends = {kind: {name: r for name, r in table.items() if name.partition(":")[0] == kind} for kind in kinds}
    lines: list[str] = []
    for what in ("end", "held_out"):
        base = {name.partition(":")[2]: results[what] for name, results in ends[kinds[0]].items()}
        if len(base) > 1:
            lines.append(
                f"{what}: seeds of {kinds[0]!r} have a standard deviation of {statistics.stdev(base.values()):.4f}"
            )
        for kind in kinds[1:]:
            other = {name.partition(":")[2]: results[what] for name, results in ends[kind].items()}
            far = [other[seed] - base[seed] for seed in other if seed in base]
            if far:
                spread = f", standard deviation {statistics.stdev(far):.4f}" if len(far) > 1 else ""
                lines.append(
                    f"{what}: {kind!r} above {kinds[0]!r} by {statistics.mean(far):+.4f} over {len(far)} seeds{spread}: "
                    + ", ".join(f"{x:+.4f}" for x in far)
                )
    return lines


def draw(file: Path, results: dict[str, Any]) -> None:
    """How far each way of fp8 is from bfloat16 with the same seed, as running means."""
    import numpy as np

    from clearhead.inside.figure_grid import PlotFigure

    figure = PlotFigure(8, 4)
    figure.set_layout_engine("constrained")
    axis = figure.subplots()
    runs: dict[str, dict[str, Any]] = results["runs"]
    kinds = list(dict.fromkeys(name.partition(":")[0] for name in runs if name.startswith("fp8")))
    for kind, color in zip(kinds, ("#0072B2", "#009E73", "#D55E00", "#CC79A7"), strict=False):
        label = kind
        for seed in range(10):
            run, beside = runs.get(f"{kind}:{seed}"), runs.get(f"bfloat16 stream:{seed}")
            if run is not None and beside is not None:
                steps, losses = np.array(run["curve"]).T
                far = losses - np.array(beside["curve"])[:, 1]
                n = max(1, len(far) // 5)
                smooth = np.convolve(far, np.ones(n) / n, "valid")
                axis.plot(steps[n - 1 :], smooth, color=color, label=label, linewidth=1.2)
                label = ""
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_ylim(-0.05, 0.08)
    axis.set_xlabel(f"step (mean of the last {results['steps'] // 5})")
    axis.set_ylabel("loss above bfloat16's, same seed")
    axis.legend(frameon=False)
    axis.set_title(f"GPT-2 124M, {results['batch_tokens']:,} tokens a step, one {results['device']}")
    figure.savefig(file, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
