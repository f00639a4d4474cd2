"""A model, its tokenizer, and the thread that steps its engine for many clients at once."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import torch

from clearhead.checkpoint import load
from clearhead.data import Tokenizer
from clearhead.explorer import tokenizer_of
from clearhead.generation import Engine, Request, Ticket, Token
from clearhead.models import Decoder, Encoder, EncoderDecoder, Model
from clearhead.serving.guards import STOPPING

log = logging.getLogger("clearhead.serving")

MAX_WAITING = 1024  # requests that the engine has not let in yet

T = TypeVar("T")


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
        self.come: list[Token | BaseException | None] = []  # at most max_new_tokens; None: it is over
        self.wait: asyncio.Future[None] | None = None

    def put(self, token: Token | BaseException | None) -> None:
        self.come.append(token)
        if self.wait is not None and not self.wait.done():
            self.wait.set_result(None)

    def expire(self) -> None:
        _answer(self.accepted, asyncio.TimeoutError())
        self.put(asyncio.TimeoutError())

    async def take(self) -> list[Token | BaseException | None]:
        """All that has come, at least one: a reader who is behind catches up at once."""
        if not self.come:
            self.wait = self.loop.create_future()
            await self.wait
        come, self.come = self.come, []
        return come

    def tell(self, what: Callable[..., object], *given: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(what, *given)


Delivery = tuple[Line, Token | BaseException | None]


class Turn:
    """Work that is done in the engine's thread a piece at a time."""

    def __init__(self, work: Generator[None, None, Any]) -> None:
        self.work, self.loop = work, asyncio.get_running_loop()
        self.answer: asyncio.Future[Any] = self.loop.create_future()

    def tell(self, answer: Any) -> None:
        self.work.close()
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_answer, self.answer, answer)


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
            self._turns: deque[Turn] = deque()
            self._thread = threading.Thread(target=self._run, name=f"engine of {name}", daemon=True)
            self._thread.start()

    @property
    def kind(self) -> str:
        """What it is for: "decoder", "translator", "scribe", "encoder", or "pictures", which are only explored."""
        if isinstance(self.model, EncoderDecoder):
            return "scribe" if self.model.config.inputs == "frames" else "translator"
        if not isinstance(self.model, Encoder):
            return "decoder"
        return "pictures" if self.model.config.inputs == "patches" else "encoder"

    @property
    def is_healthy(self) -> bool:
        return self._make is None or self._thread.is_alive()

    async def write(self, request: Request, seconds: float = 1e6) -> AsyncGenerator[list[Token] | Ticket, None]:
        """Tokens as they come, then the ticket. Closed early, cancelled or late, it cancels the request."""
        self._check_open()
        line = Line(request)
        clock = line.loop.call_later(seconds, line.expire)
        self._orders.put(lambda: self._submit(line))
        try:
            ticket = await line.accepted
            is_over = False
            while not is_over:
                come = await line.take()
                if tokens := [token for token in come if isinstance(token, Token)]:
                    yield tokens
                if isinstance(come[-1], BaseException):
                    raise come[-1]
                is_over = come[-1] is None
            yield ticket
        finally:
            clock.cancel()
            self._orders.put(lambda: self._forget(line))

    def _check_open(self) -> None:
        if self.is_stopping or not self.is_healthy:
            raise BrokenError(STOPPING)

    async def in_turns(self, work: Generator[None, None, T]) -> T:
        """What `work` returns, run in the engine's thread up to each of its yields, with a step for everybody else between.

        One such work after the other: what it holds in memory is there once. Where nobody waits any more it is dropped.
        """
        self._check_open()
        if len(self._turns) >= MAX_WAITING:
            raise FullError(f"{MAX_WAITING} requests wait to look inside; try again later")
        turn = Turn(work)
        self._orders.put(lambda: self._turns.append(turn))
        return await turn.answer

    async def between_steps(self, work: Callable[[], Any]) -> Any:
        """What `work` gives, in the engine's thread: a probe there sees its own pass alone, and not another's."""

        def once() -> Generator[None, None, Any]:
            return work()
            yield  # a generator of one turn

        return await self.in_turns(once())

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
                order = self._orders.get(block=not (self.engine.is_busy or self._turns))
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
            self._fail(BrokenError(STOPPING))

    def _step(self) -> None:
        assert self.engine is not None
        if self.engine.is_busy:
            self._write(self.engine)
        if self._turns:
            self._take_turn(self._turns[0])

    def _take_turn(self, turn: Turn) -> None:
        try:
            if turn.answer.done():  # nobody waits for it any more
                raise StopIteration
            next(turn.work)
        except StopIteration as end:
            self._turns.popleft().tell(end.value)
        except Exception as error:
            self._turns.popleft().tell(error)

    def _write(self, engine: Engine) -> None:
        news: list[Delivery] = []
        began, told = time.perf_counter(), engine.step()
        while len(self._queued) > len(engine.waiting):
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
            line.tell(line.put, error)
        for turn in self._turns:
            turn.tell(error)
        for held in (self._lines, self._queued, self._turns):
            held.clear()


def _deliver(news: list[Delivery]) -> None:
    for line, token in news:
        line.put(token)


def _answer(future: asyncio.Future[Any], answer: Any) -> None:
    if not future.done():  # its reader may have gone
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def open_host(place: Path, name: str, *, device: str, quantize: str | None = None, **engine: Any) -> Host:
    """The model at `place`, ready to serve."""
    model = load(place, device=device, quantize=quantize, dtype=torch.float32 if device == "cpu" else None)
    return Host(name, model, tokenizer_of(place, model), place=place, **engine)
