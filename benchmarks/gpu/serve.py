"""Tokens a second through HTTP, and of the engine alone, for a decoder with random weights on one GPU.

    PYTHONPATH=. python3 benchmarks/gpu/serve.py --shape gpt2 --seconds 20 --front-ends auto 0

The engine alone: a batch that starts and ends together, and a batch in which each text that ends makes room for the next (as in a
server). Then, for each number of front ends, a server as a user starts it, asked by client processes on the same machine: streams,
and whole answers. The first seconds after the port opens are reported apart, and the CPU time of each process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
from clearhead.generation import Engine, Request

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(preset="gpt2", n_layers=1, d_model=32, n_heads=4, vocab_size=304),
    "gpt2": dict(preset="gpt2", n_layers=12, d_model=768, n_heads=12, vocab_size=50_257),
    "1.1B": dict(preset="llama", n_layers=22, d_model=2048, n_heads=32, n_kv_heads=4, d_ff=5632, vocab_size=32_000),
}
FIRST = 5.0  # seconds that are reported apart


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


async def ask(
    port: int, prompt: list[int], n_new: int, stream: bool, seen: list[tuple[float, float, float, int, int]]
) -> None:
    """One answer: when it was asked, seconds to the first piece, seconds in all, tokens, events."""
    body = json.dumps(dict(prompt=prompt, max_tokens=n_new, temperature=0, stream=stream)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    began = time.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    first, n_events, last = 0.0, 0, b""
    while piece := await reader.read(1 << 16):
        events = piece.count(b"data: {")
        if (events or not stream) and not first:
            first = time.time() - began
        n_events, last = n_events + events, last[-200:] + piece
    writer.close()
    is_whole = b"[DONE]" in last if stream else b'"finish_reason":"length"' in last
    seen.append((began, first, time.time() - began, n_new if is_whole else 0, n_events))


def client(port: int, n: int, length: int, n_new: int, until: float, stream: bool, seed: str, out: Any) -> None:
    async def run() -> list[tuple[float, float, float, int, int]]:
        seen: list[tuple[float, float, float, int, int]] = []
        rng = random.Random(seed)

        async def one() -> None:
            while time.time() < until:
                prompt = [rng.randrange(5, 250) for _ in range(length)]
                await ask(port, prompt, rng.randint(n_new // 2, n_new * 3 // 2), stream, seen)

        await asyncio.gather(*(one() for _ in range(n)))
        return seen

    out.put(asyncio.run(run()))


def load(
    port: int, asked: argparse.Namespace, seconds: float, stream: bool
) -> list[tuple[float, float, float, int, int]]:
    context: Any = multiprocessing.get_context("fork" if asked.device == "cpu" else "spawn")
    out = context.Queue()
    until = time.time() + seconds
    each = (asked.length, asked.new, until, stream)
    clients = [
        context.Process(target=client, args=(port, asked.streams // asked.clients, *each, f"{until} {seed}", out))
        for seed in range(asked.clients)
    ]
    for one in clients:
        one.start()
    seen = [answer for _ in clients for answer in out.get()]
    for one in clients:
        one.join()
    return sorted(seen)


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def tell(what: str, seen: list[tuple[float, float, float, int, int]]) -> None:
    if not seen:
        return
    began = seen[0][0]
    end = max(when for when, *_ in seen)
    # Answers count with the share of them that was written until the last request was asked.
    total = sum(n * min(1.0, (end - when) / max(took, 1e-9)) for when, _, took, n, _ in seen)
    lost = sum(n == 0 for *_, n, _ in seen)
    events = sum(events for *_, events in seen) / max(1, len(seen))
    for name, part in (
        (f"first {FIRST:g} s", [a for a in seen if a[0] < began + FIRST]),
        ("later", [a for a in seen if a[0] >= began + FIRST]),
    ):
        firsts = [first for _, first, *_ in part]
        print(f"    {name}: first piece p50 {at(firsts, 0.5) * 1e3:.0f} ms, p99 {at(firsts, 0.99) * 1e3:.0f} ms")
    print(
        f"  {what}: {total / (end - began):,.0f} tokens/s, {len(seen)} answers, {lost} lost, {events:.0f} events each",
        flush=True,
    )


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
                for what, stream in (("streams", True), ("whole answers", False), ("streams again", True)):
                    before, clock = cpu_by_process(process.pid), time.time()
                    tell(what, load(int(found[1]), asked, asked.seconds, stream))
                    took = time.time() - clock
                    cores = [f"{(cpu - before[each]) / took:.2f}" for each, cpu in cpu_by_process(process.pid).items()]
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
