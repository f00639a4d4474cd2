"""Which rules of the optimizer learn faster? Runs of `clearhead train` that differ in one rule, with the same data and seeds.

    python3 benchmarks/quality/optimizer_ablation.py tinyshakespeare.txt --work small            # a small model, on a CPU
    python3 benchmarks/quality/optimizer_ablation.py tinyshakespeare.txt --work shakespeare      # nanoGPT's sizes, on a GPU
    python3 benchmarks/quality/optimizer_ablation.py enwik8.gz --work gpt2 --tokenizer T         # GPT-2 124M, on a GPU

The work gpt2 asks in how many steps each rule reaches the loss at which AdamW ends: its other runs have half of AdamW's steps.
Each line has steps and tokens, the held-out loss at the end (mean over seeds, and the standard deviation of one run), the
difference from the base, and the seconds of a whole run. A difference is the mean over pairs of runs with the same seed, that is
the same first weights and the same windows, with its standard error. A rule that changes the tokens of a step has as many in all.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import platform
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
START = time.time()
SHAKESPEARE = Path(__file__).resolve().parents[1] / "recipes" / "shakespeare.toml"
ADAMW = ["train.optimizer=adamw", "train.schedule=cosine", "train.betas=[0.9, 0.99]"]
ALL = ["train.muon_iteration=polar", "train.muon_beta2=0.95", "train.cautious_decay=true"]
RULES: dict[str, list[str]] = {
    "adamw": [*ADAMW, "train.lr=0.001"],
    "adamw, lr x 4": [*ADAMW, "train.lr=0.004"],
    "muon": [],
    "polar": ["train.muon_iteration=polar"],
    "normuon": ["train.muon_beta2=0.95"],
    "cautious": ["train.cautious_decay=true"],
    "polar+normuon": ["train.muon_iteration=polar", "train.muon_beta2=0.95"],
    "all": ALL,
    "batch": ["train.batch_doublings=2"],
    "half batch": [],  # all the time: is it the schedule, or that there are more steps?
    "length": ["train.length_doublings=2"],
    "batch+length": ["train.batch_doublings=2", "train.length_doublings=2"],
    "all+length": [*ALL, "train.length_doublings=2"],
    "average": ["train.average=3"],
    "average, rate to 0.2": ["train.average=3", "train.min_lr=0.2"],
    "cosine": ["train.schedule=cosine"],
}
SMALL = [
    *("model.n_layers=3", "model.d_model=96", "model.n_heads=3", "model.dropout=0.0", "model.attention_dropout=0.0"),
    *("data.length=64", "train.batch_tokens=2048", "train.steps=200", "train.evaluate_every=1000", "train.warmup=20"),
]
GPT2 = {
    "model": dict(preset="gpt2", bias=False, attention_bias="", vocab_size=50304, dropout=0.0, attention_dropout=0.0),
    "data": dict(length=1024, valid_share=0.005),
    "train": dict(batch_tokens=32768, optimizer="muon", lr=0.003, muon_lr=0.02, schedule="wsd", decay=0.5, warmup=50)
    | dict(evaluate_rows=0, samples=0, tensorboard=False, compile=True, stream="bfloat16", log_every=25),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", choices=["small", "shakespeare", "gpt2"], required=True)
    parser.add_argument("--tokenizer", default="", help="gpt2: a folder with encoder.json and vocab.bpe")
    parser.add_argument("--rules", nargs="*", choices=list(RULES), default=list(RULES))
    parser.add_argument("--base", choices=list(RULES), default="muon", help="what the others are compared with")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0, help="of AdamW; gpt2's other rules have half of them")
    parser.add_argument("--set", nargs="*", default=[], help="more settings, for all runs")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--folder", type=Path, default=Path("runs/optimizer-ablation"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.text.is_file():
        raise SystemExit(f"optimizer_ablation.py takes a text that exists; got {options.text}")
    shutil.rmtree(options.folder, ignore_errors=True)
    found: dict[str, Any] = {"work": options.work, "text": options.text.name, "date": time.strftime("%Y-%m-%d")}
    found |= {"machine": machine(), "runs": {}}
    asked = [(rule, seed, vars(options)) for seed in range(options.seeds) for rule in options.rules]
    spawn = mp.get_context("spawn")
    with spawn.Pool(options.at_once, maxtasksperchild=1) as pool:
        for rule, result in pool.imap_unordered(work, asked, chunksize=1):
            found["runs"].setdefault(rule, []).append(result)
            print(rule, json.dumps(result | {"curve": len(result["curve"])}), flush=True)
            if options.out:
                options.out.write_text(json.dumps(found) + "\n")
    show(found["runs"], options.base)


def machine() -> str:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return f"{device}, torch {torch.__version__}"


def recipe(rule: str, seed: int, options: dict[str, Any]) -> Any:
    from clearhead.training import Recipe, find_recipe
    from clearhead.training.schedules import mean_batch

    settings = [f"train.seed={seed}", f'data.cache="{options["folder"].absolute() / "data"}"']
    if options["work"] == "gpt2":
        base = Recipe.from_tables({"task": "language", **GPT2})
        steps = options["steps"] or 3000
        steps = steps if rule.startswith("adamw") else steps // 2
        settings += [f"train.steps={steps}", f"data.tokenizer={options['tokenizer']}"]
        settings += [f"train.evaluate_every={steps // 5}", f"train.checkpoint_every={steps}"]
    else:
        base = find_recipe(str(SHAKESPEARE))
        settings += SMALL if options["work"] == "small" else []
        settings += [f"train.steps={options['steps']}"] if options["steps"] else []
    base = base.with_files(files=[str(options["text"])]).with_set([*settings, *options["set"]])
    t = base.train
    added = [f"train.batch_tokens={t.batch_tokens // 2}"] if rule == "half batch" else RULES[rule]
    if rule == "adamw" and options["work"] == "gpt2":  # nanoGPT's
        added = [*added, "train.lr=0.0006", "train.betas=[0.9, 0.95]", "train.warmup=100"]
    made = base.with_set(added)
    if made.train.average:
        made = made.with_set([f"train.checkpoint_every={max(1, t.steps // 20)}"])
    steps = round(t.steps * t.batch_tokens / (made.train.batch_tokens * mean_batch(made.train)))
    return made.with_set([f"train.steps={steps}"])


def work(asked: tuple[str, int, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    import clearhead as ch

    rule, seed, options = asked
    folder = options["folder"] / f"{rule}-{seed}"
    began = os.path.getctime("/proc/self") if os.path.exists("/proc/self") else START
    result = ch.train(recipe(rule, seed, options), folder)
    whole = time.time() - began
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    shutil.rmtree(folder)
    train = [row for row in rows if row["kind"] == "train"]
    return rule, {
        "seed": seed,
        "steps": result.step,
        "tokens": train[-1]["tokens"],
        "held_out": result.metrics["loss"],
        "end": statistics.mean(row["loss"] for row in train[-5:]),
        "valid": [(row["step"], round(row["loss"], 4)) for row in rows if row["kind"] == "valid"],
        "curve": [(row["step"], round(row["loss"], 4)) for row in train],
        "tokens_per_second": result.speed["tokens_per_second"],
        "first_step": result.speed["first_step_seconds"],
        "whole": whole,
    }


def show(runs: dict[str, list[dict[str, Any]]], base: str) -> None:
    print(
        f"{'rule':24} {'steps':>6} {'tokens':>11} {'seeds':>5} {'held out':>17} {'minus ' + base:>19} {'s, whole':>9}"
    )
    for rule, results in runs.items():
        held = [each["held_out"] for each in results]
        mean, deviation = mean_and_deviation(held)
        steps, tokens, whole = (
            statistics.mean(each[name] for each in results) for name in ("steps", "tokens", "whole")
        )
        line = f"{rule:24} {steps:6.0f} {tokens:11,.0f} {len(held):5} {mean:8.4f} ± {deviation:6.4f}"
        print(f"{line} {spell_difference(results, runs.get(base, [])):>19} {whole:9.1f}")


def spell_difference(results: list[dict[str, Any]], base: list[dict[str, Any]]) -> str:
    """The mean difference of runs with the same seed, and its standard error."""
    known = {each["seed"]: each["held_out"] for each in base}
    pairs = [each["held_out"] - known[each["seed"]] for each in results if each["seed"] in known]
    if results is base or not pairs:
        return ""
    mean, deviation = mean_and_deviation(pairs)
    return f"{mean:+8.4f} ± {deviation / math.sqrt(len(pairs)):6.4f}"


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    """The standard deviation is that of one value, estimated from all; of a single one it is not known."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else math.nan


if __name__ == "__main__":
    main()
