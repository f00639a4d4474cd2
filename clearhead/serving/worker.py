"""A worker as the routes see it: a model's facts, its tokenizer, and the tokens of each request as they are generated."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.data import Tokenizer
from clearhead.generation import Engine, Request, Ticket, Token
from clearhead.models import Encoder, EncoderDecoder, Model
from clearhead.serving.guards import CLIENT, STOPPING

BROKEN = "the engine failed and can not be made again; the server ends"

Arrival = Token | BaseException | None  # None marks the end of a text


class FullError(Exception):
    """The queue is full."""


class BrokenError(Exception):
    """The engine failed or is stopping; the texts in progress are lost."""


class Channel(ABC):
    """Carries one request's tokens from the engine's thread to their reader."""

    request: Request
    began: float
    ticket: Ticket | None = None  # set by the engine's thread
    has_gone = False  # whether its reader has
    home: object  # what reads: the deliveries of one step to one reader are sent together

    @abstractmethod
    def accept(self, ticket: Ticket) -> None: ...

    @abstractmethod
    def refuse(self, error: BaseException) -> None: ...

    @abstractmethod
    def fail(self, error: BaseException) -> None: ...

    @abstractmethod
    def deliver(self, deliveries: Sequence[tuple[Any, Arrival]]) -> None:
        """Send what one step generated for these channels, which all have this one's home."""


class LoopChannel(Channel):
    """To an event loop of the same process."""

    def __init__(self, request: Request, *, is_whole: bool = False) -> None:
        """`is_whole`: nobody looks at the text before its end, so its reader is woken for the first token and at the end only."""
        self.request, self.is_whole, self.has_begun = replace(request, client=CLIENT.get()), is_whole, False
        self.began = time.perf_counter()
        self.home = self.loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[Ticket] = self.loop.create_future()
        self.arrived: list[Arrival] = []  # at most max_new_tokens
        self.wait: asyncio.Future[None] | None = None

    # In the reader's loop.

    def put(self, token: Arrival) -> None:
        self.arrived.append(token)
        can_wait = self.is_whole and self.has_begun and isinstance(token, Token)
        self.has_begun = True
        if not can_wait and self.wait is not None and not self.wait.done():
            self.wait.set_result(None)

    def expire(self) -> None:
        set_result(self.accepted, asyncio.TimeoutError())
        self.put(asyncio.TimeoutError())

    async def take(self) -> list[Arrival]:
        """Everything that has arrived, at least one item, so that a slow reader catches up at once."""
        if not self.arrived:
            self.wait = self.loop.create_future()
            await self.wait
        arrived, self.arrived = self.arrived, []
        return arrived

    # In the engine's thread.

    def accept(self, ticket: Ticket) -> None:
        self._call(set_result, self.accepted, ticket)

    def refuse(self, error: BaseException) -> None:
        self._call(set_result, self.accepted, error)

    def fail(self, error: BaseException) -> None:
        self._call(self.put, error)

    def deliver(self, deliveries: Sequence[tuple[LoopChannel, Arrival]]) -> None:
        self._call(_put_all, deliveries)  # one call: waking the loop costs more than the deliveries

    def _call(self, function: Callable[..., object], *args: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *args)


class Worker(ABC):
    """A model under a name, in this process (`ModelWorker`) or in the engines' (`RemoteWorker`)."""

    engine: Engine | None = None

    def __init__(self, name: str, model: Model, tokenizer: Tokenizer | None, path: Path | None = None) -> None:
        self.name, self.model, self.tokenizer, self.path = name, model, tokenizer, path
        self.created = int(time.time())
        self.is_stopping = False
        self.is_broken = False  # the engine failed, and none can be made again
        self.on_wait: Callable[[float], object] = lambda seconds: None  # called with the seconds a request was queued

    @property
    def kind(self) -> str:
        """What the model does: "decoder", "translator", "scribe", "encoder", or "pictures" (for the explorer only)."""
        if isinstance(self.model, EncoderDecoder):
            return "scribe" if self.model.config.inputs == "frames" else "translator"
        if not isinstance(self.model, Encoder):
            return "decoder"
        return "pictures" if self.model.config.inputs == "patches" else "encoder"

    @property
    @abstractmethod
    def is_healthy(self) -> bool: ...

    @abstractmethod
    def stop(self) -> None:
        """Refuse new requests and fail those in progress."""

    @abstractmethod
    def submit(self, channel: Any) -> None: ...

    @abstractmethod
    def forget(self, channel: Any) -> None:
        """The reader has gone: cancel its request if it is not done."""

    async def forward(self, request: Any) -> Any:
        """The answer to an HTTP request that needs the model itself; None: the model is in this process."""
        return None

    async def generate(
        self, request: Request, seconds: float = 1e6, *, is_whole: bool = False
    ) -> AsyncGenerator[list[Token] | Ticket, None]:
        """Tokens as they are generated (`is_whole`: the first, and all others at the end), then the ticket.

        If closed early, cancelled or late, the request is cancelled.
        """
        self.check_open()
        channel = LoopChannel(request, is_whole=is_whole)
        timer = channel.loop.call_later(seconds, channel.expire)
        self.submit(channel)
        try:
            ticket = await channel.accepted
            is_over = False
            while not is_over:
                arrived = await channel.take()
                if tokens := [token for token in arrived if isinstance(token, Token)]:
                    yield tokens
                if isinstance(arrived[-1], BaseException):
                    raise arrived[-1]
                is_over = arrived[-1] is None
            yield ticket
        finally:
            timer.cancel()
            self.forget(channel)

    async def finish(self, request: Request, seconds: float) -> Ticket:
        """The ticket of a request when it is done."""
        async with contextlib.aclosing(self.generate(request, seconds, is_whole=True)) as source:
            async for arrived in source:
                if isinstance(arrived, Ticket):
                    return arrived
        raise BrokenError("the engine ended without an answer")

    def check_open(self) -> None:
        if self.is_stopping or not self.is_healthy:
            raise BrokenError(BROKEN if self.is_broken else STOPPING)


def _put_all(deliveries: Sequence[tuple[LoopChannel, Arrival]]) -> None:
    for channel, token in deliveries:
        channel.put(token)


def set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():  # its reader may have gone
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
