"""Generated texts as deltas: what a worker generates, turned into text up to the first stop string."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from clearhead.generation import Request, Ticket, Token
from clearhead.generation.texts import stream_of
from clearhead.serving.explanation import Plan, explain, score_prompt
from clearhead.serving.metrics import Metrics
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.worker import Worker


@dataclass(frozen=True)
class TextJob:
    """One text to generate, and what is returned with it."""

    request: Request
    stops: list[str]
    seconds: float
    echo: str | None = None  # the prompt, returned before the text
    generates: bool = True  # else only the prompt is returned
    counts_prompt: bool = True  # of several texts for one prompt, only the first counts it in the usage
    plan: Plan | None = None  # the explanation
    is_whole: bool = False  # nobody looks at the text before its end, not even for a stop string


@dataclass
class TextDelta:
    """A part of a text, with the tokens that complete it. The last delta has the reason why the text ended."""

    text: str
    tokens: list[Token] = field(default_factory=list[Token])
    reason: str | None = None
    offset: int = 0  # characters before it
    is_first: bool = False
    explained: dict[str, Any] | None = None


def join(deltas: list[TextDelta]) -> TextDelta:
    """Consecutive deltas of one text as one."""
    if len(deltas) == 1:
        return deltas[0]
    tokens, first, last = [token for delta in deltas for token in delta.tokens], deltas[0], deltas[-1]
    text = "".join(delta.text for delta in deltas)
    return TextDelta(text, tokens, last.reason, first.offset, first.is_first, last.explained)


class Usage:
    """Counts of prompt tokens and generated tokens in one answer."""

    def __init__(self) -> None:
        self.prompt = self.generated = self.cached = 0

    def to_json(self) -> dict[str, Any]:
        total = self.prompt + self.generated
        details = {"cached_tokens": self.cached}
        counts = {"prompt_tokens": self.prompt, "completion_tokens": self.generated, "total_tokens": total}
        return {**counts, "prompt_tokens_details": details}


class TextRun:
    """The state of one job while its text is generated."""

    def __init__(self, worker: Worker, job: TextJob, usage: Usage, metrics: Metrics) -> None:
        self.worker, self.job, self.usage, self.metrics = worker, job, usage, metrics
        self.began = time.perf_counter()
        self.ids: list[int] = []  # generated
        self.n_prompt, self.reason = len(job.request.prompt), "stop"
        # Not sent yet:
        self.text, self.tokens = job.echo or "", list[Token]()
        self.offset, self.is_first = 0, True

    @property
    def scores_prompt(self) -> bool:
        return self.job.echo is not None and self.job.request.scored

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """The text as it is generated, up to the first stop string."""
        job, worker = self.job, self.worker
        if self.scores_prompt:
            assert isinstance(worker, ModelWorker)  # others do not get such jobs (`needs_model`)
            work = score_prompt(worker, job.request.prompt, job.request.alternatives)
            self.tokens = await asyncio.wait_for(worker.run_sliced(work), job.seconds)
        if job.generates:
            async with contextlib.aclosing(self._generate()) as source:
                async for delta in source:
                    yield delta
        else:
            self.reason = "length"
        self.usage.generated += len(self.ids)
        self.usage.prompt += self.n_prompt if job.counts_prompt else 0
        explained = None
        if job.plan is not None:
            assert isinstance(worker, ModelWorker)
            left = job.seconds - (time.perf_counter() - self.began)
            work = explain(worker, job.plan, job.request, self.ids, job.stops)
            explained = await asyncio.wait_for(worker.run_sliced(work), left)
        yield self._take(self.reason, explained)

    async def _generate(self) -> AsyncGenerator[TextDelta, None]:
        """Deltas while there is text; what is left at the end stays for the last one."""
        worker, request, metrics = self.worker, self.job.request, self.metrics
        assert worker.tokenizer is not None
        stream = stream_of(request, worker.tokenizer, self.job.stops)
        clocks = (metrics.first_token.labels(worker.name), metrics.between_tokens.labels(worker.name))
        last = self.began
        source = worker.generate(request, self.job.seconds, is_whole=self.job.is_whole)
        try:
            async for arrived in source:
                if isinstance(arrived, Ticket):
                    self._end(arrived)
                    break
                now = time.perf_counter()
                # A stream's client sees one gap, however many tokens come after it.
                n_gaps = len(arrived) if self.ids and self.job.is_whole else 1
                clocks[bool(self.ids)].observe((now - last) / n_gaps)
                last = now
                for token in arrived:
                    self.ids.append(token.id)
                    self.tokens.append(token)
                    self.text += stream.push(token.id)
                    if stream.stop is not None:
                        break
                if self.text:
                    yield self._take()
                if stream.stop is not None:
                    break
        finally:
            await source.aclose()
            metrics.new_tokens.labels(worker.name).inc(len(self.ids))
            metrics.prompt_tokens.labels(worker.name).inc(len(request.prompt))
        self.text += "" if stream.stop is not None else stream.finish()

    def _end(self, ticket: Ticket) -> None:
        self.n_prompt, self.usage.cached = ticket.n_prompt, self.usage.cached + ticket.n_cached
        self.reason = "length" if ticket.reason == "length" else "stop"
        if self.scores_prompt:
            # Clients that score texts count the tokens after the prompt, and expect the end token among them.
            self.tokens += [ticket.token(at) for at in range(ticket.n_shown, len(ticket.written))]

    def _take(self, reason: str | None = None, explained: dict[str, Any] | None = None) -> TextDelta:
        delta = TextDelta(self.text, self.tokens, reason, self.offset, self.is_first, explained)
        self.offset, self.text, self.tokens, self.is_first = self.offset + len(self.text), "", [], False
        return delta


async def merged_deltas(
    worker: Worker, jobs: list[TextJob], usage: Usage, metrics: Metrics
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """The deltas of several texts as they come, each with the number of its job."""
    if len(jobs) == 1:
        async with contextlib.aclosing(TextRun(worker, jobs[0], usage, metrics).deltas()) as source:
            async for delta in source:
                yield 0, delta
        return
    arrivals: asyncio.Queue[tuple[int, TextDelta | BaseException | None]] = asyncio.Queue()

    async def read(number: int, job: TextJob) -> None:
        try:
            async with contextlib.aclosing(TextRun(worker, job, usage, metrics).deltas()) as source:
                async for delta in source:
                    arrivals.put_nowait((number, delta))
            arrivals.put_nowait((number, None))
        except Exception as error:
            arrivals.put_nowait((number, error))

    readers = [asyncio.create_task(read(number, job)) for number, job in enumerate(jobs)]
    left = len(readers)
    try:
        while left:
            # Deltas that came while the last one was sent are joined: a busy server sends fewer, longer ones.
            arrived = [await arrivals.get()]
            while not arrivals.empty():
                arrived.append(arrivals.get_nowait())
            for number in dict.fromkeys(number for number, _ in arrived):
                if deltas := [delta for of, delta in arrived if of == number and isinstance(delta, TextDelta)]:
                    yield number, join(deltas)
            for _, delta in arrived:
                if isinstance(delta, BaseException):
                    raise delta
                left -= delta is None
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
