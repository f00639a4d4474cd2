"""A front end: a process that speaks HTTP with the clients and leaves the models to the engines' process.

For texts it does all but the model's work: it parses, checks and tokenises requests, and turns ids into text and events. Requests
that need the model itself (translations, explanations, the explorer's page) it passes on as ASGI messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from clearhead.config import Config, Generation
from clearhead.explorer import tokenizer_of
from clearhead.generation import Ticket, Token
from clearhead.models import build
from clearhead.serving.app import guard
from clearhead.serving.chat_routes import chat_router
from clearhead.serving.completion_routes import completion_router
from clearhead.serving.guards import CLIENT, STOPPING, Limits
from clearhead.serving.health_routes import health_router
from clearhead.serving.http_errors import add_error_handlers
from clearhead.serving.link import Link
from clearhead.serving.metrics import Metrics
from clearhead.serving.server import Server, make_config
from clearhead.serving.service import Service
from clearhead.serving.shared_counts import SharedTable
from clearhead.serving.worker import BROKEN, BrokenError, LoopChannel, Worker, set_result

SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
GONE = {"type": "http.disconnect"}


@dataclass(frozen=True)
class ModelFacts:
    """What a front end knows of a decoder."""

    config: Config
    generation: Generation
    path: Path


@dataclass(frozen=True)
class Setup:
    """What a front end is started with."""

    models: Mapping[str, ModelFacts]
    limits: Limits
    counts: SharedTable
    link: int  # file descriptors: of the link,
    sockets: tuple[int, ...]  # and of the sockets to accept connections on
    grace: float


class RemoteWorker(Worker):
    """A decoder in the engines' process. `model` is its shape alone, without weights."""

    def __init__(self, name: str, facts: ModelFacts, front: FrontEnd) -> None:
        model = build(facts.config, device="meta")
        model.generation = facts.generation
        super().__init__(name, model, tokenizer_of(facts.path, model), facts.path)
        self.front, self.numbers = front, dict[LoopChannel, int]()

    @property
    def is_healthy(self) -> bool:
        return not self.is_broken

    def submit(self, channel: LoopChannel) -> None:
        channel.ticket = Ticket(channel.request)
        set_result(channel.accepted, channel.ticket)
        number = self.numbers[channel] = next(self.front.numbers)
        self.front.channels[number] = channel
        self.front.link.send(("submit", number, self.name, channel.request))

    def forget(self, channel: LoopChannel) -> None:
        number = self.numbers.pop(channel)
        if self.front.channels.pop(number, None) is not None:
            self.front.link.send(("forget", number))

    def stop(self) -> None:
        self.is_stopping = True
        self.fail(BrokenError(STOPPING))

    def fail(self, error: BrokenError) -> None:
        """Fail the requests in progress."""
        for channel in self.numbers:
            channel.fail(error)

    async def forward(self, request: Request) -> Response:
        return Forwarded(self.front, await request.body())


