"""Probing costs nothing when off: a forward pass of GPT-2 before anyone looked, against one after a probe that has ended.

    .venv/bin/python benchmarks/cpu/probe_cost.py [--rounds 21] [--length 64]

Two models with the same weights, in turns; one thread and CPU time, so that other programs hardly count. A second pair, both
never probed, says what the noise is.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import clearhead as ch
from benchmarks.common.timing import interleave, ratio, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain = ch.build(ch.preset("gpt2")).eval()
    tokens = torch.randint(0, plain.config.vocab_size, (1, options.length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        models = {"never probed": plain, "never probed, again": copy.deepcopy(plain), "probed": copy.deepcopy(plain)}
        with ch.probe(models["probed"]) as seen:
            models["probed"](tokens)
        works = {name: partial(model, tokens) for name, model in models.items()}
        times = interleave(works, rounds=options.rounds, warmup=2, shared=True)
    print(
        f"GPT-2, {options.length} tokens, {len(seen)} sites looked at, {options.rounds} rounds in turns, one thread, CPU time"
    )
    for name, seen_times in times.items():
        median = 1e3 * statistics.median(seen_times)
        relative = 1 / ratio(times, name, "never probed")
        print(f"{name:20} {median:8.2f} ms  (middle half {spread(seen_times):.1%})  {relative:.4f} of never probed")


if __name__ == "__main__":
    main()
