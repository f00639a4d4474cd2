"""/v1/completions: texts that follow prompts."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from clearhead.errors import InputError
from clearhead.serving.bounded_json import BoundedRoute
from clearhead.serving.model_worker import MAX_WAITING
from clearhead.serving.openai_format import completion_logprobs, new_id
from clearhead.serving.protocol import Completion
from clearhead.serving.service import Service
from clearhead.serving.special_tokens import check_prompt
from clearhead.serving.text_deltas import TextDelta, TextJob
from clearhead.serving.text_length import check_characters
from clearhead.serving.text_responses import generation_requests, respond, text_jobs
from clearhead.serving.worker import Worker


def completion_router(service: Service[Any]) -> APIRouter:
    router = APIRouter(route_class=BoundedRoute)

    @router.post("/v1/completions", response_model=None)
    async def completions(body: Completion, request: Request) -> Response:
        worker = service.find(body.model, "decoder")
        _check(body)
        needs_model = body.explain is not None or (body.echo and body.logprobs is not None)
        if needs_model and (forwarded := await worker.forward(request)) is not None:
            return forwarded
        jobs = await service.prepare(request, _jobs, service, worker, body)
        head = dict(id=new_id("cmpl"), object="text_completion", created=int(time.time()), model=worker.name)

        def choice(number: int, delta: TextDelta) -> dict[str, Any]:
            scores = completion_logprobs(worker, delta.tokens, body.logprobs, delta.offset)
            more = {} if delta.explained is None else {"explain": delta.explained}
            return {"index": number, "text": delta.text, "logprobs": scores, "finish_reason": delta.reason, **more}

        return await respond(service, worker, body, jobs, request, head, choice)

    return router


def _check(body: Completion) -> None:
    n_texts = len(body.prompts) * body.n
    if n_texts == 0:
        raise InputError("there is no prompt; got an empty list; give one text at least")
    if n_texts > MAX_WAITING:
        raise InputError(f"{n_texts} texts in one request are too many; got n={body.n}; {MAX_WAITING} may be asked for")
    if body.max_tokens == 0 and not body.echo:
        raise InputError("max_tokens=0 writes nothing; got no echo either; ask for one of them")


def _jobs(service: Service[Any], worker: Worker, body: Completion) -> list[TextJob]:
    """n jobs for each prompt, in order."""
    tokenizer = worker.tokenizer
    assert tokenizer is not None

    def checked(prompt: str | list[int]) -> str | list[int]:
        if not isinstance(prompt, str):
            return prompt
        check_characters(worker, len(prompt), "the prompt")
        return check_prompt(tokenizer, prompt, body.special_tokens)

    more: dict[str, Any] = dict(scored=body.logprobs is not None, alternatives=body.logprobs or 0)
    requests = [
        one
        for at, prompt in enumerate(map(checked, body.prompts))
        for one in generation_requests(worker, body, prompt, max(body.max_tokens, 1), at * body.n, **more)
    ]
    jobs = text_jobs(service, worker, body, requests)
    if not body.echo:
        return jobs
    texts = [each if isinstance(each, str) else tokenizer.decode(each) for each in body.prompts]
    return [
        replace(job, echo=texts[number // body.n], generates=body.max_tokens > 0) for number, job in enumerate(jobs)
    ]
