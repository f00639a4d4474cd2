"""/v1/translate: texts by a sequence-to-sequence model, with beam search."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import torch
from fastapi import APIRouter, Request

from clearhead.engine.request import Memory, start_token
from clearhead.generation import Request as GenerationRequest
from clearhead.generation.decoding import default_limit
from clearhead.inside import probe
from clearhead.models import EncoderDecoder
from clearhead.quantization.model_weights import example_weight
from clearhead.serving.bounded_json import BoundedRoute
from clearhead.serving.cancellation import cancel_on_disconnect, gather_or_cancel
from clearhead.serving.explanation import Plan, explain, make_plan
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.openai_format import token_name
from clearhead.serving.protocol import Translation
from clearhead.serving.service import Service
from clearhead.serving.text_length import check_characters


def translation_router(service: Service[ModelWorker]) -> APIRouter:
    router = APIRouter(route_class=BoundedRoute)

    @router.post("/v1/translate", response_model=None)
    async def translate(body: Translation, request: Request) -> dict[str, Any]:
        worker = service.find(body.model, "translator")
        requests = await service.prepare(request, translation_requests, worker, body)
        plan = make_plan(worker, body.explain, requests)
        work = [_translate(worker, body, one, plan, service.limits.seconds) for one in requests]
        found = await cancel_on_disconnect(request, gather_or_cancel(work))
        data = [{"index": at, **each} for at, each in enumerate(found)]
        return {"object": "list", "model": worker.name, "data": data}

    return router


def translation_requests(worker: ModelWorker, body: Translation) -> list[GenerationRequest]:
    return [translation_request(worker, body, text) for text in body.texts]


def translation_request(worker: ModelWorker, body: Translation, text: str) -> GenerationRequest:
    """The source's ids always end with the end token, also if the tokenizer adds none."""
    tokenizer = worker.tokenizer
    assert tokenizer is not None
    check_characters(worker, len(text), "the input")
    ids = tokenizer.encode(text)
    ids = ids if tokenizer.eos is None or ids[-1:] == [tokenizer.eos] else [*ids, tokenizer.eos]
    assert isinstance(worker.model, EncoderDecoder)
    most = body.max_tokens or default_limit(worker.model, len(ids))
    options: dict[str, Any] = dict(beams=body.beams, n_best=body.n_best, length_penalty=body.length_penalty)
    return GenerationRequest(source=ids, max_new_tokens=most, scored=True, **options)


async def _translate(
    worker: ModelWorker, body: Translation, request: GenerationRequest, plan: Plan | None, seconds: float
) -> dict[str, Any]:
    """The n best translations of one source."""
    assert worker.tokenizer is not None
    assert not isinstance(request.source, Memory)
    source = [int(id) for id in request.source or ()]
    ticket = await worker.finish(request, seconds)
    translations: list[dict[str, Any]] = []
    for rank, one in enumerate(ticket.hypotheses):
        entry: dict[str, Any] = {"text": worker.tokenizer.decode(one.tokens), "score": one.score}
        entry["finish_reason"] = "stop" if one.finished else "length"
        if body.alignment:
            entry["alignment"] = await worker.run_between_steps(partial(align, worker, source, one.tokens))
        if plan is not None:
            work = worker.run_sliced(explain(worker, plan, request, one.tokens, [], rank))
            entry["explain"] = await asyncio.wait_for(work, seconds)
        translations.append(entry)
    return {"translations": translations, "prompt_tokens": len(source)}


@torch.no_grad()
def align(worker: ModelWorker, source: list[int], target: list[int]) -> dict[str, Any]:
    """The weight of each source token for each target token: the mean over the heads of the last cross-attention."""
    model = worker.model
    assert isinstance(model, EncoderDecoder)
    device = example_weight(model).device
    site = f"decoder.blocks.{len(model.decoder.layers) - 1}.cross.weights"
    with probe(model, site) as seen:
        model(torch.tensor([source], device=device), torch.tensor([[start_token(model), *target[:-1]]], device=device))
    names = [[token_name(worker, id) for id in ids] for ids in (source, target)]
    weights = seen[site][0].mean(0)[: len(target)].tolist() if target else []
    return {"source": names[0], "target": names[1], "weights": weights}
