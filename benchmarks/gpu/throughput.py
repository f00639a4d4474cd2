"""Training and encoding on one CUDA GPU, beside other libraries, each in a process of its own; one after the other, in rounds.

    python3 benchmarks/gpu/throughput.py --nanogpt nanoGPT/model.py --multi30k multi30k/ \\
        --out benchmarks/results/gpu_throughput.json
    python3 benchmarks/gpu/throughput.py --only gpt2 translate --rounds 3

Works: gpt2, gpt2-long, translate, vit, bert (training steps: forward, backward, clipping, AdamW), encode-minilm, encode-bert.
All contenders compile side by side first; then each is timed alone, in turns. Weights and tokens are random, lengths real
where said. bfloat16 products by autocast for all; clearhead with train.stream=bfloat16. A work that is in --out already is
replaced, the others stay.

A contender is a function that takes the options and returns a step and how much work (tokens, pictures, sentences) one step
does; WORKS names them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.encode_contenders import clearhead_encode, sentence_transformers_encode, transformers_encode
from benchmarks.gpu.train_contenders import (
    Step,
    clearhead_bert,
    clearhead_gpt2,
    clearhead_vit,
    nanogpt,
    transformers_bert,
    transformers_vit,
)
from benchmarks.gpu.translate_contenders import BATCHES, clearhead_translate, marian, torch_translate, x_translate

EACH = {"translate": BATCHES, "encode-minilm": 1, "encode-bert": 1}  # steps between two looks at the clock, else 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one timing")
    parser.add_argument("--patience", type=float, default=75, help="seconds until all contenders must be ready")
    parser.add_argument("--nanogpt", default="", help="path of nanoGPT's model.py")
    parser.add_argument("--multi30k", default="", help="folder with train.en.gz and train.de.gz, for their lengths")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("throughput.py needs a CUDA GPU, and torch sees none here; run.py measures the CPU")
    before = json.loads(options.out.read_text())["works"] if options.out and options.out.exists() else {}
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "works": before,
    }
    for name in options.only:
        found["works"][name] = compare(name, options)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


def compare(work: str, options: argparse.Namespace) -> dict[str, Any]:
    """All contenders of a work, in turns."""
    spawn = mp.get_context("spawn")
    names = [name for name in WORKS[work] if name != "nanogpt" or options.nanogpt]
    pipes = {name: spawn.Pipe() for name in names}
    workers = [
        spawn.Process(target=serve, args=(work, name, vars(options), pipes[name][1]), daemon=True) for name in names
    ]
    for worker in workers:
        worker.start()
    last = time.perf_counter() + options.patience
    ready: dict[str, dict[str, Any]] = {}
    for worker, name in zip(workers, names, strict=True):
        ready[name] = answer(pipes[name][0], max(0.0, last - time.perf_counter()))
        print(f"  {work}: {name} {ready[name]}", flush=True)
        if "error" in ready[name]:
            worker.kill()
    times: dict[str, list[float]] = {name: [] for name in names if "error" not in ready[name]}
    for _ in range(options.rounds):
        for name in times:
            pipes[name][0].send(options.seconds)
            figures = answer(pipes[name][0], 60)
            times[name].append(figures.pop("rate", 0.0))
            ready[name] |= figures
    for worker in workers:
        worker.kill()
    found: dict[str, Any] = {}
    print(f"\n{work}: {UNITS.get(work, 'tokens/s')}, {options.rounds} rounds in turns")
    for name in names:
        if name not in times:
            found[name] = ready[name]
            print(f"  {name:28} {ready[name]['error'][-300:]}", flush=True)
            continue
        rate = statistics.median(times[name])
        found[name] = {"rate": rate, "all": times[name], **ready[name]}
        print(
            f"  {name:28} {rate:12,.0f}  ({min(times[name]):,.0f} .. {max(times[name]):,.0f})  {ready[name]['peak']:5.1f} GB  "
            f"first step {ready[name]['first']:.0f} s  loss {ready[name]['loss'] or ''}, "
            f"after {ready[name].get('steps')} steps {ready[name].get('last_loss')}",
            flush=True,
        )
    return found


def answer(pipe: Any, seconds: float) -> dict[str, Any]:
    try:
        return pipe.recv() if pipe.poll(seconds) else {"error": f"nothing after {seconds:.0f} s"}
    except EOFError:
        return {"error": "its process ended"}


def serve(work: str, name: str, options: dict[str, Any], pipe: Any) -> None:
    """One contender in a process of its own: made ready, then timed whenever asked."""
    try:
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(0)
        begin = time.perf_counter()
        step, amount = WORKS[work][name](options)
        loss = number(step())
        torch.cuda.synchronize()
        first = time.perf_counter() - begin
        each = EACH.get(work, 3)
        for _ in range(each):
            step()
        torch.cuda.synchronize()
        pipe.send({"first": first, "peak": torch.cuda.max_memory_allocated() / 1e9, "loss": loss})
        done, last = 0, None
        while seconds := pipe.recv():
            step()
            torch.cuda.synchronize()
            begin, n = time.perf_counter(), 0
            while n < each or time.perf_counter() - begin < seconds:
                for _ in range(each):
                    last = step()
                torch.cuda.synchronize()
                n += each
            done += n
            pipe.send({"rate": amount * n / (time.perf_counter() - begin), "steps": done, "last_loss": number(last)})
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})


def number(loss: Any) -> float | None:
    return float(loss.float().mean()) if isinstance(loss, torch.Tensor) else None


WORKS: dict[str, dict[str, Callable[[dict[str, Any]], tuple[Step, int]]]] = {
    "gpt2": {
        "nanogpt": nanogpt(32, 1024),
        "clearhead": clearhead_gpt2(32, 1024),
        "clearhead, fp8": clearhead_gpt2(32, 1024, precision="fp8"),
    },
    "gpt2-long": {
        "nanogpt": nanogpt(4, 8192),
        "clearhead": clearhead_gpt2(4, 8192),
        "clearhead, fp8": clearhead_gpt2(4, 8192, precision="fp8"),
    },
    "translate": {
        "transformers Marian": marian,
        "torch.nn.Transformer": torch_translate,
        "x-transformers": x_translate,
        "clearhead": clearhead_translate,
    },
    "vit": {"transformers": transformers_vit, "clearhead": clearhead_vit},
    "bert": {"transformers": transformers_bert, "clearhead": clearhead_bert},
    "encode-minilm": {
        "sentence-transformers, 32": sentence_transformers_encode("minilm", 32),
        "sentence-transformers, 256": sentence_transformers_encode("minilm", 256),
        "transformers, sorted, 256": transformers_encode("minilm", 256),
        "clearhead": clearhead_encode("minilm"),
    },
    "encode-bert": {
        "sentence-transformers, 32": sentence_transformers_encode("bert", 32),
        "sentence-transformers, 256": sentence_transformers_encode("bert", 256),
        "transformers, sorted, 256": transformers_encode("bert", 256),
        "clearhead": clearhead_encode("bert"),
    },
}
UNITS = {
    "translate": "target tokens/s",
    "vit": "pictures/s",
    "encode-minilm": "sentences/s",
    "encode-bert": "sentences/s",
}

if __name__ == "__main__":
    main()
