"""Texts on their way out, in OpenAI's form: whole, or piece by piece as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from clearhead.generation import Request, Ticket, Token
from clearhead.generation.texts import StoppingStream, piece_name, stream_of
from clearhead.serving.hosts import Host
from clearhead.serving.metrics import Metrics

T = TypeVar("T")


@dataclass
class Piece:
    """Some of a text, with the tokens that made it certain; the last piece says why the text is over."""

    text: str
    tokens: list[Token] = field(default_factory=list[Token])
    reason: str | None = None


def join(parts: list[Piece]) -> Piece:
    """Pieces that follow each other, as one."""
    tokens = [token for part in parts for token in part.tokens]
    return Piece("".join(part.text for part in parts), tokens, parts[-1].reason)


class Usage:
    """Tokens read and written for one answer."""

    def __init__(self) -> None:
        self.prompt = self.written = self.cached = 0

    def told(self) -> dict[str, Any]:
        total = self.prompt + self.written
        details = {"cached_tokens": self.cached}
        counts = {"prompt_tokens": self.prompt, "completion_tokens": self.written, "total_tokens": total}
        return {**counts, "prompt_tokens_details": details}


async def pieces(
    host: Host, request: Request, stops: list[str], usage: Usage, metrics: Metrics
) -> AsyncGenerator[Piece, None]:
    """One text as it comes, up to the first stop."""
    assert host.tokenizer is not None
    stream: StoppingStream = stream_of(request, host.tokenizer, stops)
    began = last = time.perf_counter()
    held: list[Token] = []
    source = host.write(request)
    reason = "stop"
    n_new = 0
    try:
        async for token in source:
            if isinstance(token, Ticket):
                usage.prompt, usage.cached = usage.prompt + token.n_prompt, usage.cached + token.n_cached
                reason = "length" if token.reason == "length" else "stop"
                break
            now = time.perf_counter()
            clock = metrics.first_token if last == began else metrics.between_tokens
            clock.labels(host.name).observe(now - last)
            last = now
            usage.written += 1
            n_new += 1
            held.append(token)
            text = stream.push(token.id)
            if text or stream.stop is not None:
                yield Piece(text, held)
                held = []
            if stream.stop is not None:
                usage.prompt += len(request.prompt)
                break
    finally:
        await source.aclose()
        metrics.new_tokens.labels(host.name).inc(n_new)
        metrics.prompt_tokens.labels(host.name).inc(len(request.prompt))
    rest = "" if stream.stop is not None else stream.finish()
    yield Piece(rest, held, reason)


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def completion_logprobs(host: Host, tokens: list[Token], asked: int | None, offset: int) -> dict[str, Any] | None:
    """As /v1/completions tells them."""
    if asked is None:
        return None
    names = [name(host, token.id) for token in tokens]
    offsets = [offset + sum(map(len, names[:at])) for at in range(len(names))]
    top = [{name(host, id): score for id, score in token.alternatives} for token in tokens]
    scores = [token.score for token in tokens]
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
