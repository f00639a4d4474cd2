"""Engines for those who call them here: made large enough, kept where that pays, and stepped without dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from clearhead.engine.batches import evaluating
from clearhead.engine.engine import BLOCK, Engine, News
from clearhead.engine.request import Request, Ticket, n_source
from clearhead.models import Decoder, EncoderDecoder

MAX_ROWS = 1024  # texts at once
BATCH_TOKENS = 16_384


class Kept:
    """A model's engine for the next call: what it has recorded on a GPU took time. A copy of the model has none."""

    def __init__(self, engine: Engine, weights: list[int]) -> None:
        self.engine, self.weights = engine, weights

    def __deepcopy__(self, _: object) -> None: ...

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def make_engine(
    model: Decoder | EncoderDecoder,
    requests: Sequence[Request],
    batch_tokens: int = BATCH_TOKENS,
    *,
    keep: bool = False,
) -> Engine:
    """An engine for these requests, with memory for all of them or for `batch_tokens`, but at least for any of them.

    `keep` is for callers who write everything before they return: on a GPU the model's last such engine is used again.
    """
    each = [_tokens(request) for request in requests] or [1]
    max_tokens = max(*each, min(sum(each), batch_tokens))
    beams = [request.beams for request in requests] or [1]
    max_rows = max(*beams, min(sum(beams), MAX_ROWS))
    if not keep or next(model.parameters()).device.type != "cuda" or torch.is_autocast_enabled("cuda"):
        return Engine(model, max_tokens=max_tokens, max_rows=max_rows, prefixes=False)
    weights = [weight.data_ptr() for weight in model.parameters()]
    kept: Kept | None = model.__dict__.get("_kept_engine")
    if kept is not None and kept.weights == weights:
        engine = kept.engine
        if engine.max_rows >= max_rows and (engine.blocks.n_blocks - 1) * BLOCK >= max_tokens:
            return engine
    forget_engine(model)  # its memory is free before the next one's is taken
    engine = Engine(model, max_tokens=max_tokens, max_rows=max(max_rows, 64), prefixes=False)
    model.__dict__["_kept_engine"] = Kept(engine, weights)
    return engine


def forget_engine(model: Decoder | EncoderDecoder) -> None:
    model.__dict__["_kept_engine"] = None


def _tokens(request: Request) -> int:
    """The most that a request may hold, with blocks that are not full."""
    text = len(request.prompt) + 1 + request.max_new_tokens + BLOCK
    return n_source(request.source) + BLOCK + request.beams * text


def check_done(ticket: Ticket) -> None:
    """A text that could not be written is an error here."""
    if ticket.error is not None:
        raise ticket.error


def stepping(engine: Engine) -> Callable[[], News]:
    """The engine's step, without dropout; a model that is being trained is in training again between steps."""
    if not any(module.training for module in engine.model.modules()):
        return engine.step

    def step() -> News:
        with evaluating(engine.model):
            return engine.step()

    return step
