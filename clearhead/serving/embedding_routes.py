"""/v1/embeddings: a vector for each text."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
from fastapi import APIRouter

from clearhead.checkpoint.sentence_transformers import max_text_length
from clearhead.errors import InputError
from clearhead.generation.embeddings import embed_ids
from clearhead.models import Encoder
from clearhead.serving.bounded_json import BoundedRoute
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.protocol import Embedding
from clearhead.serving.service import Service
from clearhead.serving.text_length import check_characters


def embedding_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=BoundedRoute)

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings(body: Embedding) -> dict[str, Any]:
        worker = service.find(body.model, "encoder")
        async with worker.lock:
            vectors, n_tokens = await asyncio.to_thread(embed_texts, worker, body.texts)

        def encoded(vector: np.ndarray) -> Any:
            return base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()

        data = [{"object": "embedding", "index": at, "embedding": encoded(each)} for at, each in enumerate(vectors)]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "data": data, "model": worker.name, "usage": usage}

    return router


def embed_texts(worker: ModelWorker, texts: list[str]) -> tuple[np.ndarray, int]:
    """One vector per text, pooled as the model's files say, and the number of tokens."""
    model, tokenizer = worker.model, worker.tokenizer
    assert isinstance(model, Encoder)
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
    return embed_ids(model, ids), sum(map(len, ids))
