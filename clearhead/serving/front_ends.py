"""The engines' process of a server with front ends: it starts them, runs their requests, and ends with them.

    clients ── HTTP ── front end 1 ──┐
    clients ── HTTP ── front end 2 ──┼── links (link.py) ── this process: engines, and routes that need a model
    ...                              │

Python runs one thread at a time, so an event loop beside an engine's thread takes its time. Here each step of an engine costs
one message for each front end. The front ends listen on one port, and the system spreads connections among them (SO_REUSEPORT).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import logging.config
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from clearhead.errors import ClearheadError, InputError
from clearhead.generation import Request, Token
from clearhead.serving.app import make_routes
from clearhead.serving.front_end import GONE, ModelFacts, Setup
from clearhead.serving.guards import CLIENT, Limits
from clearhead.serving.link import Link
from clearhead.serving.metrics import Metrics
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.server import BACKLOG, LATE_SECONDS, REFUSAL_SECONDS, check_engines, log_config
from clearhead.serving.service import Service
from clearhead.serving.shared_counts import SharedTable
from clearhead.serving.worker import Arrival, BrokenError, Channel, FullError, set_result

log = logging.getLogger("clearhead.serving")

CODE = "from clearhead.serving.front_end import main; main()"
MOST = 8  # front ends, if nobody says how many
KNOWN = (ClearheadError, BrokenError, FullError, ValueError)  # errors that a front end can be told as they are


def default_front_ends(device: str) -> int:
    """Half of the cores, on a GPU of a machine with cores to spare; 0: HTTP in the engines' process.

    An engine on the CPU uses all cores and is slower than the HTTP.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return min(MOST, cores // 2) if device.startswith("cuda") and cores >= 4 else 0


def check_front_ends(n: int | None) -> None:
    if n and not sys.platform.startswith("linux"):
        raise InputError(
            f"front ends share a port as only Linux can; got --front-ends {n} on {sys.platform}; leave it out"
        )


def run_front_ends(
    workers: Mapping[str, ModelWorker], limits: Limits, grace: float, n: int, *, host: str, port: int
) -> None:
    """Serve by n front ends until a signal. ClearheadError if an engine failed for good, or a front end ended by itself."""
    logging.config.dictConfig(log_config())
    if not any(worker.kind == "decoder" for worker in workers.values()):
        kinds = ", ".join(worker.kind for worker in workers.values())
        raise InputError(f"front ends are for decoders; got --front-ends {n} with {kinds}; leave it out")
    with ExitStack() as stack:
        listening = [[stack.enter_context(each) for each in own] for own in bind(host, port, n)]
        address = listening[0][0].getsockname()
        counts = stack.enter_context(tempfile.TemporaryFile())
        table = SharedTable(counts.fileno(), secrets.token_bytes(16), 0, n)
        counts.truncate(table.n_bytes)
        models = {
            name: ModelFacts(worker.model.config, worker.model.generation, worker.path)
            for name, worker in workers.items()
            if worker.kind == "decoder" and worker.path is not None
        }
        ends: list[socket.socket] = []
        processes: list[subprocess.Popen[bytes]] = []
        for row, own in enumerate(listening):
            ours, theirs = socket.socketpair()
            setup = Setup(
                models, limits, replace(table, row=row), theirs.fileno(), tuple(each.fileno() for each in own), grace
            )
            processes.append(stack.enter_context(started(setup)))
            ends.append(stack.enter_context(ours))
            for each in (theirs, *own):  # the front end's alone: when it has closed them, clients are refused at once
                each.close()
        gc.freeze()  # as in the front ends
        asyncio.run(EnginesHost(workers, limits, grace).serve(ends, processes, address))
    check_engines(workers.values())


def bind(host: str, port: int, n: int) -> list[list[socket.socket]]:
    """For each of n processes a socket for each address of the host, all at one port, which listen.

    InputError if another program has the port. By SO_REUSEPORT alone two servers of one user would share it, and each get some of
    the requests.
    """
    with ExitStack() as stack:  # closes them after an error
        try:
            places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for place in places:
                with socket.socket(*place[:3]) as probe:
                    bind_one(probe, place, port)
            sockets = [[stack.enter_context(socket.socket(*place[:3])) for place in places] for _ in range(n)]
            for own in sockets:
                for one, place in zip(own, places, strict=True):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                    bind_one(one, place, port)
                    one.listen(BACKLOG)
                    port = one.getsockname()[1]  # 0 stands for a free one, the same for all
        except OSError as error:
            raise InputError(
                f"port {port} of {host} can not be listened on ({error.strerror}); choose another with --port; 0 takes a free one"
            ) from None
        stack.pop_all()
    return sockets


def bind_one(one: socket.socket, place: Any, port: int) -> None:
    """Bind a socket to an address that `socket.getaddrinfo` found, at this port."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if one.family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    address = place[4]
    one.bind((address[0], port, *address[2:]))


@contextlib.contextmanager
def started(setup: Setup) -> Generator[subprocess.Popen[bytes]]:
    """A front end's process, ended at the end."""
    files = (setup.link, setup.counts.file, *setup.sockets)
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, pass_fds=files) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(setup))
            process.stdin.close()
            yield process
        finally:
            process.kill()


