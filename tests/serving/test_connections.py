"""Connections: clients that send nothing, half a request, too many pieces or too many connections; health checks meanwhile."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from clearhead.serving import connections, guards, log_limits, server
from clearhead.serving.app import make_app
from clearhead.serving.guards import Limits, network_of
from clearhead.serving.log_limits import RepeatLimit
from clearhead.serving.server import make_config
from tests.serving.live_server import served_here

ASK: dict[str, Any] = {
    "model": "gpt",
    "prompt": "the cat",
    "max_tokens": 2,
    "temperature": 0,
    "logit_bias": {"1": -100},
}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@contextlib.contextmanager
def opened(url: str, n: int, sent: bytes = b"") -> Generator[list[socket.socket]]:
    """n connections on which these bytes were sent."""
    place = urlsplit(url)
    with contextlib.ExitStack() as stack:
        lines: list[socket.socket] = []
        for _ in range(n):
            line = stack.enter_context(socket.create_connection((place.hostname or "", place.port or 80), timeout=30))
            line.sendall(sent)
            lines.append(line)
        yield lines


def read(line: socket.socket) -> tuple[int, str]:
    """The status and message of an error, until the server closes."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := line.recv(1 << 16):
            said += piece
    head, _, body = said.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def gauge(url: str, name: str) -> float:
    found = re.search(rf"^clearhead_{name}(?:{{.*}})? (\S+)$", httpx.get(f"{url}/metrics", timeout=30).text, re.M)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"", "the request did not arrive within 0.3 seconds"),
        (b"GET /healthz HTT", "the request did not arrive within"),
        (HEAD + b"content-length: 100\r\n\r\n{", "the body came too slowly: 0 bytes in"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", "the body came too slowly"),
    ],
)
def test_who_sends_nothing_is_dropped(places: dict[str, Path], sent: bytes, words: str) -> None:
    with served_here(places["gpt"], Limits(header_seconds=0.3, body_seconds=0.3)) as url, opened(url, 3, sent) as lines:
        for line in lines:
            status, message = read(line)
            assert status == 408
            assert words in message
        wait_for(lambda: gauge(url, "connections") == 1)  # the one that asks


def test_half_a_body_takes_no_slot(places: dict[str, Path]) -> None:
    half = HEAD + b"content-length: 100\r\n\r\n{"
    with served_here(places["gpt"], Limits(streams=2)) as url, opened(url, 9, half):
        wait_for(lambda: gauge(url, "connections") == 10)
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200


def test_health_is_answered_when_all_slots_are_taken(places: dict[str, Path]) -> None:
    content = json.dumps({**ASK, "max_tokens": 500, "n": 8}).encode()
    whole = HEAD + b"content-length: %d\r\n\r\n" % len(content) + content
    with served_here(places["gpt"], Limits(streams=2)) as url, opened(url, 2, whole):
        wait_for(lambda: httpx.get(f"{url}/metrics").status_code == 429)
        assert httpx.post(f"{url}/v1/completions", json=ASK).json()["error"]["type"] == "rate_limit_error"
        assert httpx.get(f"{url}/healthz").text == "ok\n"
        assert httpx.get(f"{url}/readyz").text == "ready\n"


def test_bodies_of_one_client_are_limited_together(places: dict[str, Path]) -> None:
    half = HEAD + b"content-length: 1000\r\n\r\n" + b" " * 900
    with served_here(places["gpt"], Limits(bodies=2000)) as url, opened(url, 2, half):
        wait_for(lambda: gauge(url, "connections") == 3)
        told = httpx.post(f"{url}/v1/completions", content=b" " * 900, headers={"content-type": "application/json"})
        assert (told.status_code, told.json()["error"]["type"]) == (429, "rate_limit_error")
        assert "2,000 bytes of requests at once" in told.text


def test_beyond_the_bound_the_longest_silent_one_makes_room(places: dict[str, Path]) -> None:
    with served_here(places["gpt"], Limits(connections=8)) as url, opened(url, 12) as lines:
        status, message = read(lines[0])
        assert status == 503
        assert "4 connections at once from one address are the limit, and this one waited longest" in message
        for _ in range(3):
            assert httpx.get(f"{url}/healthz").status_code == 200
            assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200
        assert gauge(url, "connections") <= 5


