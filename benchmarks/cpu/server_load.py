"""Many streams at once against `clearhead serve`: what is lost, how long tokens take, whether memory grows.

    .venv/bin/python benchmarks/cpu/server_load.py                                    500 streams for 60 s, a tiny model
    .venv/bin/python benchmarks/cpu/server_load.py --streams 64 --seconds 10 --check  short; fails where a stream is lost
    .venv/bin/python benchmarks/cpu/server_load.py --minutes 5 --check                the long run: 500 streams, memory every 10 s
    .venv/bin/python benchmarks/cpu/server_load.py --compare --streams 64 --width 768 --layers 12 --vocab 50257
                                                                                 beside the engine alone, in turns

Each stream asks, reads its text to the end, and asks again; texts differ in length, so that they come and go at different times.
The client shares the machine with the server. For --compare it has a core of its own, and the server and the engine alone the
others; besides speed, what a token costs in time on the cores is told, of which the client's and others' work is no part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import clearhead as ch
from benchmarks.common.server import served
from clearhead.generation import Engine, Request

Asked = tuple[list[int], int]  # a prompt, and how many tokens to write


@dataclass
class Seen:
    """What the clients saw."""

    n_whole: int = 0
    lost: list[str] = field(default_factory=list[str])
    n_tokens: int = 0
    firsts: list[float] = field(default_factory=list[float])
    gaps: list[float] = field(default_factory=list[float])

    def add(self, other: Seen) -> None:
        self.n_whole, self.n_tokens = self.n_whole + other.n_whole, self.n_tokens + other.n_tokens
        self.lost, self.firsts, self.gaps = self.lost + other.lost, self.firsts + other.firsts, self.gaps + other.gaps


def make_model(folder: Path, width: int, layers: int, vocab: int) -> Path:
    """A decoder that never ends a text by itself, so that every answer is as long."""
    texts = ["the cat sat on the mat", "a dog ran over the hill"] * 9
    tokenizer = ch.train_tokenizer(texts=texts, kind="bpe", vocab_size=300)
    vocab = max(vocab, tokenizer.vocab_size)
    config = ch.preset(
        "gpt2", n_layers=layers, d_model=width, n_heads=max(4, width // 64), vocab_size=vocab, max_len=512
    )
    model: Any = ch.build(config)
    with torch.no_grad():  # rows that cost what they cost, and are never chosen: the tokenizer has no words for them
        model.tokens.weight[tokenizer.vocab_size :] = 0
    model.generation = ch.Generation(bos=tokenizer.bos, eos=())
    place = ch.save(model, folder / "tiny")
    tokenizer.save(place)
    return place


def memory(pid: int) -> float:
    """Of a process, in MB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1e3 if found else 0.0


