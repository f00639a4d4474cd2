"""Tokens a second through HTTP, and of the engine alone, for a decoder with random weights on one GPU.

    PYTHONPATH=. python3 benchmarks/gpu/serve.py --shape gpt2 --seconds 20 --front-ends auto 0

The engine alone: a batch that starts and ends together, and a batch in which each text that ends makes room for the next (as in a
server). Then, for each number of front ends, a server as a user starts it, asked by client processes on the same machine: streams,
and whole answers. The first seconds after the port opens are reported apart, and the CPU time of each process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import clearhead as ch
from benchmarks.common.http_load import Load, load, tell
from clearhead.generation import Engine, Request

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(preset="gpt2", n_layers=1, d_model=32, n_heads=4, vocab_size=304),
    "gpt2": dict(preset="gpt2", n_layers=12, d_model=768, n_heads=12, vocab_size=50_257),
    "1.1B": dict(preset="llama", n_layers=22, d_model=2048, n_heads=32, n_kv_heads=4, d_ff=5632, vocab_size=32_000),
}


def make_model(folder: Path, shape: str, device: str) -> Path:
    """Random weights; only words that the small tokenizer has are ever chosen, and no text ends by itself."""
    tokenizer = ch.train_tokenizer(
        texts=["the cat sat on the mat", "a dog ran over the hill"] * 9, kind="bpe", vocab_size=300
    )
    sizes = dict(SHAPES[shape])
    config = ch.preset(sizes.pop("preset"), **sizes, max_len=1024)
    model: Any = ch.build(config)
    with torch.no_grad():
        head = model.tokens.weight if config.tie_embeddings else model.head.weight
        head[tokenizer.vocab_size :] = 0
    model.generation = ch.Generation(bos=tokenizer.bos, eos=())
    place = ch.save(model if device == "cpu" else model.bfloat16(), folder / shape)
    tokenizer.save(place)
    return place


def prompts(n: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 250) for _ in range(length)] for _ in range(n)]


def alone(place: str, device: str, rows: int, length: int, n_new: int) -> None:
    """In a process of its own: the engine without HTTP."""
    model: Any = ch.load(place, device=device).eval()
    engine = Engine(model, max_rows=rows)

    def together(seed: int) -> float:
        for each in prompts(rows, length, seed):
            engine.submit(Request(prompt=each, max_new_tokens=n_new))
        began = time.perf_counter()
        engine.run()
        return rows * n_new / (time.perf_counter() - began)

    def refilled(seed: int, seconds: float) -> float:
        waiting, n_open, total = iter(prompts(12_000, length, seed)), 0, 0
        rng, began = random.Random(seed), time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            while n_open < rows:
                engine.submit(Request(prompt=next(waiting), max_new_tokens=rng.randint(n_new // 2, n_new * 3 // 2)))
                n_open += 1
            for _, token in engine.step():
                total += token is not None
                n_open -= token is None
        while engine.is_busy:
            engine.step()
        return total / spent

    together(0)  # records graphs
    refilled(1, 4.0)
    speeds = [together(seed) for seed in (2, 3, 4)]
    print(f"engine alone, {rows} rows together: {statistics.median(speeds):,.0f} tokens/s", end="; ")
    print(f"refilled: {refilled(5, 5.0):,.0f}", flush=True)


def cpu_by_process(pid: int) -> dict[int, float]:
    """CPU seconds of a process and its children."""
    found = [pid, *(int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    times: dict[int, float] = {}
    for each in found:
        fields = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
        times[each] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return times


def serve(place: Path, asked: argparse.Namespace, front_ends: str) -> None:
    more = [] if front_ends == "auto" else ["--front-ends", front_ends]
    command = [sys.executable, "-m", "clearhead", "serve", str(place), "--port", "0", "--device", asked.device]
    began = time.time()
    with tempfile.NamedTemporaryFile("w+") as log:  # noqa: SIM117
        with subprocess.Popen([*command, "--streams", "4096", *more], stderr=log, stdout=log) as process:
            try:
                while not (found := re.search(r"running on http://\S+:(\d+)", Path(log.name).read_text())):
                    if process.poll() is not None:
                        raise SystemExit(Path(log.name).read_text())
                    time.sleep(0.1)
                print(f"front ends {front_ends}: the port opens after {time.time() - began:.1f} s", flush=True)
                for what, is_streamed in (("streams", True), ("whole answers", False), ("streams again", True)):
                    one = Load(asked.streams, asked.clients, asked.length, asked.new, asked.seconds, is_streamed)
                    forks = asked.device == "cpu"
                    answers, before, after = load(int(found[1]), one, lambda: cpu_by_process(process.pid), forks=forks)
                    tell(what, answers, asked.seconds)
                    cores = [f"{(cpu - before[each]) / asked.seconds:.2f}" for each, cpu in after.items()]
                    print(f"    cores in use, the engine's process first: {' '.join(cores)}", flush=True)
            finally:
                process.terminate()
                process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="gpt2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--length", type=int, default=32, help="tokens of a prompt")
    parser.add_argument(
        "--new", type=int, default=128, help="tokens of an answer, half to one and a half times as many"
    )
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--front-ends", nargs="*", default=["auto", "0"])
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 256], help="of the engine alone")
    asked = parser.parse_args()
    print(
        f"{asked.shape}, {asked.streams} streams from {asked.clients} clients, {asked.length} + {asked.new} tokens, "
        f"{os.cpu_count()} cores"
    )
    with tempfile.TemporaryDirectory() as folder:
        place = make_model(Path(folder), asked.shape, asked.device)
        context = multiprocessing.get_context("spawn")
        for rows in asked.rows:
            each = context.Process(target=alone, args=(str(place), asked.device, rows, asked.length, asked.new))
            each.start()
            each.join()
        for front_ends in asked.front_ends:
            serve(place, asked, front_ends)


if __name__ == "__main__":
    main()