def test_if_all_are_being_answered_one_more_may_ask_for_health(places: dict[str, Path]) -> None:
    content = json.dumps({**ASK, "max_tokens": 500, "n": 8}).encode()
    whole = HEAD + b"content-length: %d\r\n\r\n" % len(content) + content
    with served_here(places["gpt"], Limits(connections=4)) as url, opened(url, 2, whole):
        wait_for(lambda: httpx.get(f"{url}/metrics").status_code == 503)
        told = httpx.post(f"{url}/v1/completions", json=ASK)
        assert told.status_code == 503
        assert "2 connections at once from one address are the limit, and all are being answered" in told.text
        assert httpx.get(f"{url}/healthz").text == "ok\n"


def test_a_body_in_too_many_pieces(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two million chunks of one byte each; the first two thousand are looked at."""
    n_events = 0
    next_event = connections.PieceCounter.next_event

    def counted(self: Any) -> Any:
        nonlocal n_events
        n_events += 1
        return next_event(self)

    monkeypatch.setattr(connections.PieceCounter, "next_event", counted)
    with served_here(places["gpt"]) as url, opened(url, 1, HEAD + b"transfer-encoding: chunked\r\n\r\n") as (line,):
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                line.sendall(b"1\r\na\r\n" * 10_000)
        with contextlib.suppress(ConnectionError, IndexError):  # an answer may be lost to what was sent after it
            assert read(line) == (400, "the body came in more than 2,000 pieces below 512 bytes; send larger ones")
        assert 2000 < n_events < 2100
        assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200


def test_an_answer_that_is_never_read_is_cut(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FLUSH_SECONDS", 0.1)
    monkeypatch.setattr(guards, "PATIENCE", 0.2)
    asked = (
        b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000
    )  # 20 MB, more than the sockets' buffers hold
    with served_here(places["gpt"], Limits(seconds=0.3)) as url:
        place, line = urlsplit(url), socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with line:
            line.connect((place.hostname, place.port))
            line.sendall(asked)
            wait_for(lambda: gauge(url, "connections") == 2)
            wait_for(lambda: gauge(url, "connections") == 1)


def test_what_is_no_http_is_said_so(places: dict[str, Path]) -> None:
    with served_here(places["gpt"]) as url, opened(url, 1, b"\x16\x03\x01\x02\x00\x01\r\n\r\n") as (line,):
        assert read(line) == (400, "the bytes received are no request in HTTP/1.1; check the client")


def test_one_client_is_an_address_or_an_ipv6_network() -> None:
    assert network_of(("10.0.0.1", 5)) == "10.0.0.1" != network_of(("10.0.0.2", 5))
    assert network_of(("2001:db8::1", 5)) == network_of(("2001:db8::ffff:1", 7)) != network_of(("2001:db8:0:1::1", 5))
    assert network_of(("::ffff:10.0.0.1", 5)) != network_of(("::ffff:10.0.0.2", 5))
    assert network_of(None) == ""


def test_a_repeated_line_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    limit, logger = RepeatLimit(), logging.getLogger("clearhead.serving")
    limit.tell()  # the time begins
    caplog.handler.addFilter(limit)
    with caplog.at_level(logging.INFO, "clearhead.serving"):
        for at in range(1000):
            logger.warning("no room for %d", at)
            logger.info("%d served", at, extra={"kind": None})
        assert sum("no room" in each.getMessage() for each in caplog.records) == log_limits.MAX_LINES
        assert sum("served" in each.getMessage() for each in caplog.records) == 1000
        limit.until = 0.0
        limit.tell()
    assert caplog.records[-1].getMessage() == "950 lines more like this: no room for %d"
    limit.tell()
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            logging.getLogger("some.library").info({"a message that is": "no text"})
        assert sum(isinstance(each.msg, dict) for each in caplog.records) == log_limits.MAX_LINES
    caplog.handler.removeFilter(limit)


def test_no_websockets_whatever_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uvicorn takes any library for them that it finds, and hands the connection over: the table would count it for ever."""
    from uvicorn.protocols.websockets import auto

    monkeypatch.setattr(auto, "AutoWebSocketsProtocol", object)
    monkeypatch.setattr(server, "log_config", lambda: None)  # the log of this process stays as it is
    config = make_config(make_app({}), 0.0)
    config.load()
    assert config.ws_protocol_class is None
