"""A model worker: a model, its tokenizer, and the thread that steps its engine for many clients at once."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from clearhead.checkpoint import load
from clearhead.data import Tokenizer
from clearhead.engine.fair_queue import FairQueue
from clearhead.engine.warm_up import warm_up
from clearhead.explorer import tokenizer_of
from clearhead.generation import Engine, Request
from clearhead.kernels import huge_pages
from clearhead.models import Decoder, EncoderDecoder, Model
from clearhead.serving.guards import CLIENT, STOPPING
from clearhead.serving.worker import BROKEN, Arrival, BrokenError, Channel, FullError, Worker, set_result

log = logging.getLogger("clearhead.serving")

MAX_WAITING = 1024  # requests of one client that the engine has not started yet
MAX_WAITING_IN_ALL = 8 * MAX_WAITING

T = TypeVar("T")


class SlicedJob:
    """Work for the engine's thread, done up to one `yield` at a time."""

    def __init__(self, work: Generator[None, None, Any]) -> None:
        self.work, self.client, self.loop = work, CLIENT.get(), asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self.loop.create_future()

    def finish(self, result: Any) -> None:
        self.work.close()
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(set_result, self.result, result)


class ModelWorker(Worker):
    """A model in this process. One that generates has an engine and its thread; an encoder runs in a thread per request."""

    def __init__(
        self,
        name: str,
        model: Model,
        tokenizer: Tokenizer | None,
        *,
        path: Path | None = None,
        warms_up: bool = False,
        lookup: bool = False,
        draft: Decoder | None = None,
        **engine: Any,
    ):
        """`lookup`, `draft`: for every text of a decoder, as in `Request`."""
        super().__init__(name, model.eval(), tokenizer, path)
        self.lock = asyncio.Lock()  # a model without an engine computes one request at a time
        self._make: Callable[[], Engine] | None = None
        self.lookup, self.draft = lookup, draft
        if isinstance(model, Decoder | EncoderDecoder):
            writer = model
            self._make = lambda: make_engine(writer, warms_up, **engine)
            self.engine = self._make()
            self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            self._channels: dict[int, Channel] = {}
            self._queued: list[Channel] = []  # not admitted yet
            self._jobs: FairQueue[SlicedJob] = FairQueue()
            self._job: SlicedJob | None = None  # the one that is computed
            self._thread = threading.Thread(target=self._run, name=f"engine of {name}", daemon=True)
            self._thread.start()

    @property
    def is_healthy(self) -> bool:
        return self._make is None or self._thread.is_alive()

    def submit(self, channel: Channel) -> None:
        self._orders.put(lambda: self._submit(channel))

    def forget(self, channel: Channel) -> None:
        channel.has_gone = True
        self._orders.put(lambda: self._forget(channel))

    async def run_sliced(self, work: Generator[None, None, T]) -> T:
        """What `work` returns. It runs in the engine's thread, and the engine makes a step at each of its yields.

        Jobs run one after the other, so only one holds memory; clients take turns. A job whose caller has gone is dropped.
        """
        self.check_open()
        if len(self._jobs) >= MAX_WAITING:
            raise FullError(f"{MAX_WAITING} requests wait to look inside; try again later")
        job = SlicedJob(work)
        self._orders.put(lambda: self._jobs.append(job.client, job))
        return await job.result

    async def run_between_steps(self, work: Callable[[], Any]) -> Any:
        """What `work` returns. It runs in the engine's thread, so that a probe records no pass but its own."""

        def once() -> Generator[None, None, Any]:
            return work()
            yield  # makes this a generator

        return await self.run_sliced(once())

    def stop(self) -> None:
        """Refuse new requests and fail those in progress. Must be called in the loop of `generate`: None is the last order."""
        if self._make is not None and not self.is_stopping:
            self.is_stopping = True
            self._orders.put(None)

    def close(self) -> None:
        """Wait for the thread after `stop`."""
        if self._make is not None:
            self._thread.join(timeout=10)

    # In the engine's thread.

    def _run(self) -> None:
        try:
            while self.engine is not None and (order := self._next_order(self.engine)) is not None:
                self._obey(order)
        finally:  # whatever ends the thread, nobody waits for it in vain
            self.is_broken = not self.is_stopping
            self.is_stopping, self.engine = True, None
            while not self._orders.empty():
                if (order := self._orders.get()) is not None:
                    order()
            self._fail(BrokenError(BROKEN if self.is_broken else STOPPING))

    def _next_order(self, engine: Engine) -> Callable[[], None] | None:
        try:
            return self._orders.get(block=not (engine.is_busy or self._job or self._jobs))
        except queue.Empty:
            return self._step

    def _obey(self, order: Callable[[], None]) -> None:
        try:
            order()
        except (
            BaseException
        ) as error:  # in the model or the machine, or a panic of compiled code: the batch must be told
            log.exception("the engine of %s failed", self.name)
            self._fail(BrokenError(f"the engine failed ({type(error).__name__}); the request may be repeated"))
            assert self._make is not None
            self.engine = None  # frees its memory first
            try:
                self.engine = self._make()
            except BaseException:  # the thread ends
                log.exception("the engine of %s can not be made again", self.name)

    def _step(self) -> None:
        assert self.engine is not None
        if self.engine.is_busy:
            self._engine_step(self.engine)
        if self._job is None and self._jobs:
            self._job = self._jobs.pop(self._jobs.heads()[0][0])
        if self._job is not None:
            self._job_step(self._job)

    def _job_step(self, job: SlicedJob) -> None:
        try:
            if job.result.done():  # its caller has gone
                raise StopIteration
            next(job.work)
            return
        except StopIteration as end:
            result = end.value
        except BaseException as error:
            is_ours = isinstance(error, Exception)
            result = error if is_ours else BrokenError(f"the request failed ({type(error).__name__})")
        self._job = None
        job.finish(result)

    def _engine_step(self, engine: Engine) -> None:
        deliveries: dict[object, list[tuple[Channel, Arrival]]] = {}
        began, new_tokens = time.perf_counter(), engine.step()
        if len(self._queued) > engine.n_waiting:
            for channel in self._queued:
                if channel.ticket is not None and not channel.ticket.is_waiting:
                    self.on_wait(began - channel.began)
            self._queued = [each for each in self._queued if each.ticket is not None and each.ticket.is_waiting]
        for ticket, token in new_tokens:
            channel = self._channels.get(id(ticket))
            if channel is not None:
                arrived = ticket.error if token is None and ticket.error else token
                deliveries.setdefault(channel.home, []).append((channel, arrived))
                if token is None:
                    del self._channels[id(ticket)]
        for own in deliveries.values():
            own[0][0].deliver(own)

    def _submit(self, channel: Channel) -> None:
        if channel.has_gone:
            return
        try:
            if self.engine is None:
                raise BrokenError(STOPPING)
            waiting = self.engine.n_waiting_of(channel.request.client)
            if waiting >= MAX_WAITING or self.engine.n_waiting >= MAX_WAITING_IN_ALL:
                raise FullError(f"{waiting} requests of this client wait already; try again later")
            channel.ticket = self.engine.submit(self._with_drafts(channel.request))
        except Exception as error:  # concerns this request only: the engine is unchanged
            channel.refuse(error)
            return
        except BaseException as error:
            channel.refuse(BrokenError(f"the engine failed ({type(error).__name__})"))
            raise
        self._channels[id(channel.ticket)] = channel
        self._queued.append(channel)
        channel.accept(channel.ticket)

    def _with_drafts(self, request: Request) -> Request:
        """It drafts as this worker's texts do, if it does not already and can: a text may be too long for the draft model."""
        drafts_already = request.lookup or request.draft is not None
        if (
            not (self.lookup or self.draft)
            or not isinstance(self.model, Decoder)
            or request.beams > 1
            or drafts_already
        ):
            return request
        longest = 0 if self.draft is None else self.draft.config.max_len
        fits = len(request.prompt) + request.max_new_tokens <= longest
        return replace(request, lookup=self.lookup, draft=self.draft if fits else None)

    def _forget(self, channel: Channel) -> None:
        if channel.ticket is not None:
            self._channels.pop(id(channel.ticket), None)
            if self.engine is not None and not channel.ticket.is_done:
                self.engine.cancel(channel.ticket)
                if channel in self._queued:
                    self._queued.remove(channel)

    def _fail(self, error: Exception) -> None:
        for channel in self._channels.values():
            channel.fail(error)
        jobs = [job for jobs in self._jobs.clients.values() for job in jobs]
        for job in (*jobs, self._job):
            if job is not None:
                job.finish(error)
        self._channels.clear()
        self._queued.clear()
        self._jobs, self._job = FairQueue(), None


def make_engine(model: Decoder | EncoderDecoder, warms_up: bool, **options: Any) -> Engine:
    engine = Engine(model, **options)
    if warms_up and engine.device.type == "cuda" and isinstance(model, Decoder):
        warm_up(engine)
    return engine


def load_worker(
    path: Path,
    name: str,
    *,
    device: str,
    quantize: str | None = None,
    calibrate: list[list[int]] | None = None,
    **options: Any,
) -> ModelWorker:
    """A worker for the model at `path`."""
    dtype = torch.float32 if device == "cpu" else None
    model = load(path, device=device, quantize=quantize, calibrate=calibrate, dtype=dtype)
    for each in (model, options.get("draft")):
        if isinstance(each, Decoder | EncoderDecoder):
            for _ in huge_pages.move(each.parameters(), shared=False):  # now, while no other thread has the model
                pass
    return ModelWorker(name, model, tokenizer_of(path, model), path=path, **options)
