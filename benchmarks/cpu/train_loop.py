"""The training loop beside nanoGPT's own, on the CPU: the same model, batch and optimizer, both scripts as they are.

    python benchmarks/cpu/train_loop.py --nanogpt path/to/nanoGPT --text tinyshakespeare.txt [--steps 8] [--rounds 3]

nanoGPT's train.py is run with device=cpu and compile=False; clearhead trains a recipe with the same sizes. Each round runs
both; the figure is the median time of a step, its first two left out.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
task = "language"
[model]
shape = "decoder"
n_layers = 6
d_model = 384
n_heads = 6
positions = "learned"
norm = "layer"
norm_first = true
bias = false
feedforward = "gelu"
tie_embeddings = true
[data]
tokenizer = "chars"
valid_share = 0.1
length = 256
[train]
steps = {steps}
batch_tokens = {tokens}
optimizer = "adamw"
lr = 0.001
evaluate_every = 1000
checkpoint_every = 1000
evaluate_rows = 1
log_every = 1
samples = 0
tensorboard = false
"""


def nanogpt(folder: Path, steps: int, rows: int) -> list[float]:
    """Milliseconds of each step, as its log says."""
    options = dict(device="cpu", compile=False, eval_interval=10_000, eval_iters=1, log_interval=1, block_size=256)
    options |= dict(batch_size=rows, n_layer=6, n_head=6, n_embd=384, max_iters=steps, dropout=0.0, dtype="float32")
    options |= dict(gradient_accumulation_steps=1, dataset="shakespeare_char", always_save_checkpoint=False, bias=False)
    words = [f"--{name}={value}" for name, value in options.items()]
    ran = subprocess.run([sys.executable, "train.py", *words], cwd=folder, capture_output=True, text=True, check=True)
    return [float(ms) for ms in re.findall(r"time ([\d.]+)ms", ran.stdout)]


def ours(text: Path, steps: int, rows: int) -> list[float]:
    with tempfile.TemporaryDirectory() as place:
        recipe, out = Path(place) / "recipe.toml", Path(place) / "run"
        recipe.write_text(RECIPE.format(steps=steps, tokens=256 * rows))
        command = [sys.executable, "-m", "clearhead", "train", str(recipe), str(text), "--out", str(out)]
        subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        1000 * line["tokens"] / line["step"] / line["tokens_per_second"] for line in lines if line["kind"] == "train"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    ratios: list[float] = []
    for number in range(given.rounds):
        runs = [
            lambda: nanogpt(given.nanogpt, given.steps, given.rows),
            lambda: ours(given.text, given.steps, given.rows),
        ]
        order = [0, 1] if number % 2 else [1, 0]
        found = {place: statistics.median(runs[place]()[2:]) for place in order}
        ratios.append(found[0] / found[1])
        print(
            f"round {number + 1}: nanoGPT {found[0]:,.0f} ms a step, clearhead {found[1]:,.0f} ms, ratio {ratios[-1]:.3f}"
        )
    print(f"clearhead's loop is {statistics.median(ratios):.3f}x as fast as nanoGPT's (median of {len(ratios)})")


if __name__ == "__main__":
    main()
