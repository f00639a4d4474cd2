"""Whole runs of `clearhead train` as a user types it, and of nanoGPT's train.py, on one CUDA GPU: GPT-2 124M on a text.

    python3 benchmarks/gpu/whole_runs.py TEXT --nanogpt nanoGPT/ --tokenizer gpt2-tokenizer/ --out RESULTS.json

Both train the same sizes (12 layers, width 768, 1,024 tokens, 50,304 words, no biases, no dropout) on the same tokens with the same
batch, schedule and optimizer. nanoGPT's loop is its own, compiled; it is measured from the step times that it prints, ours from
metrics.jsonl. "cold" starts have empty caches of compiled code; "warm" ones find what the run before left. The first step is timed
from the start of the process. The speed is that of the last steps of each run, without evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

RECIPE = """
task = "language"
[model]
preset = "gpt2"
bias = {bias}
attention_bias = {attention_bias}
vocab_size = 50304
dropout = 0.0
attention_dropout = 0.0
[data]
tokenizer = "{tokenizer}"
length = 1024
valid_share = 0.02
cache = "{cache}"
[train]
steps = {steps}
batch_tokens = {tokens}
optimizer = "adamw"
lr = 0.0006
warmup = 20
schedule = "cosine"
weight_decay = 0.1
evaluate_every = {steps}
checkpoint_every = {steps}
evaluate_rows = 64
samples = 0
tensorboard = false
"""
# What `clearhead train RECIPE TEXT --out FOLDER --set SETTING...` does, without the package that reads the command line.
TRAIN = """
import sys
from clearhead.training import find_recipe, train
recipe, text, out, *settings = sys.argv[1:]
train(find_recipe(recipe).with_files(files=[text]).with_set(settings), out, show=True)
"""
OURS: dict[str, list[str]] = {
    "clearhead": [],
    "clearhead, warm": [],
    "clearhead, float32 stream": ["train.stream=float32", "train.compile=true"],
    "clearhead, not compiled": ["train.compile=false"],
    "clearhead, fp8": ["train.precision=fp8"],
    "clearhead, fp8, warm": ["train.precision=fp8"],
    "clearhead, with biases": ["train.compile=true"],
}
THEIRS = ("nanoGPT", "nanoGPT, warm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--nanogpt", type=Path, help="nanoGPT's folder, with train.py")
    parser.add_argument("--tokenizer", type=Path, required=True, help="GPT-2's: encoder.json and vocab.bpe")
    parser.add_argument(
        "--runs", nargs="*", default=["nanoGPT", "clearhead", "nanoGPT, warm", "clearhead, warm", *OURS]
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rows", type=int, default=32, help="of 1,024 tokens, in a step")
    parser.add_argument("--last", type=int, default=100, help="steps at the end that the speed is of")
    parser.add_argument("--limit", type=float, default=150, help="seconds of one run")
    parser.add_argument("--work", type=Path, default=Path("runs/whole-runs"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("whole_runs.py needs a CUDA GPU, and torch sees none here")
    options.work = options.work.absolute()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    store = prepare(options)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    found |= {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "runs": {}}
    for name in dict.fromkeys(options.runs):
        if name in THEIRS and options.nanogpt is None:
            continue
        try:
            result = nanogpt(name, options, store) if name in THEIRS else ours(name, options)
        except (subprocess.TimeoutExpired, RuntimeError, OSError) as error:
            result = {"error": str(error)[-2000:]}
        found["runs"].setdefault(name, []).append(result)
        print(name, json.dumps(result), flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    show(found["runs"])


def prepare(options: argparse.Namespace) -> Path:
    """Tokenise once, by a run of one step that is not compiled; the store of tokens."""
    run_ours("prepare", options, ["train.steps=1", "train.compile=false", "train.batch_tokens=1024"])
    (store,) = (options.work / "data").glob("text-*")
    return store


def cache_of(name: str, options: argparse.Namespace) -> dict[str, str]:
    """The environment of a run: caches of its own kind, emptied unless it is to find them warm."""
    folder = options.work / ("cache-nanogpt" if name in THEIRS else "cache" + ("-fp8" if "fp8" in name else ""))
    if name in ("nanoGPT", "clearhead", "clearhead, fp8"):
        shutil.rmtree(folder, ignore_errors=True)
    own = {"TORCHINDUCTOR_CACHE_DIR": str(folder)} if name in THEIRS else {"CLEARHEAD_CACHE": str(folder)}
    if name not in THEIRS:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    return {**os.environ, **own, "TRITON_CACHE_DIR": str(folder / "triton"), "PYTHONUNBUFFERED": "1"}


def run_ours(name: str, options: argparse.Namespace, settings: list[str]) -> tuple[Path, float]:
    """The run's folder, and when its process started."""
    biased = name.endswith("with biases")
    recipe, out = options.work / "recipe.toml", options.work / name.replace(", ", "-").replace(" ", "-")
    recipe.write_text(
        RECIPE.format(
            bias="true" if biased else "false",
            attention_bias='"qkvo"' if biased else '""',
            tokenizer=options.tokenizer.absolute(),
            cache=options.work / "data",
            steps=options.steps,
            tokens=1024 * options.rows,
        )
    )
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-c", TRAIN, str(recipe), str(options.text), str(out), *settings]
    started = time.time()
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=cache_of(name, options),
        capture_output=True,
        text=True,
        timeout=options.limit,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"{name} failed: {ran.stdout[-500:]} {ran.stderr[-1500:]}")
    summary = [line for line in ran.stdout.splitlines() if line.startswith("speed")]
    print(*summary[:1], sep="\n", flush=True)
    return out, started


