"""Engines for calls that bring none: large enough for their requests, and on a GPU with a runner that the next call reuses."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from clearhead.engine.allocator import BLOCK_SIZE
from clearhead.engine.engine import Engine
from clearhead.engine.outputs import StepOutput
from clearhead.engine.request import Request, Ticket, source_length
from clearhead.engine.runner import ModelRunner
from clearhead.engine.speculation import DRAFT_ROWS
from clearhead.inside.evaluation_mode import eval_mode, may_train
from clearhead.models import Decoder, EncoderDecoder
from clearhead.quantization.model_weights import example_weight

MAX_ROWS = 1024  # texts at once
MIN_KEPT_ROWS = 64  # of a runner that is kept, so that a second call with more prompts can use it too
BATCH_TOKENS = 16_384


@dataclass
class KeptRunner:
    """A runner for the model's next call, and where the weights lay that its CUDA graphs read."""

    runner: ModelRunner
    weights: list[int]


# Runners of earlier calls, by model: to record CUDA graphs takes longer than a short text. They belong to this room and not to
# the model, so a copy of the model has none. A runner holds its model weakly, so that this dict keeps no model alive.
_KEPT: WeakKeyDictionary[Decoder | EncoderDecoder, KeptRunner] = WeakKeyDictionary()


def make_engine(
    model: Decoder | EncoderDecoder, requests: Sequence[Request], batch_tokens: int = BATCH_TOKENS
) -> Engine:
    """A new engine with memory for all of these requests or for `batch_tokens`, but at least for each one of them."""
    max_tokens, max_rows = _size(requests, batch_tokens)
    return Engine(model, max_tokens=max_tokens, max_rows=max_rows, prefixes=False)


@contextmanager
def reuse_engine(
    model: Decoder | EncoderDecoder, requests: Sequence[Request], batch_tokens: int = BATCH_TOKENS
) -> Generator[Engine]:
    """`make_engine`, for callers that run all requests to their end. On a GPU the runner is kept for the model's next call.

    While it is in use it is not in the dict: a second thread makes a runner of its own, and one that was interrupted (by an
    exception, or Ctrl-C) is not used again.
    """
    if not _keeps_runner(model):
        yield make_engine(model, requests, batch_tokens)
        return
    max_tokens, max_rows = _size(requests, batch_tokens)
    weights = [weight.data_ptr() for weight in model.parameters()]
    kept = _KEPT.pop(model, None)
    runner = None if kept is None or kept.weights != weights else kept.runner
    if runner is not None and runner.max_rows >= max_rows and (runner.n_blocks - 1) * BLOCK_SIZE >= max_tokens:
        engine = Engine(model, prefixes=False, runner=runner)
    else:
        del kept, runner  # free its memory before the next one's is allocated
        engine = Engine(model, max_tokens=max_tokens, max_rows=max(max_rows, MIN_KEPT_ROWS), prefixes=False)
    yield engine
    _KEPT[model] = KeptRunner(engine.runner, weights)


def _keeps_runner(model: Decoder | EncoderDecoder) -> bool:
    """Only CUDA graphs make it pay. Under autocast the cache has another type."""
    return example_weight(model).device.type == "cuda" and not torch.is_autocast_enabled("cuda")


def _size(requests: Sequence[Request], batch_tokens: int) -> tuple[int, int]:
    """The tokens of memory, and the rows, that these requests can use."""
    tokens = [_max_tokens(request) for request in requests] or [1]
    rows = [DRAFT_ROWS if one.lookup or one.draft is not None else one.beams for one in requests] or [1]
    return max(*tokens, min(sum(tokens), batch_tokens)), max(*rows, min(sum(rows), MAX_ROWS))


def _max_tokens(request: Request) -> int:
    """The most that a request may hold, with blocks that are not full."""
    text = len(request.prompt) + 1 + request.max_new_tokens + BLOCK_SIZE
    return source_length(request.source) + BLOCK_SIZE + request.beams * text


def raise_failure(ticket: Ticket) -> None:
    """Raise the error of a request that failed."""
    if ticket.error is not None:
        raise ticket.error


def eval_step(engine: Engine) -> Callable[[], StepOutput]:
    """The engine's step without dropout. A model that is being trained is in its training mode again between steps."""
    if not (may_train(engine.model) or any(module.training for module in engine.model.modules())):
        return engine.step

    def step() -> StepOutput:
        with eval_mode(engine.model):
            return engine.step()

    return step
