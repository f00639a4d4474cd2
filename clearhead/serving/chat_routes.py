"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from clearhead.errors import InputError
from clearhead.models import Decoder
from clearhead.sampling.grammar import Grammar
from clearhead.serving.bounded_json import BoundedRoute
from clearhead.serving.explanation import MAX_NEW
from clearhead.serving.openai_format import chat_logprobs, new_id
from clearhead.serving.protocol import Chat, ResponseFormat
from clearhead.serving.service import Service
from clearhead.serving.special_tokens import as_text
from clearhead.serving.text_deltas import TextDelta, TextJob
from clearhead.serving.text_length import check_characters
from clearhead.serving.text_responses import generation_requests, respond, text_jobs
from clearhead.serving.worker import Worker

MAX_NEW_TOKENS = 1024  # if the request does not say


def chat_router(service: Service[Any]) -> APIRouter:
    router = APIRouter(route_class=BoundedRoute)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: Chat, request: Request) -> Response:
        worker = service.find(body.model, "decoder")
        _check(body)
        needs_model = body.explain is not None or body.response_format is not None
        if needs_model and (forwarded := await worker.forward(request)) is not None:
            return forwarded
        jobs = await service.prepare(request, _jobs, service, worker, body)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        head = dict(id=new_id("chatcmpl"), object=kind, created=int(time.time()), model=worker.name)

        def choice(number: int, delta: TextDelta) -> dict[str, Any]:
            message: dict[str, Any] = {"role": "assistant"} if delta.is_first else {}
            if delta.text or delta.reason is None or not body.stream:
                message["content"] = delta.text
            entry = {"delta": message} if body.stream else {"message": {**message, "refusal": None}}
            if delta.explained is not None:
                entry["explain"] = delta.explained
            scores = chat_logprobs(worker, delta.tokens, body.logprobs)
            return {"index": number, **entry, "logprobs": scores, "finish_reason": delta.reason}

        return await respond(service, worker, body, jobs, request, head, choice)

    return router


def _check(body: Chat) -> None:
    """Fields that contradict each other, or have no effect together."""
    most, also = body.max_completion_tokens, body.max_tokens
    if most is not None and also is not None and most != also:
        raise InputError(
            f"two limits on the same tokens: max_completion_tokens={most} and max_tokens={also}; leave one out"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InputError(
            f"top_logprobs needs logprobs; got top_logprobs={body.top_logprobs} alone; set logprobs to true"
        )
    asked = body.response_format
    if asked is not None and asked.json_schema is not None and asked.type != "json_schema":
        raise InputError(
            f"response_format has a json_schema that its type does not use; got type {asked.type!r}; set it to 'json_schema'"
        )


def _jobs(service: Service[Any], worker: Worker, body: Chat) -> list[TextJob]:
    ids = chat_ids(worker, body)
    room = min(worker.model.config.max_len - len(ids), MAX_NEW_TOKENS if body.explain is None else MAX_NEW)
    more: dict[str, Any] = dict(
        scored=body.logprobs,
        alternatives=(body.top_logprobs or 0) if body.logprobs else 0,
        grammar=response_grammar(worker, body.response_format),
    )
    most = body.max_completion_tokens or body.max_tokens or max(1, room)
    return text_jobs(service, worker, body, generation_requests(worker, body, ids, most, **more))


def chat_ids(worker: Worker, body: Chat) -> list[int]:
    """The conversation in the model's chat template. Special tokens in what users wrote stay plain text."""
    tokenizer = worker.tokenizer
    assert tokenizer is not None
    check_characters(worker, sum(len(message.text) for message in body.messages), "the conversation")
    messages = [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": as_text(tokenizer, message.text, f"message {at}"),
        }
        for at, message in enumerate(body.messages)
    ]
    return tokenizer.encode(tokenizer.chat(messages), special=False)


def response_grammar(worker: Worker, asked: ResponseFormat | None) -> Any:
    """The grammar for a `response_format`; None for plain text."""
    if asked is None or asked.type == "text":
        return None
    assert isinstance(worker.model, Decoder)
    assert worker.tokenizer is not None
    if asked.type == "json_schema" and asked.json_schema is None:
        raise InputError("response_format json_schema needs a json_schema; got none; give its schema")
    schema: Any = {"type": "object"} if asked.json_schema is None else asked.json_schema.schema_
    model, tokenizer = worker.model, worker.tokenizer
    ends = model.generation.eos
    return Grammar.json_schema(schema, tokenizer, vocab_size=model.config.vocab_size, ends=ends, is_trusted=False)
