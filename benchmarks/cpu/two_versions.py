"""Is another version of clearhead as fast? The same work by both, in turns, each in processes of its own.

    python benchmarks/cpu/two_versions.py --before ../older-clone

The work uses public names only, so that old versions run it. Random weights, float32 unless said. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]


def one_of(*names: str) -> Any:
    """The first of these modules that this version has. Its folder is asked: an installed version may answer an import."""
    import clearhead

    root = Path(clearhead.__file__).parent
    found = next(name for name in names if root.joinpath(*name.split(".")).with_suffix(".py").exists())
    return importlib.import_module(f"clearhead.{found}")


def gpt2(bits: str) -> Any:
    import clearhead as ch

    model = ch.build(ch.preset("gpt2")).eval()
    if bits == "float32":
        return model
    return one_of("quantization.integer", "layers.quantized").quantize(model, bits)


def decode(bits: str, batch: int) -> Callable[[], object]:
    import clearhead as ch

    model, prompts = gpt2(bits), [[(7 * i + j) % 50_000 for j in range(32)] for i in range(batch)]
    return lambda: ch.generate(model, prompts, max_new_tokens=48, temperature=0, eos=())


def translate(beams: int) -> Callable[[], object]:
    import clearhead as ch

    model: Any = ch.build(ch.preset("transformer-base", vocab_size=8000)).eval()
    model.generation = ch.Generation(decoder_start=0, eos=(1,))
    sources = [[(11 * i + j) % 7000 + 5 for j in range(12 + i % 17)] for i in range(16)]
    return lambda: ch.translate(model, sources, beams=beams, max_new_tokens=24)


def flan_t5() -> Callable[[], object]:
    import clearhead as ch

    model: Any = ch.build(ch.preset("t5-small", vocab_size=8000)).eval()
    model.generation = ch.Generation(decoder_start=0, eos=(1,))
    sources = [[(11 * i + j) % 7000 + 5 for j in range(12 + i % 17)] for i in range(8)]
    return lambda: ch.translate(model, sources, beams=1, max_new_tokens=32)


def encode() -> Callable[[], object]:
    import clearhead as ch

    embed_ids = one_of("generation.embeddings", "generation.vectors").embed_ids
    model: Any = ch.build(ch.preset("minilm-l6")).eval()
    ids = [[(13 * i + j) % 30_000 for j in range(5 + (37 * i) % 123)] for i in range(96)]
    return lambda: embed_ids(model, ids)


def train() -> Callable[[], object]:
    import torch

    import clearhead as ch

    model: Any = ch.build(ch.preset("gpt2", n_layers=6, d_model=384, n_heads=6, d_ff=1536, vocab_size=256, max_len=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 256, (8, 257))

    def step() -> None:
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


WORK: dict[str, Callable[[], Callable[[], object]]] = {
    "decode, float32, batch 1": lambda: decode("float32", 1),
    "decode, float32, batch 8": lambda: decode("float32", 8),
    "decode, int8, batch 1": lambda: decode("int8", 1),
    "decode, int4, batch 1": lambda: decode("int4", 1),
    "decode, int8, batch 8": lambda: decode("int8", 8),
    "translate 16, greedy": lambda: translate(1),
    "translate 16, 4 beams": lambda: translate(4),
    "translate 8, T5": flan_t5,
    "encode 96 texts": encode,
    "training step": train,
}


def worker(names: list[str], times: int) -> None:
    for name in names:
        work = WORK[name]()
        work()
        for _ in range(times):
            start = time.perf_counter()
            work()
            print(f"{name}\t{time.perf_counter() - start}", flush=True)


def run(tree: Path, names: list[str], times: int) -> dict[str, list[float]]:
    env = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, __file__, "--worker", "--times", str(times), *names]
    done = subprocess.run(command, env=env, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{tree}: {done.stderr.strip()[-2000:]}")
    found: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        name, seconds = line.split("\t")
        found.setdefault(name, []).append(float(seconds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"which: {'; '.join(WORK)} (all)")
    parser.add_argument("--before", type=Path, help="a clone of the other version")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", type=int, default=3, help="measurements in each process")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.names or list(WORK)
    if unknown := set(names) - set(WORK):
        sys.exit(f"no such work: {', '.join(unknown)}; choose from: {'; '.join(WORK)}")
    if options.worker:
        return worker(names, options.times)
    if options.before is None or not (options.before / "clearhead").is_dir():
        sys.exit(f"--before wants a clone of another version; got {options.before}")
    trees = {"before": options.before.resolve(), "now": HERE}
    found: dict[str, dict[str, list[float]]] = {name: {"before": [], "now": []} for name in names}
    for turn in range(options.rounds):
        for name in names:
            for which in sorted(trees, reverse=bool(turn % 2)):
                found[name][which] += run(trees[which], [name], options.times)[name]
    print(f"{'work':28}{'before, s':>12}{'now, s':>12}{'now / before':>14}{'spread':>10}")
    for name, each in found.items():
        before, now = (statistics.median(each[which]) for which in ("before", "now"))
        spread = max(each["before"]) / min(each["before"]) - 1
        print(f"{name:28}{before:12.3f}{now:12.3f}{now / before:14.2f}{spread:10.0%}")
    return None


if __name__ == "__main__":
    main()
