"""Front ends: processes that speak HTTP, while the models stay in the engines' process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx2 as httpx
import openai
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from clearhead.checkpoint import load
from clearhead.errors import InputError
from clearhead.generation import Request, Strategy
from clearhead.serving.front_end import FrontEnd, Setup
from clearhead.serving.front_ends import EnginesHost, Peer, bind, check_front_ends, default_front_ends
from clearhead.serving.guards import Limits
from clearhead.serving.link import Link
from clearhead.serving.metrics import Summed
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.shared_counts import Counts, SharedTable
from tests.serving.live_server import served

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="front ends share a port as only Linux can"
)
T = TypeVar("T")
OPTIONS = ("--front-ends", "2", "--streams", "3", "--max-texts", "2", "--grace", "1")


@pytest.fixture(scope="module")
def apart(places: dict[str, Path]) -> Generator[str]:
    with served(*map(str, places.values()), *OPTIONS) as (url, _):
        yield url


@pytest.fixture(scope="module")
def together(places: dict[str, Path]) -> Generator[str]:
    with served(*map(str, places.values())) as (url, _):
        yield url


def children(pid: int) -> list[int]:
    """The front ends: other children, such as those for chat templates, are theirs."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found if b"front_end" in Path(f"/proc/{one}/cmdline").read_bytes()]


def metric(url: str, name: str) -> float:
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return sum(map(float, found))


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("completions", dict(prompt="the cat", max_tokens=9, seed=3, n=3, logprobs=2)),
    (
        "completions",
        dict(prompt=["the cat", "a dog ran"], max_tokens=7, temperature=0, stop=["t"], logit_bias={"20": 3}),
    ),
    ("completions", dict(prompt="the cat", max_tokens=3, temperature=0, echo=True, logprobs=1)),
    ("completions", dict(prompt="the cat", max_tokens=3, temperature=0, explain={"lens": True})),
    ("completions", dict(prompt="the cat", max_tokens=1000)),
    ("completions", dict(prompt="the cat", max_tokens=3, temprature=1)),
    ("completions", dict(prompt="the cat", max_tokens=3, logit_bias={"99999": 1})),
    ("chat/completions", dict(messages=[dict(role="user", content="hello")], max_tokens=9, seed=1)),
    (
        "chat/completions",
        dict(messages=[dict(role="user", content="x")], max_tokens=40, response_format={"type": "json_object"}),
    ),
    ("embeddings", dict(input=["the cat", "a dog"])),
    ("translate", dict(input="the cat sat", beams=2, alignment=True)),
]


@pytest.mark.parametrize(("route", "body"), ASKED)
def test_answers_as_without(apart: str, together: str, route: str, body: dict[str, Any]) -> None:
    body = {"seed": 5, **body} if "completions" in route else body
    answers = [httpx.post(f"{url}/v1/{route}", json=body, timeout=60) for url in (apart, together)]
    assert answers[0].status_code == answers[1].status_code
    (found, numbers), (expected, expected_numbers) = map(apart_from_numbers, answers)
    assert found == expected
    # Which texts share a batch is chance; without the C++ kernels their last bits depend on it.
    assert numbers == pytest.approx(expected_numbers, rel=1e-5, abs=1e-5)


def apart_from_numbers(answer: httpx.Response) -> tuple[str, list[float]]:
    """What a body says, in its order, and its numbers with a fraction."""
    numbers: list[float] = []

    def keep(digits: str) -> str:
        numbers.append(float(digits))
        return "a number"

    said = json.loads(answer.text, parse_float=keep)
    return json.dumps({**said, "id": 0, "created": 0}), numbers


@pytest.mark.parametrize(
    "path", ["/healthz", "/readyz", "/", "/page/page.css", "/openapi.json", "/nowhere", "/v1/completions"]
)
def test_other_routes_as_without(apart: str, together: str, path: str) -> None:
    found, expected = httpx.get(apart + path), httpx.get(together + path)
    assert (found.status_code, found.text) == (expected.status_code, expected.text)
    assert found.headers["content-type"] == expected.headers["content-type"]


