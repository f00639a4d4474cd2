"""A model, its tokenizer, and the thread that steps its engine for many clients at once."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import torch

from clearhead.checkpoint import load
from clearhead.data import Tokenizer, load_tokenizer
from clearhead.errors import InputError
from clearhead.generation import Engine, Request, Ticket, Token
from clearhead.generation.sound import find_tokenizer
from clearhead.models import Decoder, Encoder, EncoderDecoder, Model

log = logging.getLogger("clearhead.serving")

MAX_WAITING = 1024  # requests that the engine has not let in yet


STOPPING = "the server is shutting down"


class FullError(Exception):
    """So many wait already that another would wait too long."""


class BrokenError(Exception):
    """The engine failed or is stopping; what it was writing is lost."""


class Line:
    """One request's tokens on their way from the engine's thread to its reader's loop."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.began = time.perf_counter()
        self.ticket: Ticket | None = None  # known to the engine's thread first
        self.loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[Ticket] = self.loop.create_future()
        self.tokens: asyncio.Queue[Token | BaseException | None] = asyncio.Queue()  # at most max_new_tokens

    def tell(self, what: Callable[..., object], *given: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(what, *given)


Delivery = tuple[Line, Token | BaseException | None]


class Host:
    """A model under a name. Those that write have an engine and its thread; an encoder computes in a thread of its own."""

    def __init__(
        self, name: str, model: Model, tokenizer: Tokenizer | None, *, place: Path | None = None, **engine: Any
    ):
        self.name, self.model, self.tokenizer, self.place = name, model.eval(), tokenizer, place
        self.created = int(time.time())
        self.alone = asyncio.Lock()  # an encoder computes one batch at a time
        self.engine: Engine | None = None
        self.is_stopping = False
        self.tell_wait: Callable[[float], object] = lambda seconds: None  # how long a request waited to be let in
        self._make: Callable[[], Engine] | None = None
        if isinstance(model, Decoder | EncoderDecoder):
            writer = model
            self._make = lambda: Engine(writer, **engine)
            self.engine = self._make()
            self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            self._lines: dict[int, Line] = {}
            self._queued: deque[Line] = deque()  # as the engine's `waiting`
            self._thread = threading.Thread(target=self._run, name=f"engine of {name}", daemon=True)
            self._thread.start()

    @property
    def kind(self) -> str:
        """What it is for: "decoder", "translator", "scribe" or "encoder"."""
        if isinstance(self.model, EncoderDecoder):
            return "scribe" if self.model.config.inputs == "frames" else "translator"
        return "encoder" if isinstance(self.model, Encoder) else "decoder"

    @property
    def is_healthy(self) -> bool:
        return self._make is None or self._thread.is_alive()

    async def write(self, request: Request) -> AsyncGenerator[Token | Ticket, None]:
        """Each token as it comes, then the ticket. Closed early, or cancelled, it cancels the request."""
        if self.is_stopping or not self.is_healthy:
            raise BrokenError(STOPPING)
        line = Line(request)
        self._orders.put(lambda: self._submit(line))
        try:
            ticket = await line.accepted
            while (token := await line.tokens.get()) is not None:
                if isinstance(token, BaseException):
                    raise token
                yield token
            yield ticket
        finally:
            self._orders.put(lambda: self._forget(line))

    async def between_steps(self, work: Callable[[], Any]) -> Any:
        """What `work` gives, in the engine's thread: a probe there sees its own pass alone, and not another's."""
        if self.is_stopping or not self.is_healthy:
            raise BrokenError(STOPPING)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def order() -> None:
            found: Any
            try:
                found = work()
            except Exception as error:
                found = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(_answer, answer, found)

        self._orders.put(order)
        return await answer

    def stop(self) -> None:
        """Refuse what comes, and tell whoever still waits. Called where `write` is, so that no order comes after the last."""
        if self._make is not None and not self.is_stopping:
            self.is_stopping = True
            self._orders.put(None)

    def close(self) -> None:
        """Wait for the thread after `stop`."""
        if self._make is not None:
            self._thread.join(timeout=10)

    # In the engine's thread.

    def _run(self) -> None:
        while self.engine is not None:
            try:
                order = self._orders.get(block=not self.engine.is_busy)
            except queue.Empty:
                order = self._step
            if order is None:
                self._fail(BrokenError(STOPPING))
                return
            try:
                order()
            except Exception as error:  # of the model or the machine: whoever was in the batch must hear of it
                log.exception("the engine of %s failed", self.name)
                self._fail(BrokenError(f"the engine failed ({type(error).__name__}); the request may be repeated"))
                self._renew()

    def _renew(self) -> None:
        """An engine in place of one that failed. Without one the thread ends, and the server says that it is not ready."""
        assert self._make is not None
        self.engine = None  # its memory first
        try:
            self.engine = self._make()
        except Exception:
            log.exception("the engine of %s can not be made again", self.name)
            self.is_stopping = True
            while not self._orders.empty():
                if (order := self._orders.get()) is not None:
                    order()

    def _step(self) -> None:
        assert self.engine is not None
        news: list[Delivery] = []
        began, told = time.perf_counter(), self.engine.step()
        while len(self._queued) > len(self.engine.waiting):
            self.tell_wait(began - self._queued.popleft().began)
        for ticket, token in told:
            line = self._lines.get(id(ticket))
            if line is not None:
                news.append((line, ticket.error if token is None and ticket.error else token))
                if token is None:
                    del self._lines[id(ticket)]
        if news:  # all of a step at once: waking the loop costs more than what it is told
            news[0][0].tell(_deliver, news)

    def _submit(self, line: Line) -> None:
        try:
            if self.engine is None:
                raise BrokenError(STOPPING)
            if len(self.engine.waiting) >= MAX_WAITING:
                raise FullError(f"{MAX_WAITING} requests wait already; try again later")
            line.ticket = self.engine.submit(line.request)
        except Exception as error:  # this request's alone: nothing was changed yet
            line.tell(_answer, line.accepted, error)
            return
        self._lines[id(line.ticket)] = line
        self._queued.append(line)
        line.tell(_answer, line.accepted, line.ticket)

    def _forget(self, line: Line) -> None:
        if line.ticket is not None:
            self._lines.pop(id(line.ticket), None)
            if self.engine is not None and not line.ticket.is_done:
                self.engine.cancel(line.ticket)
                if line in self._queued:
                    self._queued.remove(line)
                    self.engine.waiting = deque(each for each in self.engine.waiting if each[0] is not line.ticket)

    def _fail(self, error: Exception) -> None:
        for line in self._lines.values():
            line.tell(line.tokens.put_nowait, error)
        self._lines.clear()
        self._queued.clear()


def _deliver(news: list[Delivery]) -> None:
    for line, token in news:
        line.tokens.put_nowait(token)


def _answer(future: asyncio.Future[Any], answer: Any) -> None:
    if not future.done():  # its reader may have gone
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def open_host(place: Path, name: str, *, device: str, quantize: str | None = None, **engine: Any) -> Host:
    """The model at `place`, ready to serve."""
    model = load(place, device=device, quantize=quantize, dtype=torch.float32 if device == "cpu" else None)
    if model.config.inputs == "patches":
        raise InputError(f"{place} is a model of pictures; got inputs='patches'; serve a model of texts or of sound")
    folder = place if place.is_dir() or place.suffix == ".gguf" else place.parent
    if model.config.inputs == "frames":
        return Host(name, model, find_tokenizer(place, model.config.vocab_size), place=place, **engine)
    return Host(name, model, load_tokenizer(folder), place=place, **engine)
