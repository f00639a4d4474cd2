"""/v1/embeddings: a vector for each text."""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from clearhead.checkpoint.sentence_transformers import max_text_length
from clearhead.errors import InputError
from clearhead.generation.embeddings import ELSEWHERE, ON_GPU, embed_ids, share
from clearhead.models import Encoder
from clearhead.quantization.model_weights import example_weight
from clearhead.serving.bounded_json import BoundedRoute
from clearhead.serving.cancellation import ClientSlots, cancel_on_disconnect, run_held
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.protocol import Embedding
from clearhead.serving.service import Service
from clearhead.serving.text_length import check_characters

PARTS_A_TURN = 2  # each of as many tokens as are computed at once; then another client may have its turn


def embedding_router(service: Service[ModelWorker]) -> APIRouter:
    router, slots = APIRouter(route_class=BoundedRoute), ClientSlots(1)

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings(body: Embedding, request: Request) -> dict[str, Any]:
        worker = service.find(body.model, "encoder")
        ids = await service.prepare(request, text_ids, worker, body.texts)

        async def embed() -> np.ndarray:
            async with slots.one():
                return await embed_in_turns(worker, ids)

        vectors = await cancel_on_disconnect(request, asyncio.wait_for(embed(), service.limits.seconds))
        n_tokens = sum(map(len, ids))

        def encoded(vector: np.ndarray) -> Any:
            return base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()

        data = [{"object": "embedding", "index": at, "embedding": encoded(each)} for at, each in enumerate(vectors)]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "data": data, "model": worker.name, "usage": usage}

    return router


async def embed_in_turns(worker: ModelWorker, ids: list[list[int]]) -> np.ndarray:
    """One vector per text, pooled as the model's files say. The model is free for others after each part of the texts."""
    model = worker.model
    assert isinstance(model, Encoder)
    n_tokens = PARTS_A_TURN * (ON_GPU if example_weight(model).is_cuda else ELSEWHERE)
    order = sorted(range(len(ids)), key=lambda at: -len(ids[at]))
    vectors = np.zeros((len(ids), model.config.d_model), np.float32)
    for part in share(order, [len(row) for row in ids], n_tokens):
        vectors[part] = await run_held(worker.lock, partial(embed_ids, model, [ids[at] for at in part]))
    return vectors


def text_ids(worker: ModelWorker, texts: list[str]) -> list[list[int]]:
    """The tokens of each text."""
    model, tokenizer = worker.model, worker.tokenizer
    assert tokenizer is not None
    for at, text in enumerate(texts):
        check_characters(worker, len(text), f"input {at}")
    ids, most = tokenizer.encode_all(texts), model.config.max_len
    if worker.path is not None:
        most = max_text_length(worker.path, most)
    for at, row in enumerate(ids):
        if not row:
            raise InputError(f"input {at} holds no token; got {texts[at]!r:.40}; leave it out")
        if len(row) > most:
            raise InputError(f"input {at} has {len(row)} tokens, and the model takes {most}; shorten it")
    return ids