class FrontEnd:
    """The front end's end of the link, what it awaits from the engines, and its application."""

    link: Link

    def __init__(self, setup: Setup) -> None:
        self.setup, self.numbers = setup, itertools.count()
        self.channels: dict[int, LoopChannel] = {}
        self.passed: dict[int, asyncio.Queue[Any]] = {}
        self.workers = {name: RemoteWorker(name, facts, self) for name, facts in setup.models.items()}
        self.server: Server | None = None
        self.service = Service(self.workers, setup.limits, Metrics(self.workers))
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        guard(self.app, self.service, setup.counts)
        add_error_handlers(self.app)
        for router in (health_router, completion_router, chat_router):
            self.app.include_router(router(self.service))
        self.app.mount("/", self.pass_on)

    def connect(self) -> None:
        """In the event loop."""
        self.link = Link(socket.socket(fileno=self.setup.link), self.receive, self.orphaned)

    def receive(self, message: Any) -> None:
        match message:
            case ("tokens", plain, scored, ends):
                self._receive_tokens(plain, scored, ends)
            case ("passed", number, route, sent):
                if number in self.passed:
                    self.passed[number].put_nowait((route, sent))
            case ("metrics", number):
                self.link.send(("metrics", number, list(self.service.metrics.registry.collect())))
            case ("broken", name):
                self.break_workers(name)
            case ("end",):
                assert self.server is not None
                self.server.handle_exit(signal.SIGTERM, None)
            case _:
                raise AssertionError(f"a message of no known kind: {message[0]}")

    def _receive_tokens(self, plain: list[int], scored: list[tuple[Any, ...]], ends: list[tuple[int, Any]]) -> None:
        channels, numbers = self.channels, iter(plain)
        for number, id in zip(numbers, numbers, strict=True):
            if (channel := channels.get(number)) is not None:
                channel.put(Token(id))
        for number, *parts in scored:
            if (channel := channels.get(number)) is not None:
                channel.put(Token(*parts))
        for number, end in ends:
            if (channel := channels.pop(number, None)) is not None:
                if isinstance(end, BaseException):
                    channel.put(end)
                else:
                    assert channel.ticket is not None
                    channel.ticket.n_prompt, channel.ticket.n_cached, channel.ticket.reason = end
                    channel.put(None)

    def break_workers(self, name: str | None = None) -> None:
        """The engine of this model, or of all, is gone for good: the server ends, and says so until then."""
        for worker in self.workers.values():
            if name in (None, worker.name):
                worker.is_broken = True
                worker.fail(BrokenError(BROKEN))

    def orphaned(self) -> None:
        """The engines' process has gone."""
        self.break_workers()
        for queue in self.passed.values():
            queue.put_nowait(BrokenError(BROKEN))

    async def pass_on(self, scope: Scope, receive: Receive, send: Send, body: bytes | None = None) -> None:
        """Let the engines' process answer a request. `body`: what was received of it already, which is all."""
        if not self.link.is_open:
            raise BrokenError(BROKEN)
        number, arrived = next(self.numbers), asyncio.Queue[Any]()
        self.passed[number] = arrived
        self.link.send(("pass", number, CLIENT.get(), {name: scope[name] for name in SCOPE if name in scope}))
        if body is not None:
            self.link.send(("received", number, {"type": "http.request", "body": body}))

        async def pass_body() -> None:
            message: Any = None
            try:
                while message is None or message["type"] != GONE["type"]:
                    message = await receive()
                    self.link.send(("received", number, message))
            except Exception as error:  # a limit that the body exceeds
                arrived.put_nowait(error)

        passing = asyncio.create_task(pass_body())
        try:
            while True:
                item = await arrived.get()
                if isinstance(item, BaseException):
                    raise item
                route, message = item
                if route is not None:
                    scope["route"] = SimpleNamespace(path=route)  # for the log and the metrics
                if message is None:
                    return
                await send(message)
        finally:
            passing.cancel()
            del self.passed[number]
            self.link.send(("received", number, GONE))


class Forwarded(Response):
    """The answer of the engines' process to a request whose body was read here."""

    def __init__(self, front: FrontEnd, body: bytes) -> None:
        super().__init__()
        self.front, self.request_body = front, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front.pass_on(scope, receive, send, self.request_body)


class FrontServer(Server):
    """The server of a front end: it connects to the engines before it accepts."""

    def __init__(self, front: FrontEnd) -> None:
        setup = front.setup
        config = make_config(front.app, setup.grace)
        super().__init__(front.app, config, front.workers.values(), setup.grace, lambda _: front.link.send(("ready",)))
        self.front = front
        front.server = self
        logging.getLogger("uvicorn.error").setLevel(
            "WARNING"
        )  # that the server runs is said once, by the engines' process

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.front.connect()
        await super().startup(sockets)


def main() -> None:
    """Read the setup from standard input and serve until the engines' process says so, or has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the server has its own handler
    torch.set_num_threads(1)
    setup: Setup = pickle.load(sys.stdin.buffer)
    server = FrontServer(FrontEnd(setup))
    gc.freeze()  # what was imported stays: to look through it again takes the loop a tenth of a second each time
    with contextlib.suppress(KeyboardInterrupt):  # the server raises the signal that ended it once more
        server.run(sockets=[socket.socket(fileno=each) for each in setup.sockets])
    os._exit(int(any(worker.is_broken for worker in server.workers)))
