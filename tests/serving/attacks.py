"""Attacks on a server, each by clients that repeat it until their time is over. Without torch, so that a process starts fast.

.venv/bin/python -m tests.serving.attacks NAME URL KEY SECONDS prints how often each status was answered, as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import json
import socket
import sys
import threading
import time
import wave
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

BOUNDARY = "a-line-between"
GONE = 0  # counted where the server closed the connection without an answer


@dataclass(frozen=True)
class Target:
    url: str
    key: str
    until: float  # time.monotonic()
    scale: float = 1.0  # below 1: fewer and smaller

    def head(self, path: str, *more: str) -> bytes:
        lines = (f"POST {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {self.key}", *more)
        return "".join(f"{line}\r\n" for line in lines).encode()

    def connect(self) -> socket.socket:
        place = urlsplit(self.url)
        return socket.create_connection((place.hostname or "", place.port or 80), timeout=120)

    def post(self, path: str, body: bytes, kind: str = "application/json") -> int:
        place = urlsplit(self.url)
        # Long enough for half an hour of sound on a busy machine.
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=600)
        try:
            headers = {"authorization": f"Bearer {self.key}", "content-type": kind}
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except (ConnectionError, http.client.HTTPException):
            return GONE
        finally:
            connection.close()


@functools.cache
def sounds() -> list[bytes]:
    """A wav that claims 4,000,037 samples a second; one of 1; an hour of silence as flac, and half an hour, which is allowed."""
    import numpy as np
    import soundfile

    made: list[bytes] = []
    for rate, n in ((4_000_037, 50), (1, 3000)):
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(rate)
            out.writeframes(bytes(2 * n))
        made.append(file.getvalue())
    for seconds in (3600, 1790):
        file = io.BytesIO()
        soundfile.write(file, np.zeros(seconds * 16_000, np.int16), 16_000, format="FLAC")
        made.append(file.getvalue())
    return made


def send_sound(target: Target) -> list[int]:
    statuses: list[int] = []
    for sound in sounds()[: 4 if target.scale == 1 else 3]:
        # One temperature: the text of random weights is bad at any, and all would be tried.
        part = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="temperature"\r\n\r\n0.5\r\n'
        part += f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
        body = part.encode() + sound + f"\r\n--{BOUNDARY}--\r\n".encode()
        statuses.append(target.post("/v1/audio/transcriptions", body, f"multipart/form-data; boundary={BOUNDARY}"))
    return statuses


def send_wrong_items(target: Target) -> list[int]:
    n = int(2_600_000 * target.scale)  # of the first; with a scale of 0.1 it is parsed
    bodies = [
        b'{"model":"gpt","prompt":[' + b"{}," * n + b"{}]}",
        b'{"model":"gpt","messages":[{"role":"user","content":[' + b"1," * n + b"1]}]}",
    ]
    return [
        target.post(path, body) for path, body in zip(("/v1/completions", "/v1/chat/completions"), bodies, strict=True)
    ]


def send_long_prompt(target: Target) -> list[int]:
    body = json.dumps({"model": "gpt", "prompt": "a" * int(4_000_000 * target.scale)}).encode()
    return [target.post("/v1/completions", body)]


def send_schema(target: Target) -> list[int]:
    """Small, and within all bounds, but to compile it takes half a minute."""
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "multipleOf": 999_983}}}
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "gpt", "messages": messages, "max_tokens": 4, "response_format": form}
    return [target.post("/v1/chat/completions", json.dumps(body).encode())]


def send_stops(target: Target) -> list[int]:
    stops = [("a" * at + "b" * 991)[:991] for at in range(15)]
    body = {"model": "gpt", "prompt": "the cat", "max_tokens": int(480 * target.scale), "stop": stops, "stream": True}
    return [target.post("/v1/completions", json.dumps(body).encode())]


def send_measure(target: Target) -> list[int]:
    lengths = list(range(512, 500, -1)) if target.scale == 1 else [4]
    return [target.post("/explore/measure", json.dumps({"model": "gpt", "lengths": lengths}).encode())]


def send_many_texts(target: Target) -> list[int]:
    body = {"model": "gpt", "prompt": ["the cat"] * max(1, int(30 * target.scale)), "n": 16, "max_tokens": 100}
    return [target.post("/v1/completions", json.dumps(body).encode())]


def send_pieces(target: Target) -> list[int]:
    """A body in two million chunks of one byte."""
    with target.connect() as line:
        said = b""
        with contextlib.suppress(ConnectionError):
            line.sendall(target.head("/v1/completions", "transfer-encoding: chunked") + b"\r\n")
            for _ in range(200):
                line.sendall(b"1\r\na\r\n" * 10_000)
        with contextlib.suppress(ConnectionError):
            said = line.recv(1000)
        return [int(said.split()[1]) if said else GONE]


def hold_open(sent: Callable[[Target], bytes], n: int, target: Target) -> list[int]:
    """n connections on which no whole request is sent, opened again when they are closed."""
    statuses: list[int] = []
    with contextlib.ExitStack() as stack:
        lines: list[socket.socket] = []
        for _ in range(max(1, int(n * target.scale))):
            with contextlib.suppress(OSError):
                line = stack.enter_context(target.connect())
                line.sendall(sent(target))
                lines.append(line)
        deadline = min(target.until, time.monotonic() + 60)
        for line in lines:
            line.settimeout(max(0.001, deadline - time.monotonic()))
            with contextlib.suppress(TimeoutError, OSError):
                said = line.recv(1000)
                statuses.append(int(said.split()[1]) if said else GONE)
    return statuses


def half_body(target: Target) -> bytes:
    return target.head("/v1/completions", "content-type: application/json", "content-length: 100") + b"\r\n{"


@dataclass(frozen=True)
class Attack:
    words: str
    n_clients: int
    send: Callable[[Target], list[int]]
    statuses: Sequence[int]  # that may be answered


ATTACKS = {
    "none": Attack("none", 0, lambda _: [], ()),
    "schemas": Attack("C3 schemas that take half a minute, 4 clients", 4, send_schema, (400,)),
    "audio": Attack("H1 audio bombs, 4 clients", 4, send_sound, (400, 200)),
    "validation": Attack("H2 8 MB of wrong items, 4 clients", 4, send_wrong_items, (400, 413)),
    "prompts": Attack("H3 4 million `a`, 10 clients", 10, send_long_prompt, (400,)),
    "stops": Attack("H4 15 stops of 991 characters, 32 clients", 32, send_stops, (200,)),
    "measure": Attack("H5 `/explore/measure`, 4 clients", 4, send_measure, (200,)),
    "silent": Attack(
        "H6 1,100 silent connections", 1, functools.partial(hold_open, lambda _: b"", 1100), (GONE, 408, 503)
    ),
    "bodies": Attack("H6 600 half bodies", 1, functools.partial(hold_open, half_body, 600), (GONE, 408, 503)),
    "pieces": Attack("H6 2 million chunks of one byte", 1, send_pieces, (GONE, 400)),
    "texts": Attack("480 texts in a request, 2 clients", 2, send_many_texts, (200,)),
}


def run(name: str, target: Target) -> Counter[int]:
    """How often each status was answered. Each client attacks once at least, and until the time is over."""
    attack, statuses = ATTACKS[name], Counter[int]()

    def client() -> None:
        while True:
            statuses.update(attack.send(target))
            if time.monotonic() >= target.until:
                return

    clients = [threading.Thread(target=client) for _ in range(attack.n_clients)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    return statuses


def main(name: str, url: str, key: str, seconds: str) -> Any:
    time.sleep(0 if ATTACKS[name].n_clients else float(seconds))
    print(json.dumps(run(name, Target(url, key, time.monotonic() + float(seconds)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