class LinkChannel(Channel):
    """Carries tokens to a front end."""

    def __init__(self, peer: Peer, number: int, request: Request) -> None:
        self.peer, self.link = peer, peer.link
        self.home = self.link
        self.number, self.request, self.began = number, request, time.perf_counter()
        self.is_plain = not (request.scored or request.alternatives)

    def accept(self, ticket: Any) -> None:
        """The first token says so."""

    def refuse(self, error: BaseException) -> None:
        self.link.send(("tokens", [], [], [(self.number, self.end(error))]))

    fail = refuse

    def deliver(self, deliveries: Sequence[tuple[LinkChannel, Arrival]]) -> None:
        plain: list[int] = []
        scored: list[tuple[Any, ...]] = []
        ends: list[tuple[int, Any]] = []
        for channel, arrived in deliveries:
            if not isinstance(arrived, Token):
                ends.append((channel.number, channel.end(arrived)))
            elif channel.is_plain:
                plain += (channel.number, arrived.id)
            else:
                scored.append((channel.number, *arrived))
        self.link.send(("tokens", plain, scored, ends))

    def end(self, error: BaseException | None) -> Any:
        """What a front end is told at the end of a text, which is forgotten here."""
        self.peer.channels.pop(self.number, None)
        if error is None:
            assert self.ticket is not None
            return self.ticket.n_prompt, self.ticket.n_cached, self.ticket.reason
        return error if isinstance(error, KNOWN) else RuntimeError(type(error).__name__)


class Peer:
    """One front end: its link, its requests, and its ASGI messages."""

    def __init__(self, host: EnginesHost, end: socket.socket) -> None:
        self.host, self.is_ready = host, False
        self.channels: dict[int, tuple[ModelWorker, LinkChannel]] = {}
        self.passed: dict[int, tuple[asyncio.Queue[Any], asyncio.Task[None]]] = {}
        self.asked: dict[int, asyncio.Future[Any]] = {}  # its metrics
        self.link = Link(end, self.receive, self.ended)

    def receive(self, message: Any) -> None:
        match message:
            case ("submit", number, name, request):
                self._submit(number, self.host.workers[name], request)
            case ("forget", number):
                self._forget(number)
            case ("pass", number, client, scope):
                queue = asyncio.Queue[Any]()
                self.passed[number] = (queue, asyncio.create_task(self._run(number, client, scope, queue)))
            case ("received", number, given):
                if number in self.passed:
                    self.passed[number][0].put_nowait(given)
            case ("metrics", number, families):
                set_result(self.asked.pop(number), families)
            case ("ready",):
                self.is_ready = True
            case _:
                raise AssertionError(f"a message of no known kind: {message[0]}")

    def ended(self) -> None:
        """The front end has gone: nobody waits for its texts."""
        for number in list(self.channels):
            self._forget(number)
        for _, task in self.passed.values():
            task.cancel()
        for future in self.asked.values():
            set_result(future, [])

    def _submit(self, number: int, worker: ModelWorker, request: Request) -> None:
        channel = LinkChannel(self, number, request)
        try:
            worker.check_open()
        except BrokenError as error:
            channel.refuse(error)
            return
        self.channels[number] = worker, channel
        if request.strategy.logit_bias:
            asyncio.get_running_loop().run_in_executor(None, self._prepare, worker, channel)
        else:
            worker.submit(channel)

    def _prepare(self, worker: ModelWorker, channel: LinkChannel) -> None:
        """Submit a request with many biases. They are prepared here: in the engine's thread they would hold up everyone."""
        try:
            if (engine := worker.engine) is not None:
                channel.request = replace(channel.request, processor=engine.processors.get(channel.request))
        except Exception as error:  # such as an id that the vocabulary does not have
            channel.refuse(error)
            return
        worker.submit(channel)

    def _forget(self, number: int) -> None:
        worker, channel = self.channels.pop(number, (None, None))
        if worker is not None and channel is not None:  # else its text has ended
            worker.forget(channel)

    async def _run(self, number: int, client: str, scope: dict[str, Any], queue: asyncio.Queue[Any]) -> None:
        """Answer a request that was passed on, by the routes of this process."""
        CLIENT.set(client)
        has_gone = False

        async def receive() -> Any:
            nonlocal has_gone
            message = GONE if has_gone else await queue.get()
            has_gone = message["type"] == GONE["type"]
            return message

        async def send(message: Any) -> None:
            self.link.send(("passed", number, getattr(scope.get("route"), "path", None), message))

        try:
            await self.host.app(scope, receive, send)
        except Exception as error:
            log.error("failed: %s", type(error).__name__, exc_info=error)
        finally:
            del self.passed[number]
            self.link.send(("passed", number, None, None))

    async def metrics(self) -> list[Any]:
        number = max(self.asked, default=0) + 1
        future = self.asked[number] = asyncio.get_running_loop().create_future()
        self.link.send(("metrics", number))
        return await future