def ours(name: str, options: argparse.Namespace) -> dict[str, Any]:
    out, started = run_ours(name, options, OURS[name])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    train = [row for row in rows if row["kind"] == "train" and row["step"] > options.steps - options.last]
    speed = next(row for row in rows if row["kind"] == "speed")
    seconds = sum(train[0]["tokens"] / train[0]["step"] * 10 / row["tokens_per_second"] for row in train)
    # The run's folder is made at the start of the run: what came before it is Python's start and the import.
    first = (out / "environment.json").stat().st_mtime - started + speed["first_step_seconds"]
    return {
        "tokens_per_second": options.last * options.rows * 1024 / seconds,
        "rows": [row["tokens_per_second"] for row in train],
        "later": speed.get("tokens_per_second_later"),
        "first_step": first,
        "whole": time.time() - started,
        "loss": train[-1]["loss"],
        "held_out": next(row["loss"] for row in rows if row["kind"] == "result"),
    }


def nanogpt(name: str, options: argparse.Namespace, store: Path) -> dict[str, Any]:
    """nanoGPT's own train.py, in a copy of its folder, on the tokens of our store."""
    folder = options.work / "nanogpt"
    if not folder.exists():
        shutil.copytree(options.nanogpt, folder)
        from clearhead.data.token_store import Store
        from clearhead.data.windows import split_stream

        tokens = Store(store)["text"].flat
        cut = split_stream(len(tokens), 0.02)
        (folder / "data" / "here").mkdir(parents=True, exist_ok=True)
        for part, piece in (("train", tokens[:cut]), ("val", tokens[cut:])):
            np.asarray(piece, dtype=np.uint16).tofile(folder / "data" / "here" / f"{part}.bin")
    shape = dict(dataset="here", batch_size=options.rows, block_size=1024, gradient_accumulation_steps=1, dropout=0.0)
    shape |= dict(bias=False, max_iters=options.steps, learning_rate=6e-4, min_lr=0.0, weight_decay=0.1, beta2=0.95)
    shape |= dict(warmup_iters=20, lr_decay_iters=options.steps, eval_interval=options.steps, eval_iters=2)
    shape |= dict(always_save_checkpoint=False, log_interval=1)
    command = [sys.executable, "train.py", *(f"--{key}={value}" for key, value in shape.items())]
    started, first, lines = time.time(), 0.0, list[str]()
    with subprocess.Popen(
        command, cwd=folder, env=cache_of(name, options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("iter 0:"):
                first = time.time() - started
            if time.time() - started > options.limit:
                process.kill()
    text = "".join(lines)
    if process.returncode:
        raise RuntimeError(f"nanoGPT failed: {text[-2000:]}")
    steps = [(float(loss), float(ms)) for loss, ms in re.findall(r"iter \d+: loss ([\d.]+), time ([\d.]+)ms", text)]
    held = re.findall(r"val loss ([\d.]+)", text)
    last = steps[-options.last - 1 : -1]  # the very last one follows an evaluation
    seconds = sum(ms for _, ms in last) / 1000
    return {
        "tokens_per_second": len(last) * options.rows * 1024 / seconds,
        "rows": [1000 * options.rows * 1024 / ms for _, ms in last][::10],
        "first_step": first,
        "whole": time.time() - started,
        "loss": statistics.mean(loss for loss, _ in last[-10:]),
        "held_out": float(held[-1]),
    }


def show(runs: dict[str, list[dict[str, Any]]]) -> None:
    def middle(results: list[dict[str, Any]], ask: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(map(ask, results))

    whole = {name: [each for each in results if "error" not in each] for name, results in runs.items()}
    base = whole.get("nanoGPT") or whole.get("nanoGPT, warm")
    peer = middle(base, lambda each: each["tokens_per_second"]) if base else float("nan")
    print(
        f"\n{'run':30} {'tokens/s':>10} {'ratio':>6} {'first step, s':>14} {'whole, s':>9} {'loss':>7} {'held out':>9}"
    )
    for name, results in whole.items():
        if results:
            rate, first, all_, loss, held = (
                middle(results, lambda each, key=key: each[key])
                for key in ("tokens_per_second", "first_step", "whole", "loss", "held_out")
            )
            print(f"{name:30} {rate:10,.0f} {rate / peer:6.2f} {first:14.1f} {all_:9.1f} {loss:7.3f} {held:9.3f}")


if __name__ == "__main__":
    main()
