"""A model, its tokenizer, and the thread that steps its engine for many clients at once."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import torch

from clearhead.checkpoint import load
from clearhead.data import Tokenizer, load_tokenizer
from clearhead.errors import ClearheadError, InputError
from clearhead.generation import Engine, Request, Ticket, Token
from clearhead.generation.sound import find_tokenizer
from clearhead.models import Decoder, Encoder, EncoderDecoder, Model

MAX_WAITING = 1024  # requests that the engine has not let in yet


class FullError(Exception):
    """So many wait already that another would wait too long."""


class BrokenError(Exception):
    """The engine failed; what it was writing is lost."""


class Line:
    """One request's tokens on their way from the engine's thread to its reader's loop."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[Ticket] = self.loop.create_future()
        self.tokens: asyncio.Queue[Token | BaseException | None] = asyncio.Queue()  # at most max_new_tokens

    def tell(self, what: Callable[..., object], *given: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(what, *given)


class Host:
    """A model under a name. Those that write have an engine and its thread; an encoder computes in a thread of its own."""

    def __init__(
        self, name: str, model: Model, tokenizer: Tokenizer | None, *, place: Path | None = None, **engine: Any
    ):
        self.name, self.model, self.tokenizer, self.place = name, model.eval(), tokenizer, place
        self.created = int(time.time())
        self.alone = asyncio.Lock()  # an encoder computes one batch at a time
        self.engine: Engine | None = None
        self._make: Callable[[], Engine] | None = None
        if isinstance(model, Decoder | EncoderDecoder):
            writer = model
            self._make = lambda: Engine(writer, **engine)
            self.engine = self._make()
            self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            self._lines: dict[int, Line] = {}
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
        return self.engine is None or self._thread.is_alive()

    async def write(self, request: Request) -> AsyncGenerator[Token | Ticket, None]:
        """Each token as it comes, then the ticket. Closed early, or cancelled, it cancels the request."""
        line = Line(request)
        self._orders.put(lambda: self._submit(line))
        ticket = await line.accepted
        try:
            while (token := await line.tokens.get()) is not None:
                if isinstance(token, BaseException):
                    raise token
                yield token
            yield ticket
        finally:
            self._orders.put(lambda: self._forget(ticket))

    def close(self) -> None:
        """Stop the thread; what is being written is cancelled."""
        if self.engine is not None:
            self._orders.put(None)
            self._thread.join(timeout=10)

    # In the engine's thread.

    def _run(self) -> None:
        while True:
            assert self.engine is not None
            try:
                order = self._orders.get(block=not self.engine.is_busy)
            except queue.Empty:
                order = self._step
            if order is None:
                self._fail(BrokenError("the server is shutting down"))
                return
            order()

    def _step(self) -> None:
        assert self.engine is not None
        try:
            news = self.engine.step()
        except Exception as error:  # of the model or the machine: whoever was in the batch must hear of it
            self._fail(BrokenError(f"the engine failed ({type(error).__name__}); the request may be repeated"))
            assert self._make is not None
            self.engine = None
            self.engine = self._make()
            return
        for ticket, token in news:
            line = self._lines.get(id(ticket))
            if line is not None:
                line.tell(line.tokens.put_nowait, ticket.error if token is None and ticket.error else token)
                if token is None:
                    del self._lines[id(ticket)]

    def _submit(self, line: Line) -> None:
        assert self.engine is not None
        try:
            if len(self.engine.waiting) >= MAX_WAITING:
                raise FullError(f"{MAX_WAITING} requests wait already; try again later")
            ticket = self.engine.submit(line.request)
        except (ClearheadError, FullError) as error:
            line.tell(_answer, line.accepted, error)
            return
        self._lines[id(ticket)] = line
        line.tell(_answer, line.accepted, ticket)

    def _forget(self, ticket: Ticket) -> None:
        self._lines.pop(id(ticket), None)
        if self.engine is not None:
            self.engine.cancel(ticket)

    def _fail(self, error: Exception) -> None:
        for line in self._lines.values():
            line.tell(line.tokens.put_nowait, error)
        self._lines.clear()


def _answer(future: asyncio.Future[Ticket], answer: Ticket | Exception) -> None:
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
