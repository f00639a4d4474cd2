"""Clients of a server: processes with many requests at once for texts, each followed by the next, and what they saw."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
FIRST = 5.0  # seconds that are reported apart


class Answer(NamedTuple):
    """When it was asked, seconds to its first piece and in all, tokens (0: it was lost), and events."""

    began: float
    first: float
    took: float
    n_tokens: int
    n_events: int


@dataclass(frozen=True)
class Load:
    """What the clients ask for: prompts of `length` tokens, and answers of half to one and a half times `n_new`."""

    streams: int
    clients: int
    length: int
    n_new: int
    seconds: float
    is_streamed: bool = True


def load(port: int, asked: Load, look: Callable[[], T], *, forks: bool) -> tuple[list[Answer], T, T]:
    """The answers in the order of their requests, and what `look` saw when the first was asked and when no more were.

    The time begins when all clients run. `forks`: they need not import torch, which a process with a GPU can not hand on.
    """
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    ready, out, begin = context.Queue(), context.Queue(), context.Event()
    seed = time.time()
    clients = [
        context.Process(target=client, args=(port, asked, f"{seed} {at}", ready, begin, out))
        for at in range(asked.clients)
    ]
    for one in clients:
        one.start()
    for _ in clients:
        ready.get()
    before = look()
    begin.set()
    time.sleep(asked.seconds)
    after = look()
    answers = [answer for _ in clients for answer in out.get()]
    for one in clients:
        one.join()
    return sorted(answers), before, after


def client(port: int, asked: Load, seed: str, ready: Any, begin: Any, out: Any) -> None:
    """A process with its part of the streams."""
    rng, answers = random.Random(seed), list[Answer]()

    async def one(until: float) -> None:
        while time.time() < until:
            prompt = [rng.randrange(5, 250) for _ in range(asked.length)]
            n_new = rng.randint(asked.n_new // 2, asked.n_new * 3 // 2)
            answers.append(await ask(port, prompt, n_new, asked.is_streamed))

    async def run() -> None:
        until = time.time() + asked.seconds
        await asyncio.gather(*(one(until) for _ in range(asked.streams // asked.clients)))

    ready.put(None)
    begin.wait()
    asyncio.run(run())
    out.put(answers)


async def ask(port: int, prompt: list[int], n_new: int, is_streamed: bool) -> Answer:
    """One answer, on a connection of its own."""
    body = json.dumps(dict(prompt=prompt, max_tokens=n_new, temperature=0, stream=is_streamed)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    began = time.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    first, n_events, last = 0.0, 0, b""
    while piece := await reader.read(1 << 16):
        events = piece.count(b"data: {")
        if (events or not is_streamed) and not first:
            first = time.time() - began
        n_events, last = n_events + events, last[-200:] + piece
    writer.close()
    is_whole = b"[DONE]" in last if is_streamed else b'"finish_reason":"length"' in last
    return Answer(began, first, time.time() - began, n_new if is_whole else 0, n_events)


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def tokens_per_second(answers: list[Answer], since: float, until: float) -> float:
    """Tokens written between two times. An answer counts with the share of its time that lies there."""
    total = 0.0
    for answer in answers:
        inside = min(until, answer.began + answer.took) - max(since, answer.began)
        total += answer.n_tokens * max(0.0, inside) / max(answer.took, 1e-9)
    return total / (until - since)


def tell(what: str, answers: list[Answer], seconds: float) -> None:
    began = answers[0].began
    until = began + seconds
    lost = sum(answer.n_tokens == 0 for answer in answers)
    events = sum(answer.n_events for answer in answers) / len(answers)
    for name, since, end in ((f"first {FIRST:g} s", began, began + FIRST), ("later", began + FIRST, until)):
        firsts = [answer.first for answer in answers if since <= answer.began < end]
        if firsts:
            speed = tokens_per_second(answers, since, end)
            print(f"    {name}: {speed:,.0f} tokens/s, ", end="")
            print(f"first piece p50 {at(firsts, 0.5) * 1e3:.0f} ms, p99 {at(firsts, 0.99) * 1e3:.0f} ms")
    speed = tokens_per_second(answers, began, until)
    print(f"  {what}: {speed:,.0f} tokens/s, {len(answers)} answers, {lost} lost, {events:.0f} events each", flush=True)
