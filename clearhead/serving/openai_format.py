"""Texts in OpenAI's form: ids, log-probabilities, and server-sent events."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from clearhead.generation import Token
from clearhead.serving.text_deltas import TextDelta
from clearhead.serving.worker import Worker

DONE = b"data: [DONE]\n\n"
MARK = "\0"  # stands for the text in a chunk's template


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


class Chunks:
    """The events of one answer. Most differ only in their text, so the rest of these is encoded once."""

    def __init__(self, head: dict[str, Any], choice: Callable[[int, TextDelta], dict[str, Any]]) -> None:
        self.head, self.choice = head, choice
        self.templates: dict[int, list[bytes]] = {}  # by choice: what comes before and after the text

    def encode(self, number: int, delta: TextDelta) -> bytes:
        if delta.reason is not None or delta.is_first or (delta.tokens and not math.isnan(delta.tokens[-1].score)):
            return event({**self.head, "choices": [self.choice(number, delta)]})
        if number not in self.templates:
            marked = event({**self.head, "choices": [self.choice(number, TextDelta(MARK))]})
            self.templates[number] = marked.split(json.dumps(MARK).encode())
        before, after = self.templates[number]
        return before + json.dumps(delta.text, ensure_ascii=False).encode() + after


def completion_logprobs(worker: Worker, tokens: list[Token], asked: int | None, offset: int) -> dict[str, Any] | None:
    """The `logprobs` of /v1/completions."""
    if asked is None:
        return None
    names = [token_name(worker, token.id) for token in tokens]
    offsets = [offset + sum(map(len, names[:at])) for at in range(len(names))]
    top = [{token_name(worker, id): score for id, score in token.alternatives} or None for token in tokens]
    scores = [None if math.isnan(token.score) else token.score for token in tokens]  # a prompt's first token has none
    return {"tokens": names, "token_logprobs": scores, "top_logprobs": top if asked else None, "text_offset": offsets}


def chat_logprobs(worker: Worker, tokens: list[Token], asked: bool) -> dict[str, Any] | None:
    """The `logprobs` of /v1/chat/completions."""
    if not asked:
        return None
    return {
        "content": [
            {
                **_scored(worker, token.id, token.score),
                "top_logprobs": [_scored(worker, *each) for each in token.alternatives],
            }
            for token in tokens
        ]
    }


def _scored(worker: Worker, id: int, score: float) -> dict[str, Any]:
    text = token_name(worker, id)
    return {"token": text, "logprob": score, "bytes": list(text.encode())}


def token_name(worker: Worker, id: int) -> str:
    assert worker.tokenizer is not None
    return worker.tokenizer.name(id)


class EventStream(StreamingResponse):
    """Server-sent events. The generators behind it are closed before this returns, also if the client disconnects."""

    def __init__(self, source: AsyncGenerator[bytes, None], made_by: AsyncGenerator[Any, None]) -> None:
        super().__init__(source, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self.sources = (source, made_by)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for source in self.sources:
                await source.aclose()
