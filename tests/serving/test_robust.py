"""Clients that disconnect, read slowly or are many; an engine that fails; a server that is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

import clearhead as ch
from benchmarks.cpu import server_load
from clearhead.generation import Request
from clearhead.serving import guards
from clearhead.serving.app import make_app
from clearhead.serving.guards import Limits
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.worker import BrokenError
from tests.serving.fuzzing import Fuzzer
from tests.serving.live_server import served, served_here

LONG: dict[str, Any] = {
    "model": "gpt",
    "prompt": "the cat",
    "max_tokens": 480,
    "temperature": 0,
    "logit_bias": {"1": -100},
}


def gauge(address: str, name: str) -> float:
    found = re.search(rf'clearhead_{name}{{model="gpt"}} (\S+)', httpx.get(f"{address}/metrics").text)
    assert found is not None
    return float(found[1])


def wait_until_idle(address: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while gauge(address, "running") or gauge(address, "kv_share") or gauge(address, "waiting"):
        assert time.monotonic() < until, "a request that nobody reads goes on"
        time.sleep(0.02)


def open_line(address: str, body: dict[str, Any], read: int = 0) -> socket.socket:
    """A request on a plain socket, so that the test decides when it is read and when it is closed."""
    place = urlsplit(address)
    line = socket.socket()
    if read:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read)
    line.settimeout(30)
    line.connect((place.hostname, place.port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
    line.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + content)
    return line


def text_of(address: str, body: dict[str, Any]) -> str:
    """A stream read to its end."""
    text = ""
    with httpx.stream("POST", f"{address}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_is_forgotten_and_others_are_untouched(address: str, stream: bool) -> None:
    shorter = {**LONG, "max_tokens": 200}
    expected = text_of(address, shorter)
    found: list[str] = []
    stays = threading.Thread(target=lambda: found.append(text_of(address, shorter)))
    before = gauge(address, "steps")
    stays.start()
    lines = [open_line(address, {**LONG, "n": 2, "stream": stream}) for _ in range(8)]
    if stream:
        assert all(line.recv(100).startswith(b"HTTP/1.1 200") for line in lines)
    while gauge(address, "running") < 2:  # at least one of the clients that will disconnect
        assert gauge(address, "steps") < before + 400
        time.sleep(0.01)
    assert gauge(address, "kv_share") > 0
    for line in lines:
        line.close()
    stays.join(timeout=60)
    wait_until_idle(address, seconds=30)
    assert found == [expected]
    assert gauge(address, "steps") < before + 470  # the texts that nobody reads would have 480 tokens


def test_going_before_being_let_in(places: dict[str, Path]) -> None:
    with served_here(places["gpt"], max_rows=1) as url:
        first = open_line(url, {**LONG, "stream": True})
        assert first.recv(100)
        waiting = [open_line(url, LONG) for _ in range(3)]
        until = time.monotonic() + 5
        while gauge(url, "waiting") < 3 and time.monotonic() < until:
            time.sleep(0.01)
        for line in waiting:
            line.close()
        while gauge(url, "waiting"):
            time.sleep(0.01)
        first.close()
        wait_until_idle(url, seconds=30)
        assert gauge(url, "steps") < 2 * 480  # one after another, these three alone would take more


def test_slow_readers_hold_nobody_up(address: str) -> None:
    body = {**LONG, "stream": True, "logprobs": 20}  # more than the socket's buffers hold
    lines = [open_line(address, body, read=4096) for _ in range(6)]
    began = time.monotonic()
    assert text_of(address, {**LONG, "max_tokens": 20})
    assert time.monotonic() - began < 20
    time.sleep(0.5)
    said = b""
    while not said.endswith(b"0\r\n\r\n"):  # a slow reader loses nothing
        piece = lines[0].recv(1 << 20)
        assert piece
        said += piece
    assert b"data: [DONE]" in said
    events = [json.loads(line[6:]) for line in said.split(b"\n") if line.startswith(b"data: {")]
    assert sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events) == 480
    for line in lines:
        line.close()
    wait_until_idle(address, seconds=5)


class Panic(BaseException):
    """As compiled libraries raise it: no `except Exception` catches it."""


@pytest.mark.parametrize("failure", [RuntimeError, Panic, SystemExit])
def test_a_failing_engine_tells_its_batch_and_serves_the_next(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    model: Any = ch.load(places["gpt"])
    worker = ModelWorker("gpt", model, ch.load_tokenizer(places["gpt"]), max_tokens=2048)
    request = Request(prompt=[5, 6, 7], max_new_tokens=40, eos=())

    async def write() -> list[int]:
        return [token.id async for come in worker.generate(request) if isinstance(come, list) for token in come]

    async def scene() -> None:
        expected = await write()
        engine = worker.engine
        assert engine is not None
        real, calls = engine.runner.decode, 0

        def fails_once(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise failure("secret of the machine")
            return real(*given)

        monkeypatch.setattr(engine.runner, "decode", fails_once)
        both = await asyncio.gather(write(), write(), return_exceptions=True)
        assert all(isinstance(error, BrokenError) for error in both), both
        assert "secret" not in str(both)
        assert worker.is_healthy
        assert await write() == expected

        def fails() -> Any:
            raise failure

        monkeypatch.setattr(worker, "_make", fails)
        monkeypatch.setattr(worker.engine, "step", fails)
        with pytest.raises(BrokenError):
            await write()
        await asyncio.to_thread(worker._thread.join, 5)  # pyright: ignore[reportPrivateUsage]
        assert not worker.is_healthy
        with pytest.raises(BrokenError):
            await write()
        worker.stop()

    asyncio.run(scene())


def test_over_http_a_failing_engine_is_a_503(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = ch.load(places["gpt"])
    worker = ModelWorker("gpt", model, ch.load_tokenizer(places["gpt"]), max_tokens=2048)

    async def scene() -> None:
        transport = httpx.ASGITransport(app=make_app({"gpt": worker}))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert worker.engine is not None
            monkeypatch.setattr(worker.engine.runner, "decode", lambda *_: 1 / 0)
            body = {**LONG, "max_tokens": 20}
            whole = await client.post("/v1/completions", json=body)
            assert whole.status_code == 503
            assert whole.headers["retry-after"] == "1"
            assert (
                whole.json()["error"]["message"] == "the engine failed (ZeroDivisionError); the request may be repeated"
            )
            assert (await client.get("/readyz")).status_code == 200
            again = await client.post("/v1/completions", json=body)
            assert again.status_code == 200
            monkeypatch.setattr(worker, "_make", lambda: 1 / 0)
            monkeypatch.setattr(worker.engine, "step", lambda: 1 / 0)
            assert (await client.post("/v1/completions", json=body)).status_code == 503
            await asyncio.to_thread(worker.close)
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/healthz")).status_code == 503
            late = await client.post("/v1/completions", json=body)
            assert late.status_code == 503
            assert "can not be made again" in late.text

    asyncio.run(scene())


def test_a_request_that_panics_alone(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is submitted, and when it looks inside: its client is told, and others go on."""
    worker = ModelWorker("gpt", ch.load(places["gpt"]), ch.load_tokenizer(places["gpt"]), max_tokens=2048)

    def panics(*_: Any) -> Any:
        raise Panic

    async def scene() -> None:
        with pytest.raises(BrokenError, match="Panic"):
            await worker.run_between_steps(panics)
        monkeypatch.setattr(worker.engine, "submit", panics)
        with pytest.raises(BrokenError, match="Panic"):
            await worker.finish(Request(prompt=[5], max_new_tokens=3), 60.0)
        ticket = await worker.finish(Request(prompt=[5], max_new_tokens=3, eos=()), 60.0)  # by a new engine
        assert len(ticket.ids) == 3
        worker.stop()

    asyncio.run(scene())


