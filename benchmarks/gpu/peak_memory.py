"""Peak memory of a training step on a GPU, forecast and measured: GPT-2 124M at four shapes, as `clearhead train` runs it.

    python benchmarks/gpu/peak_memory.py                                   on a GPU, in under a minute
    python benchmarks/gpu/peak_memory.py --device cpu --set n_layers=2     the same code on a CPU, where torch's profiler counts

bfloat16 autocast, the loss chunk by chunk, fused AdamW, clipped gradients, no recorded graphs: these hold memory of their own.
The second of two steps is measured, since the optimizer's state comes with the first. Exit status 1: more than 5 % off on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import clearhead as ch
from clearhead.kernels.cross_entropy import cross_entropy
from clearhead.models import Decoder

SHAPES = ((1, 1024), (8, 512), (8, 1024), (32, 1024))  # batch, length
ALLOWED = 0.05


def make_step(config: ch.Config, batch: int, length: int, device: str) -> Callable[[], None]:
    model = ch.build(config, device=device).train()
    assert isinstance(model, Decoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    text = torch.randint(0, config.vocab_size, (batch, length + 1), device=device)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            x, weight, bias = model.head.parts(model.states(tokens), model.tokens.weight)
            assert isinstance(weight, torch.Tensor)
            _, goal, _ = cross_entropy(x, weight, targets, bias=bias)
        (goal / targets.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(config: ch.Config, batch: int, length: int, device: str) -> int:
    """The most bytes that torch's tensors took during the second step."""
    gc.collect()  # what the last shape left
    step = make_step(config, batch, length, device)
    step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    events: list[Any] = seen.profiler.kineto_results.events()
    held = highest = 3 * 4 * sum(p.numel() for p in ch.build(config, device="meta").parameters())
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += change
        highest = max(highest, held)
    return highest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=NUMBER", help="another size of GPT-2")
    parser.add_argument("--shapes", default="", help="batch x length, such as 1x128,2x64")
    options = parser.parse_args()
    changes: dict[str, Any] = {name: json.loads(value) for name, value in (each.split("=") for each in options.set)}
    config = ch.preset("gpt2", dropout=0.0, attention_dropout=0.0, **changes)
    shapes = [tuple(map(int, each.split("x"))) for each in options.shapes.split(",")] if options.shapes else SHAPES
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; GPT-2, bfloat16 autocast, AdamW\n")
    print(f"{'batch':>6} {'length':>7} {'forecast':>12} {'measured':>12} {'error':>7} {'seconds':>8}")
    worst = 0.0
    for batch, length in shapes:
        asked: dict[str, Any] = dict(
            batch=batch, length=length, mode="train", precision="bfloat16", device=options.device
        )
        said = ch.cost(config, **asked).peak_bytes
        began = time.perf_counter()
        found = measure(config, batch, length, options.device)
        error = said / found - 1
        worst = max(worst, abs(error))
        seconds = time.perf_counter() - began
        print(
            f"{batch:6} {length:7} {said / 1e6:9,.0f} MB {found / 1e6:9,.0f} MB {error:+7.1%} {seconds:8.1f}",
            flush=True,
        )
    print(f"\nlargest error {worst:.1%}, allowed {ALLOWED:.0%}")
    sys.exit(int(worst > ALLOWED and options.device == "cuda"))


if __name__ == "__main__":
    main()
