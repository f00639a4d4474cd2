"""Generated texts as HTTP responses, streamed or whole; completions and chat share this."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from clearhead.errors import InputError
from clearhead.generation import Request as GenerationRequest
from clearhead.generation.texts import make_request
from clearhead.models import Decoder
from clearhead.sampling.strategy import Strategy
from clearhead.serving.cancellation import cancel_on_disconnect
from clearhead.serving.explanation import make_plan
from clearhead.serving.http_errors import error_body
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.openai_format import DONE, Chunks, EventStream, event
from clearhead.serving.protocol import TextBody
from clearhead.serving.service import Service
from clearhead.serving.text_deltas import TextDelta, TextJob, Usage, join, merged_deltas
from clearhead.serving.worker import Worker

Choice = Callable[[int, TextDelta], dict[str, Any]]  # one entry of `choices`, by its number


def generation_requests(
    worker: Worker, body: TextBody, prompt: str | list[int], max_new_tokens: int, first: int = 0, **more: Any
) -> list[GenerationRequest]:
    """The n requests for one prompt. Their seeds follow each other; the first has number `first` in the whole answer."""
    assert isinstance(worker.model, Decoder)
    assert worker.tokenizer is not None
    seed = (random.getrandbits(62) if body.seed is None else body.seed) + first
    more |= dict(max_new_tokens=max_new_tokens, seed=seed, stop=body.stops)
    one = make_request(worker.model, worker.tokenizer, prompt, **more)
    return [replace(one, seed=seed + copy) for copy in range(body.n)]


def body_strategy(body: TextBody) -> Strategy:
    """How the tokens of all texts of a request are chosen. Made once: `logit_bias` may name every token of the vocabulary."""
    try:
        biases = {int(id): bias for id, bias in (body.logit_bias or {}).items()}
    except ValueError:
        raise InputError(f"logit_bias maps ids to numbers; got {body.logit_bias!r:.80}; use ids as keys") from None
    return Strategy.of({**body.options(), "logit_bias": biases})


def text_jobs(
    service: Service[Any], worker: Worker, body: TextBody, requests: list[GenerationRequest]
) -> list[TextJob]:
    shared = replace(requests[0], strategy=body_strategy(body))
    # Prepared here and not in the engine's thread: that would hold up everyone.
    processor = None if worker.engine is None else worker.engine.processors.get(shared)
    requests = [replace(one, strategy=shared.strategy, processor=processor) for one in requests]
    plan = make_plan(worker, body.explain, requests) if isinstance(worker, ModelWorker) else None
    seconds, is_whole = service.limits.seconds, not (body.stream or body.stops)
    return [
        TextJob(one, body.stops, seconds, counts_prompt=number % body.n == 0, plan=plan, is_whole=is_whole)
        for number, one in enumerate(requests)
    ]


async def respond(
    service: Service[Any],
    worker: Worker,
    body: TextBody,
    jobs: list[TextJob],
    request: Request,
    head: dict[str, Any],
    choice: Choice,
) -> Response:
    """Generate these texts and answer as the body asks: a stream of events, or one JSON object. `head` starts each."""
    usage = Usage()
    deltas = merged_deltas(worker, jobs, usage, service.metrics)
    work = _stream(body, deltas, usage, head, choice) if body.stream else _whole(len(jobs), deltas, usage, head, choice)
    return await cancel_on_disconnect(request, work)


Deltas = AsyncGenerator[tuple[int, TextDelta], None]


async def _stream(body: TextBody, deltas: Deltas, usage: Usage, head: dict[str, Any], choice: Choice) -> Response:
    chunks = Chunks(head, choice)
    first = await anext(deltas)  # an error before the first delta still sets the status

    async def events() -> AsyncGenerator[bytes, None]:
        yield chunks.encode(*first)
        try:
            async for number, delta in deltas:
                yield chunks.encode(number, delta)
            if body.stream_options is not None and body.stream_options.include_usage:
                yield event({**head, "choices": [], "usage": usage.to_json()})
            yield DONE
        except Exception as error:
            yield event(error_body(error)[1])

    return EventStream(events(), deltas)


async def _whole(n: int, deltas: Deltas, usage: Usage, head: dict[str, Any], choice: Choice) -> Response:
    texts: list[list[TextDelta]] = [[] for _ in range(n)]
    async with contextlib.aclosing(deltas) as source:
        async for number, delta in source:
            texts[number].append(delta)
    choices = [choice(number, join(text)) for number, text in enumerate(texts)]
    return JSONResponse({**head, "choices": choices, "usage": usage.to_json()})
