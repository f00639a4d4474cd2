"""What a request's body asks of a model: ids and options for the engine, vectors, alignments."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from clearhead.engine.request import start_of
from clearhead.errors import InputError
from clearhead.generation import Request as Asked
from clearhead.generation.embeddings import embed_ids
from clearhead.generation.texts import make_grammar, make_request
from clearhead.inside import probe
from clearhead.models import Decoder, Encoder, EncoderDecoder
from clearhead.serving import text_deltas as answers
from clearhead.serving.model_worker import Host
from clearhead.serving.protocol import Chat, ResponseFormat, Translation, Writing


def ask(host: Host, body: Writing, prompt: str | list[int], most: int, at: int, **more: Any) -> list[Asked]:
    """The n texts that a request asks for after one prompt, the first of them its `at`th."""
    assert isinstance(host.model, Decoder)
    assert host.tokenizer is not None
    options = body.options()
    try:
        options["logit_bias"] = {int(id): bias for id, bias in (body.logit_bias or {}).items()}
    except ValueError:
        raise InputError(f"logit_bias maps ids to numbers; got {body.logit_bias!r:.80}; use ids as keys") from None
    seed = (random.getrandbits(62) if body.seed is None else body.seed) + at
    one = make_request(
        host.model, host.tokenizer, prompt, max_new_tokens=most, seed=seed, stop=body.stops, **options, **more
    )
    return [replace(one, seed=seed + copy) for copy in range(body.n)]


def chat_ids(host: Host, body: Chat) -> list[int]:
    """The conversation by the model's template. What users write is text: special tokens in it are not obeyed."""
    tokenizer = host.tokenizer
    assert tokenizer is not None
    special = [tokenizer.token(id) for id in tokenizer.special_ids]
    messages: list[dict[str, str]] = []
    for message in body.messages:
        text = message.text
        for token in special:
            if token in text:  # a blank inside breaks it up, and a reader sees the same
                text = text.replace(token, token[:1] + "\u200b" + token[1:])
        messages.append({"role": "system" if message.role == "developer" else message.role, "content": text})
    return tokenizer.encode(tokenizer.chat(messages), special=False)


def format_grammar(host: Host, asked: ResponseFormat | None) -> Any:
    """What an answer must match."""
    if asked is None or asked.type == "text":
        return None
    assert isinstance(host.model, Decoder)
    assert host.tokenizer is not None
    if asked.type == "json_schema" and asked.json_schema is None:
        raise InputError("response_format json_schema needs a json_schema; got none; give its schema")
    schema: Any = {"type": "object"} if asked.json_schema is None else asked.json_schema.schema_
    return make_grammar(host.model, host.tokenizer, json_schema=schema)


def embed_texts(host: Host, texts: list[str]) -> tuple[np.ndarray, int]:
    """A vector a text, as the model's own files say, and how many tokens were read."""
    model, tokenizer = host.model, host.tokenizer
    assert isinstance(model, Encoder)
    assert tokenizer is not None
    ids, most = tokenizer.encode_all(texts), model.config.max_len
    for at, row in enumerate(ids):
        if not row:
            raise InputError(f"input {at} holds no token; got {texts[at]!r:.40}; leave it out")
        if len(row) > most:
            raise InputError(f"input {at} has {len(row)} tokens, and the model takes {most}; shorten it")
    return embed_ids(model, ids), sum(map(len, ids))


def translation(host: Host, body: Translation, text: str) -> Asked:
    """A source as the model expects it: with its end, whether the tokenizer adds that or not."""
    tokenizer = host.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    ids = ids if tokenizer.eos is None or ids[-1:] == [tokenizer.eos] else [*ids, tokenizer.eos]
    most = body.max_tokens or min(2 * len(ids) + 20, host.model.config.max_len)
    options: dict[str, Any] = dict(beams=body.beams, n_best=body.n_best, length_penalty=body.length_penalty)
    return Asked(source=ids, max_new_tokens=most, scored=True, **options)


@torch.no_grad()
def align(host: Host, source: list[int], target: list[int]) -> dict[str, Any]:
    """How much each token of the target looked at each of the source: the last layer's mean over its heads."""
    model = host.model
    assert isinstance(model, EncoderDecoder)
    device = next(model.parameters()).device
    site = f"decoder.blocks.{len(model.decoder.layers) - 1}.cross.weights"
    with probe(model, site) as seen:
        model(torch.tensor([source], device=device), torch.tensor([[start_of(model), *target[:-1]]], device=device))
    names = [[answers.name(host, id) for id in ids] for ids in (source, target)]
    weights = seen[site][0].mean(0)[: len(target)].tolist() if target else []
    return {"source": names[0], "target": names[1], "weights": weights}