def test_streams(apart: str) -> None:
    with openai.OpenAI(base_url=f"{apart}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(model="gpt", prompt="the cat", max_tokens=20, seed=1)
        parts = client.completions.create(
            model="gpt", prompt="the cat", max_tokens=20, seed=1, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(parts)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_one_limit_for_all_front_ends(apart: str) -> None:
    """--streams 3: of twelve requests at once on connections of their own, some reach either process, and few are let in."""
    body = dict(model="gpt", prompt="the cat", max_tokens=400, logit_bias={"1": -100})
    with ThreadPoolExecutor(12) as pool:
        codes = [
            answer.status_code
            for answer in pool.map(lambda _: httpx.post(f"{apart}/v1/completions", json=body, timeout=60), range(12))
        ]
    assert set(codes) == {200, 429}
    # Others may be let in when the first have ended.
    assert codes.count(429) >= 5


def test_metrics_of_all_are_summed_up(apart: str) -> None:
    asked = dict(model="gpt", prompt="a", max_tokens=5, temperature=0, logit_bias={"1": -100})
    before = metric(apart, "clearhead_new_tokens_total"), metric(apart, "clearhead_wait_seconds_count")
    for _ in range(8):
        assert httpx.post(f"{apart}/v1/completions", json=asked).status_code == 200
    assert metric(apart, "clearhead_wait_seconds_count") - before[1] == 8
    assert 8 <= metric(apart, "clearhead_new_tokens_total") - before[0] <= 40


def test_who_leaves_is_cancelled(apart: str) -> None:
    body = json.dumps(dict(model="gpt", prompt="the cat", max_tokens=400, stream=True)).encode()
    port = int(apart.rsplit(":", 1)[1])
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port)) as one:
            one.sendall(head.encode() + b"\r\n\r\n" + body)
            assert b"200" in one.recv(1000)
    until = time.monotonic() + 10
    while metric(apart, "clearhead_running") + metric(apart, "clearhead_waiting") and time.monotonic() < until:
        time.sleep(0.05)
    assert metric(apart, "clearhead_running") + metric(apart, "clearhead_waiting") == 0


def test_the_end_is_told(places: dict[str, Path]) -> None:
    with served(str(places["gpt"]), *OPTIONS) as (url, process):
        body = dict(prompt="the cat", max_tokens=500, stream=True, logit_bias={"1": -100})
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            # Else clients that come during the time of grace would wait for a socket that nobody accepts from.
            assert [is_listening(pid) for pid in (process.pid, *children(process.pid))] == [False, True, True]
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert '"error"' in rest[-2] + rest[-1] or rest[-2] == "data: [DONE]"
        assert process.wait(30) == 0
        assert not children_left(process.pid)


def is_listening(pid: int) -> bool:
    """Whether a process holds a TCP socket that listens."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    return any(os.readlink(file) in listening for file in Path(f"/proc/{pid}/fd").iterdir())


def children_left(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and bool(children(pid))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["a front end", "the engines"])
def test_a_process_that_dies_ends_all(places: dict[str, Path], who: str) -> None:
    with served(str(places["gpt"]), *OPTIONS) as (url, process):
        assert httpx.get(f"{url}/healthz").status_code == 200
        fronts = children(process.pid)
        assert len(fronts) == 2
        os.kill(fronts[0] if who == "a front end" else process.pid, signal.SIGKILL)
        assert process.wait(30) == (1 if who == "a front end" else -signal.SIGKILL)
        until = time.monotonic() + 20
        while any(is_alive(pid) for pid in fronts) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(is_alive(pid) for pid in fronts)


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_refused_where_they_do_not_help(monkeypatch: pytest.MonkeyPatch, places: dict[str, Path]) -> None:
    with pytest.raises(AssertionError, match="front ends are for decoders; got --front-ends 1 with encoder"):  # noqa: SIM117
        with served(str(places["encoder"]), "--front-ends", "1"):
            pass
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InputError, match="as only Linux can; got --front-ends 2 on darwin"):
        check_front_ends(2)
    check_front_ends(0)


def test_by_default_on_a_gpu_with_cores_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, device, n in [(16, "cuda", 8), (64, "cuda:1", 8), (4, "cuda", 2), (2, "cuda", 0), (16, "cpu", 0)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: range(cores))
        assert default_front_ends(device) == n


def test_a_link_keeps_the_order_and_never_blocks() -> None:
    """Ten megabytes are sent before anything is read, which no socket's buffer holds."""
    sent = [(number, bytes([number % 256]) * 1_000_000) for number in range(10)] + [("last", b"")]

    async def run() -> tuple[list[Any], bool]:
        ours, theirs = socket.socketpair()
        received, ended = list[Any](), asyncio.Event()
        here, there = Link(ours, print, print), Link(theirs, received.append, ended.set)
        for message in sent:
            here.send(message)
        while len(received) < len(sent):
            await asyncio.sleep(0.01)
        here.close()
        await asyncio.wait_for(ended.wait(), 5)
        there.send("nobody reads this")
        return received, there.is_open

    assert asyncio.run(run()) == (sent, False)


def within_seconds(work: Coroutine[Any, Any, T]) -> T:
    async def run() -> T:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(run())


def test_an_error_concerns_one_message_only() -> None:
    async def run() -> tuple[list[int], list[str]]:
        ours, theirs = socket.socketpair()
        received, errors = list[int](), list[str]()

        def receive(number: int) -> None:
            received.append(number)
            if number == 1:
                raise ValueError("this one")

        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(str(context["exception"])))
        here, there = Link(ours, print, print), Link(theirs, receive, print)
        for number in range(4):
            here.send(number)
        while len(received) < 4:
            await asyncio.sleep(0.01)
        here.send(4)
        while len(received) < 5:
            await asyncio.sleep(0.01)
        here.close()
        there.close()
        return received, errors

    assert within_seconds(run()) == ([0, 1, 2, 3, 4], ["this one"])