BROKEN_SERVER = """
import sys
from clearhead.cli import main
from clearhead.engine.engine import Engine

def fails(*given, **options):
    raise SystemExit("no")

def step(self):
    Engine.__init__ = fails
    fails()

Engine.step = step
main()
"""


@pytest.mark.slow
def test_a_server_without_an_engine_ends_with_status_1(places: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "broken_server.py").write_text(BROKEN_SERVER)
    command = [sys.executable, str(tmp_path / "broken_server.py")]
    with served(str(places["gpt"]), command=command) as (url, process):
        told = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)
        assert told.status_code == 503
        assert process.wait(60) == 1


def arrive(url: str) -> int:
    """The status of a request on a new connection; 0 if there is no connection."""
    try:
        return httpx.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 2}, timeout=30).status_code
    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
        return 0  # refused, or closed before it was read: accepted in the moment of the end


@pytest.mark.slow
@pytest.mark.parametrize("grace", [20.0, 0.0])
def test_told_to_end_under_load(places: dict[str, Path], grace: float) -> None:
    """Accepted requests are answered: with enough time in full, else with an error or a 503. Later ones are refused."""
    with served(str(places["gpt"]), "--grace", str(grace)) as (url, process), httpx.Client(timeout=30) as known:
        ends: list[str] = []

        def ask(stream: bool) -> None:
            answer = httpx.post(f"{url}/v1/completions", json={**LONG, "stream": stream}, timeout=60)
            last = answer.text.split("data: ")[-1].strip() if stream and answer.status_code == 200 else answer.text
            is_whole = last == "[DONE]" if stream else answer.status_code == 200
            ends.append("whole" if is_whole else f"{answer.status_code} {json.loads(last)['error']['message']}")

        clients = [threading.Thread(target=ask, args=(at % 2 == 0,)) for at in range(16)]
        for client in clients:
            client.start()
        while gauge(url, "running") + gauge(url, "waiting") < 16:
            time.sleep(0.01)
        assert known.get(f"{url}/readyz").status_code == 200  # a connection that stays open
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(httpx.RemoteProtocolError):  # half a second later, idle connections are closed
            while known.get(f"{url}/readyz").status_code == 200:
                assert time.monotonic() < began + 5
            refused = known.post(f"{url}/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert refused.json()["error"]["message"] == "the server is shutting down"
        late = [arrive(url)]
        while late[-1]:
            late.append(arrive(url))
        assert set(late) <= {503, 0}, late
        process.wait(timeout=30)
        assert time.monotonic() - began < grace + 10
        for client in clients:
            client.join(timeout=10)
        assert len(ends) == 16  # a cut connection would have failed, and be missing
        if grace:
            assert set(ends) == {"whole"}
        else:
            told = {"503 the server is shutting down", "200 the server is shutting down", "whole"}
            assert set(ends) <= told, set(ends)
            assert len(set(ends) - {"whole"}) == 2
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/healthz")


def test_time_is_limited(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "PATIENCE", 0.2)
    with served_here(places["gpt"], Limits(seconds=0.1)) as url:
        late = httpx.post(f"{url}/v1/completions", json={**LONG, "n": 8}, timeout=30)
        assert late.status_code == 504
        assert late.json()["error"]["message"] == "the request took too long; ask for less"
        place = urlsplit(url)
        with socket.create_connection((place.hostname or "", place.port or 80), timeout=20) as line:
            line.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
            assert line.recv(1000).startswith(b"HTTP/1.1 408")


def test_alignments_are_each_one_s_own(address: str) -> None:
    """A probe in one request records only its own pass, whatever else is generated."""
    texts = ["the cat", "a dog ran over the hill", "hello there, how are you?", "the mat sat on the cat"]

    def ask(text: str) -> Any:
        body = {"model": "translator", "input": text, "beams": 2, "max_tokens": 12, "alignment": True}
        (found,) = httpx.post(f"{address}/v1/translate", json=body, timeout=60).raise_for_status().json()["data"]
        alignment = found["translations"][0]["alignment"]
        return alignment["target"], [[round(weight, 4) for weight in row] for row in alignment["weights"]]

    expected = [ask(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, texts * 8))
    for at, (target, weights) in enumerate(found):
        assert target == expected[at % 4][0]
        assert weights == [pytest.approx(row, abs=2e-4) for row in expected[at % 4][1]]


def test_bodies_beyond_the_limit(address: str) -> None:
    def parts() -> Generator[bytes]:
        for _ in range(90):
            yield b" " * 100_000

    said = httpx.post(f"{address}/v1/completions", content=parts(), headers={"content-type": "application/json"})
    assert said.status_code == 413
    assert said.json()["error"]["message"] == "the body is larger than 8,000,000 bytes; send less"


def test_what_is_refused_is_refused_before_a_stream(address: str) -> None:
    for more, status in (({"max_tokens": 9999}, 400), ({"prompt": ["a"] * 100, "n": 16}, 400), ({"prompt": []}, 400)):
        said = httpx.post(f"{address}/v1/completions", json={**LONG, **more, "stream": True}, timeout=30)
        assert said.status_code == status, said.text
        assert said.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.slow
def test_fuzz(address: str) -> None:
    fuzzer = Fuzzer(address, seed=7)
    for _ in range(1000):
        fuzzer.ask()
    assert fuzzer.is_alive()
    assert {200, 400, 404, 405} <= set(fuzzer.statuses)
    wait_until_idle(address, seconds=5)


@pytest.mark.slow
def test_many_streams(address: str) -> None:
    """The short form of benchmarks/cpu/server_load.py."""
    seen = asyncio.run(server_load.load(urlsplit(address).port, 64, server_load.make_asked(128, 16), math.inf, "gpt"))
    assert (seen.n_whole, seen.lost) == (128, [])
    wait_until_idle(address, seconds=5)


def test_clients_share_the_engine(places: dict[str, Path]) -> None:
    """One asks for 160 texts; another, who asks later, is answered first."""
    keys = ("one", "two")
    with served_here(places["gpt"], Limits(keys=keys), max_rows=16) as url, ThreadPoolExecutor(1) as pool:

        def ask(key: str, **more: Any) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(f"{url}/v1/completions", json={**LONG, **more}, headers=headers, timeout=120).status_code

        many = pool.submit(ask, "one", prompt=["the cat"] * 10, n=16, max_tokens=50)
        while True:
            told = httpx.get(f"{url}/metrics", headers={"authorization": "Bearer two"}).text
            if re.search(r'clearhead_waiting{model="gpt"} [1-9]', told):
                break
            assert not many.done()
        assert ask("two", max_tokens=20) == 200
        assert not many.done()
        assert many.result() == 200