@contextmanager
def watched(pid: int) -> Generator[list[float]]:
    """The server's memory every 10 seconds."""
    course, over = list[float](), threading.Event()

    def watch() -> None:
        while not over.wait(10):
            course.append(memory(pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield course
    finally:
        over.set()
        thread.join()


def cpu_seconds(pid: int) -> float:
    """Of a process, on all cores."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ask(port: int, model: str, prompt: list[int], n_tokens: int, seen: Seen) -> None:
    """One text, read to its end."""
    body = json.dumps(dict(model=model, prompt=prompt, max_tokens=n_tokens, temperature=0, stream=True)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    head += "content-type: application/json\r\n\r\n"
    last = began = time.perf_counter()
    n_events, line = 0, b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.encode() + body)
            async for line in reader:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    (seen.gaps if n_events else seen.firsts).append(now - last)
                    last, n_events = now, n_events + 1
                    if b'"error"' in line:
                        break
                if line.startswith(b"data: [DONE]"):
                    seen.n_whole += 1
                    seen.n_tokens += n_tokens
                    return
            seen.lost.append(
                f"ended after {n_events} events, {time.perf_counter() - began:.1f} s: {line[:200].decode()}"
            )
        finally:
            writer.close()
    except OSError as error:
        seen.lost.append(type(error).__name__)


async def load(port: int, n_streams: int, asked: deque[Asked], until: float, model: str = "tiny") -> Seen:
    """Streams that ask again and again, until their time or the prompts are over."""
    seen = Seen()

    async def stream() -> None:
        while asked and time.perf_counter() < until:
            await ask(port, model, *asked.popleft(), seen)

    await asyncio.gather(*(stream() for _ in range(n_streams)))
    return seen


def alone(engine: Engine, n_streams: int, asked: deque[Asked]) -> float:
    """The same requests in process; tokens a second."""
    began, total, n_open = time.perf_counter(), sum(n for _, n in asked), 0
    while asked or n_open:
        while asked and n_open < n_streams:
            prompt, n_tokens = asked.popleft()
            engine.submit(Request(prompt=prompt, max_new_tokens=n_tokens))
            n_open += 1
        n_open -= sum(token is None for _, token in engine.step())
    return total / (time.perf_counter() - began)


def make_asked(n: int, n_tokens: int) -> deque[Asked]:
    """Prompts of 8 to 16 tokens; answers of half to one and a half of `n_tokens`."""
    rng = random.Random(0)
    lengths = [rng.randint(8, 16) for _ in range(n)]
    answers = [rng.randint((n_tokens + 1) // 2, n_tokens + n_tokens // 2) for _ in range(n)]
    return deque(([rng.randrange(5, 250) for _ in range(a)], b) for a, b in zip(lengths, answers, strict=True))


def at_share(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def waited(port: int, share: float) -> float:
    """The bound under which this share of the requests waited to be let in, by the server's own histogram."""
    told = urlopen(f"http://localhost:{port}/metrics").read().decode()
    buckets = [(float(a), float(b)) for a, b in re.findall(r'wait_seconds_bucket{le="([^"]+)",\S+} (\S+)', told)]
    return next((bound for bound, count in buckets if count >= share * buckets[-1][1]), float("nan"))


def tell(seen: Seen, seconds: float) -> None:
    print(f"answers {seen.n_whole:,}; lost {len(seen.lost)} {sorted(set(seen.lost))[:3] or ''}")
    print(f"{seen.n_tokens / seconds:,.0f} tokens a second")
    print(
        f"first token p50 {at_share(seen.firsts, 0.5):.3f} s, p99 {at_share(seen.firsts, 0.99):.3f} s; "
        f"between tokens p50 {at_share(seen.gaps, 0.5) * 1e3:.1f} ms, p99 {at_share(seen.gaps, 0.99) * 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer, on average")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=0, help="rows of the head; 0: the tokenizer's")
    parser.add_argument("--minutes", type=float, help="instead of --seconds")
    parser.add_argument("--compare", action="store_true", help="with the engine alone, in turns")
    parser.add_argument("--rounds", type=int, default=3, help="of --compare")
    parser.add_argument("--check", action="store_true", help="fail where a stream is lost or memory goes on growing")
    asked = parser.parse_args()
    asked.seconds = asked.seconds if asked.minutes is None else 60 * asked.minutes
    *ours, clients = sorted(os.sched_getaffinity(0))
    if asked.compare:
        os.sched_setaffinity(0, ours or [clients])
        torch.set_num_threads(len(ours) or 1)
    with tempfile.TemporaryDirectory() as folder:
        place = make_model(Path(folder), asked.width, asked.layers, asked.vocab)
        # Few blocks: memory that is touched for the first time would look like a leak.
        with served({"tiny": place}, "--streams", "4096", "--max-tokens", "16384") as (url, pid):
            port = int(url.rsplit(":", 1)[1])
            asyncio.run(load(port, 8, make_asked(32, asked.tokens), time.perf_counter() + 60))
            if asked.compare:
                compare(asked, place, port, pid, clients)
                return
            before, began = memory(pid), time.perf_counter()
            prompts = make_asked(1_000_000 if asked.seconds > 60 else 100_000, asked.tokens)
            # Memory grows until as much was held as ever is at once; after that it must stay.
            with watched(pid) as course:
                seen = asyncio.run(load(port, asked.streams, prompts, began + 0.4 * asked.seconds))
                between = memory(pid)
                more = asyncio.run(load(port, asked.streams, prompts, began + asked.seconds))
            seen.add(more)
            print(f"{asked.streams} streams of {asked.tokens} tokens, {os.cpu_count()} cores, ", end="")
            print(f"load {os.getloadavg()[0]:.1f} (others' work included)")
            tell(seen, time.perf_counter() - began)
            after = memory(pid)
            print(f"waited to be let in: p99 below {waited(port, 0.99)} s")
            print(
                f"the server's memory: {before:.0f} MB before, {between:.0f} MB at 40% of the time, {after:.0f} MB after"
            )
            print(f"every 10 s: {' '.join(f'{each:.0f}' for each in course)}")
            if asked.check and (seen.lost or not seen.n_whole or after > between + 50):
                raise SystemExit(1)


def compare(asked: argparse.Namespace, place: Path, port: int, pid: int, clients: int) -> None:
    """Through HTTP and in process, in turns, as the machine's speed changes."""
    model: Any = ch.load(place)
    engine, n, cores = Engine(model.eval()), 3 * asked.streams, os.sched_getaffinity(0)
    n_tokens = sum(each for _, each in make_asked(n, asked.tokens))
    speeds: list[float] = []
    costs: list[float] = []
    alone(engine, asked.streams, make_asked(asked.streams, asked.tokens))
    for _ in range(asked.rounds):
        used = time.process_time()
        speed = alone(engine, asked.streams, make_asked(n, asked.tokens))
        in_process = time.process_time() - used
        os.sched_setaffinity(0, [clients])
        before, used, began = cpu_seconds(pid), time.process_time(), time.perf_counter()
        seen = asyncio.run(load(port, asked.streams, make_asked(n, asked.tokens), began + 600))
        seconds, client = time.perf_counter() - began, time.process_time() - used
        server = cpu_seconds(pid) - before
        os.sched_setaffinity(0, cores)
        tell(seen, seconds)
        speeds.append(seen.n_tokens / seconds / speed)
        costs.append(server / in_process)
        each = [f"{1e6 * cpu / n_tokens:,.0f}" for cpu in (in_process, server, client)]
        print(f"the engine alone: {speed:,.0f} tokens a second; through HTTP {speeds[-1]:.0%} of it")
        print(
            f"us of CPU a token: the engine alone {each[0]}, the server {each[1]} (x {costs[-1]:.2f}), the client {each[2]}"
        )
    middle = statistics.median
    print(f"through HTTP, median of {asked.rounds}: {middle(speeds):.0%} of the engine's speed, ", end="")
    print(f"{middle(costs):.2f} of its CPU time")


if __name__ == "__main__":
    main()