class EnginesHost:
    """The engines' process."""

    def __init__(self, workers: Mapping[str, ModelWorker], limits: Limits, grace: float) -> None:
        self.workers, self.grace = workers, grace
        service = Service(workers, limits, Metrics(workers))
        self.app, self.peers = make_routes(service), list[Peer]()
        service.metrics.gather_others = self.gather

    @property
    def is_ready(self) -> bool:
        return all(peer.is_ready for peer in self.peers)

    async def gather(self) -> list[list[Any]]:
        """The metrics of the front ends."""
        return list(await asyncio.gather(*(peer.metrics() for peer in self.peers if peer.link.is_open)))

    async def serve(
        self, ends: Sequence[socket.socket], processes: Sequence[subprocess.Popen[bytes]], address: tuple[Any, ...]
    ) -> None:
        self.peers = [Peer(self, end) for end in ends]
        stop = asyncio.Event()
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, stop.set)
        while not (stop.is_set() or any(process.poll() is not None for process in processes) or self.is_ready):
            await asyncio.sleep(0.05)
        if self.is_ready:
            name = f"[{address[0]}]" if ":" in address[0] else address[0]
            logging.getLogger("uvicorn.error").info(
                "Uvicorn running on http://%s:%d (Press CTRL+C to quit)", name, address[1]
            )
        try:
            await self._watch(stop, processes)
        finally:
            await self._end(processes)

    async def _watch(self, stop: asyncio.Event, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Until a signal, or until an engine or a front end has failed."""
        while not stop.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.5)
            for name, worker in self.workers.items():
                if worker.is_broken:
                    for peer in self.peers:
                        peer.link.send(("broken", name))
                    return
            if not stop.is_set() and any(process.poll() is not None for process in processes):
                raise ClearheadError(
                    "a front end ended by itself; the server ends; see the log above, and start it anew"
                )

    async def _end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Let the front ends finish, then stop the engines."""
        self.app.state.is_ending = True
        for peer, process in zip(self.peers, processes, strict=True):
            peer.link.send(("end",))
            if not peer.is_ready:  # it has no clients, and would not hear of the end before it has imported torch
                process.kill()
        loop = asyncio.get_running_loop()
        for worker in self.workers.values():
            loop.call_later(self.grace, worker.stop)
        until = time.monotonic() + self.grace + LATE_SECONDS + 2 * REFUSAL_SECONDS
        while time.monotonic() < until and any(process.poll() is None for process in processes):
            await asyncio.sleep(0.05)
        for worker in self.workers.values():
            worker.stop()
        for worker in self.workers.values():
            await asyncio.to_thread(worker.close)
