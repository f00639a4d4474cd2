"""Texts on their way out, in OpenAI's form: whole, or piece by piece as server-sent events."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from clearhead.generation import Request, Ticket, Token
from clearhead.generation.texts import StoppingStream, piece_name, stream_of
from clearhead.serving.explanation import Plan, explain, score_prompt
from clearhead.serving.metrics import Metrics
from clearhead.serving.model_worker import Host

T = TypeVar("T")


@dataclass(frozen=True)
class Wish:
    """One text that is asked for, and what is told besides it."""

    request: Request
    stops: list[str]
    seconds: float
    echo: str | None = None  # the prompt, told before the text
    writes: bool = True  # or the prompt alone is told
    counts: bool = True  # of the texts after one prompt, whether it is the one that counts it
    plan: Plan | None = None  # what is explained


@dataclass
class Piece:
    """Some of a text, with the tokens that made it certain; the last piece says why the text is over."""

    text: str
    tokens: list[Token] = field(default_factory=list[Token])
    reason: str | None = None
    offset: int = 0  # characters before it
    is_first: bool = False
    explained: dict[str, Any] | None = None


def join(parts: list[Piece]) -> Piece:
    """Pieces that follow each other, as one."""
    if len(parts) == 1:
        return parts[0]
    tokens, first, last = [token for part in parts for token in part.tokens], parts[0], parts[-1]
    text = "".join(part.text for part in parts)
    return Piece(text, tokens, last.reason, first.offset, first.is_first, last.explained)


class Usage:
    """Tokens read and written for one answer."""

    def __init__(self) -> None:
        self.prompt = self.written = self.cached = 0

    def told(self) -> dict[str, Any]:
        total = self.prompt + self.written
        details = {"cached_tokens": self.cached}
        counts = {"prompt_tokens": self.prompt, "completion_tokens": self.written, "total_tokens": total}
        return {**counts, "prompt_tokens_details": details}


async def pieces(host: Host, wish: Wish, usage: Usage, metrics: Metrics) -> AsyncGenerator[Piece, None]:
    """One text as it comes, up to the first stop."""
    assert host.tokenizer is not None
    request, ids = wish.request, list[int]()
    began = time.perf_counter()
    offset, text, held, is_first = 0, wish.echo or "", list[Token](), True
    if wish.echo is not None and request.scored:
        work = score_prompt(host, request.prompt, request.alternatives)
        held = await asyncio.wait_for(host.in_turns(work), wish.seconds)
    n_prompt, reason = len(request.prompt), "stop"
    if wish.writes:
        stream: StoppingStream = stream_of(request, host.tokenizer, wish.stops)
        clocks = (metrics.first_token.labels(host.name), metrics.between_tokens.labels(host.name))
        last = began
        source = host.write(request, wish.seconds)
        try:
            async for come in source:
                if isinstance(come, Ticket):
                    n_prompt, usage.cached = come.n_prompt, usage.cached + come.n_cached
                    reason = "length" if come.reason == "length" else "stop"
                    if wish.echo is not None and request.scored:
                        # Who scores texts takes what follows the prompt for written tokens, their end among them.
                        held += [come.token(at) for at in range(come.n_shown, len(come.written))]
                    break
                now = time.perf_counter()
                clocks[bool(ids)].observe(now - last)
                last = now
                for token in come:
                    ids.append(token.id)
                    held.append(token)
                    text += stream.push(token.id)
                    if stream.stop is not None:
                        break
                if text:
                    yield Piece(text, held, None, offset, is_first)
                    offset, text, held, is_first = offset + len(text), "", [], False
                if stream.stop is not None:
                    break
        finally:
            await source.aclose()
            metrics.new_tokens.labels(host.name).inc(len(ids))
            metrics.prompt_tokens.labels(host.name).inc(len(request.prompt))
        text += "" if stream.stop is not None else stream.finish()
    else:
        reason = "length"
    usage.written += len(ids)
    usage.prompt += n_prompt if wish.counts else 0
    explained = None
    if wish.plan is not None:
        left = wish.seconds - (time.perf_counter() - began)
        explained = await asyncio.wait_for(host.in_turns(explain(host, wish.plan, request, ids, wish.stops)), left)
    yield Piece(text, held, reason, offset, is_first, explained)


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
MARK = "\0"


class Chunks:
    """Events of one answer. Most differ from each other in their text alone: the rest of these is written once."""

    def __init__(self, head: dict[str, Any], choice: Callable[[int, Piece], dict[str, Any]]) -> None:
        self.head, self.choice = head, choice
        self.frames: dict[int, list[bytes]] = {}

    def make(self, at: int, piece: Piece) -> bytes:
        if piece.reason is not None or piece.is_first or (piece.tokens and not math.isnan(piece.tokens[-1].score)):
            return event({**self.head, "choices": [self.choice(at, piece)]})
        if at not in self.frames:
            empty = event({**self.head, "choices": [self.choice(at, Piece(MARK))]})
            self.frames[at] = empty.split(json.dumps(MARK).encode())
        before, after = self.frames[at]
        return before + json.dumps(piece.text, ensure_ascii=False).encode() + after


def completion_logprobs(host: Host, tokens: list[Token], asked: int | None, offset: int) -> dict[str, Any] | None:
    """As /v1/completions tells them."""
    if asked is None:
        return None
    names = [name(host, token.id) for token in tokens]
    offsets = [offset + sum(map(len, names[:at])) for at in range(len(names))]
    top = [{name(host, id): score for id, score in token.alternatives} or None for token in tokens]
    scores = [None if math.isnan(token.score) else token.score for token in tokens]  # a prompt's first has none
    return {"tokens": names, "token_logprobs": scores, "top_logprobs": top if asked else None, "text_offset": offsets}


def chat_logprobs(host: Host, tokens: list[Token], asked: bool) -> dict[str, Any] | None:
    """As /v1/chat/completions tells them."""
    if not asked:
        return None
    return {
        "content": [
            {
                **_scored(host, token.id, token.score),
                "top_logprobs": [_scored(host, *each) for each in token.alternatives],
            }
            for token in tokens
        ]
    }


def _scored(host: Host, id: int, score: float) -> dict[str, Any]:
    text = name(host, id)
    return {"token": text, "logprob": score, "bytes": list(text.encode())}


def name(host: Host, id: int) -> str:
    assert host.tokenizer is not None
    return piece_name(host.tokenizer, id)


class Events(StreamingResponse):
    """Server-sent events. However the reader goes, what makes them is closed before this returns."""

    def __init__(self, source: AsyncGenerator[bytes, None], made_by: AsyncGenerator[Any, None]) -> None:
        super().__init__(source, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self.sources = (source, made_by)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for source in self.sources:
                await source.aclose()


async def unless_gone(request: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives, unless the client goes first: then it is cancelled, and its memory is for the others."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch, task = asyncio.create_task(gone()), asyncio.create_task(work)
    try:
        await asyncio.wait((watch, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(499, "the client has gone")
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(watch, task, return_exceptions=True)