def test_the_engines_forget_a_text_that_has_ended(places: dict[str, Path]) -> None:
    """Written to its end, refused by the engine, and refused before: each is told, and nothing of it stays."""

    async def run() -> dict[int, Any]:
        worker = ModelWorker("gpt", load(places["gpt"]), None, max_tokens=600)
        host, told = EnginesHost({"gpt": worker}, Limits(), 0.0), dict[int, Any]()

        def receive(message: Any) -> None:
            told.update(message[3])

        ours, theirs = socket.socketpair()
        peer, front = Peer(host, ours), Link(theirs, receive, print)
        biased = Strategy(logit_bias={99999: 1.0})
        requests = [
            Request(prompt=[5], max_new_tokens=3, eos=()),
            Request(prompt=[5], max_new_tokens=9999),
            Request(prompt=[5], strategy=biased),
            Request(prompt=[5], scored=True, max_new_tokens=2, eos=()),
        ]
        for number, request in enumerate(requests):
            front.send(("submit", number, "gpt", request))
        while len(told) < 4:
            await asyncio.sleep(0.01)
        assert not peer.channels
        worker.stop()
        worker.close()
        front.close()
        peer.link.close()
        return told

    told = within_seconds(run())
    assert (told[0], told[3]) == ((1, 0, "length"), (1, 0, "length"))
    assert [type(told[at]) for at in (1, 2)] == [InputError, InputError]


def test_nobody_waits_for_engines_that_have_gone() -> None:
    """Neither a request that was passed on before, nor one that comes until the front end has ended, too."""

    async def run() -> list[int]:
        with tempfile.TemporaryFile() as file:
            table, (ours, theirs) = SharedTable(file.fileno(), b"secret", 0, 1), socket.socketpair()
            file.truncate(table.n_bytes)
            front = FrontEnd(Setup({}, Limits(), table, ours.detach(), (), 0.0))
            front.connect()
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(front.app), base_url="http://localhost"
            ) as client:
                waiting = asyncio.create_task(client.get("/metrics"))
                while not front.passed:
                    await asyncio.sleep(0.01)
                theirs.close()
                return [(await waiting).status_code, (await client.get("/metrics")).status_code]

    assert within_seconds(run()) == [503, 503]


def test_a_port_belongs_to_one_server() -> None:
    """Two that are started at once both find it free; SO_REUSEPORT would let them share it."""
    sockets = bind("127.0.0.1", 0, 2)
    port = sockets[0][0].getsockname()[1]
    assert [one.getsockname()[1] for own in sockets for one in own] == [port, port]
    with pytest.raises(
        InputError, match=rf"port {port} of 127.0.0.1 can not be listened on \(Address already in use\)"
    ):
        bind("127.0.0.1", port, 1)
    for (one,) in sockets:
        one.close()
    for (one,) in bind("127.0.0.1", port, 2):
        one.close()


def test_an_end_before_the_start_waits_for_nobody() -> None:
    """A front end that is not ready yet, here one that never will be, is not awaited for the time of grace."""

    async def run() -> list[int | None]:
        host, pair = EnginesHost({}, Limits(), 60.0), socket.socketpair()
        with pair[1], subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGTERM)
            await host.serve([pair[0]], [process], ("127.0.0.1", 0))
            host.peers[0].link.close()
            return [process.poll()]

    assert within_seconds(run()) == [-signal.SIGKILL]


def test_counts_of_several_processes() -> None:
    with tempfile.TemporaryFile() as file:
        tables = [SharedTable(file.fileno(), b"secret", row, 2) for row in range(2)]
        file.truncate(tables[0].n_bytes)
        here, there = (Counts(table, "requests") for table in tables)
        other = Counts(tables[0], "bytes")
        here.add("a", 2)
        there.add("a", 3)
        there.add("b", 1)
        assert (here.of("a"), there.of("a"), here.of("b"), other.of("a")) == (5, 5, 1, 0)
        there.add("a", -3)
        assert here.of("a") == 2
        assert there.own == {"b": 1}


def test_sums_of_metrics() -> None:
    families: list[list[Any]] = []
    for value in (2, 5):
        registry = CollectorRegistry()
        counter = Counter("answers", "Answers", ["route"], registry=registry)
        counter.labels("/a").inc(value)
        counter.labels(f"/only{value}").inc()
        Gauge("open", "Open", registry=registry).set(value)
        families.append(list(registry.collect()))
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in Summed(families).collect()
        for sample in family.samples
    }
    assert samples["answers_total", "/a"] == 7
    assert samples["answers_total", "/only2"] == samples["answers_total", "/only5"] == 1
    assert samples[("open",)] == 7
    assert samples["answers_created", "/a"] == min(
        sample.value for own in families for family in own for sample in family.samples
        if sample.name == "answers_created" and sample.labels == {"route": "/a"}
    )  # fmt: skip
