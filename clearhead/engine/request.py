"""Requests, checked when they are submitted, and tickets, which hold their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.models import Decoder, EncoderDecoder
from clearhead.quantization.model_weights import example_weight
from clearhead.sampling.beam_search import Candidate, Hypothesis
from clearhead.sampling.grammar import Grammar
from clearhead.sampling.logits_processors import LogitsProcessor
from clearhead.sampling.strategy import Strategy
from clearhead.sampling.token_ids import check_rows


@dataclass(frozen=True, eq=False)
class Memory:
    """A source that was encoded before, by `model.encode`: several requests may read it."""

    states: Float[Tensor, "S D"]


Source = Sequence[int] | Tensor | Memory
Reason = Literal["end", "stop", "length", "cancelled", "failed"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to generate.

    A decoder continues `prompt`. An encoder-decoder reads `source` (ids, mel frames, or a `Memory` of them), and its text starts
    with `prompt`, or without one with its start token. `eos`: None is the checkpoint's own, () none. `stop` are id sequences that
    end a text. With `beams` above 1 a beam search looks for the likeliest text, and returns its `n_best`. `grammar` is what the
    text must match. `scored` keeps the tokens' log-probabilities; `alternatives`, at each step, so many likeliest ones with theirs.
    `lookup`: a decoder drafts tokens by prompt lookup, `draft`: by a smaller decoder with its vocabulary; the text stays the same.
    `trace` keeps each step of a beam search. `name` is the caller's, and must be unique among requests that are not done.
    `processor` is the strategy, prepared beforehand (`Engine.processors.get`, in any thread): thousands of biases take a while.
    Clients, by any name, take turns when requests wait; those without one are all of one client, which may use all of the engine.
    """

    prompt: Sequence[int] = ()
    source: Source | None = None
    max_new_tokens: int = 64
    strategy: Strategy = field(default_factory=Strategy)
    seed: int = 0
    eos: int | Sequence[int] | None = None
    stop: Sequence[Sequence[int]] = ()
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n_best: int = 1
    grammar: Grammar | None = None
    lookup: bool = False
    draft: Decoder | None = None
    scored: bool = False
    alternatives: int = 0
    trace: bool = False
    name: str | None = None
    client: str | None = None
    processor: LogitsProcessor | None = None


class Token(NamedTuple):
    """A generated token; if asked for, its log-probability, and the likeliest tokens as (id, log-probability), best first."""

    id: int
    score: float = math.nan
    alternatives: tuple[tuple[int, float], ...] = ()


class Ticket:
    """A request's tokens so far. `reason` says why it is done; None: it is not. A failed one has an error and no hypothesis."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.written: list[int] = []
        self.scores: list[float] = []  # their log-probabilities, if asked for
        self.alternatives: list[tuple[tuple[int, float], ...]] = []
        self.n_shown = 0  # the first of these are the text; the rest ended it, or may become part of a stop sequence
        self.n_reported = 0  # shown tokens that `Engine.step` has returned
        self.hypotheses: list[Hypothesis] = []  # once it is done
        self.trace: list[list[Candidate]] = []
        self.reason: Reason | None = None
        self.is_waiting = True  # until it is admitted
        self.error: InputError | None = None  # why it failed
        self.n_prompt = 0
        self.n_drafted = self.n_accepted = 0  # tokens that were verified, and those of them that stand
        self.n_cached = 0  # tokens of the prompt that were found in the prefix cache

    @property
    def is_done(self) -> bool:
        return self.reason is not None

    @property
    def ids(self) -> list[int]:
        return self.written[: self.n_shown]

    @property
    def tokens(self) -> list[Token]:
        return [self.token(at) for at in range(self.n_shown)]

    def token(self, at: int) -> Token:
        score = self.scores[at] if self.scores else math.nan
        return Token(self.written[at], score, self.alternatives[at] if self.alternatives else ())


def check_request(request: Request, model: Decoder | EncoderDecoder, what: str = "prompt") -> list[int]:
    """The ids of the prompt, at least one. A request that can not work is refused here, before it joins a batch."""
    config = model.config
    check_at_least(request.max_new_tokens, 1, "max_new_tokens")
    check_at_least(request.beams, 1, "beams")
    check_at_least(request.n_best, 1, "n_best")
    if type(request.seed) is not int or not -(2**63) <= request.seed < 2**63:
        raise InputError(f"seed is a number of up to 63 bits; got {request.seed!r}; leave some digits out")
    _check_ends(request, model)
    if not 0 <= request.alternatives <= config.vocab_size:
        raise InputError(
            f"alternatives must be 0 to vocab_size={config.vocab_size}; got {request.alternatives}; 5 is usual"
        )
    if request.n_best > request.beams:
        raise InputError(
            f"a search finds as many texts as it has beams; got n_best={request.n_best}, beams={request.beams}; change one"
        )
    if not math.isfinite(request.length_penalty):
        raise InputError(f"length_penalty must be finite; got {request.length_penalty}; 1 is the mean, 0 the sum")
    if request.early_stopping not in (True, False, "never"):
        raise InputError(f"early_stopping is True, False or 'never'; got {request.early_stopping!r}; False is usual")
    if request.beams > 1 and request.strategy.temperature:
        raise InputError(
            f"beam search takes the likeliest and draws nothing; got temperature={request.strategy.temperature}, "
            f"beams={request.beams}; leave one out"
        )
    if request.beams > 1 and (request.stop or request.alternatives):
        raise InputError(
            f"a search ends its texts by eos alone, and tells its alternatives by trace=True; got stop={request.stop}, "
            f"alternatives={request.alternatives}, beams={request.beams}; leave one out"
        )
    if request.lookup and (request.beams > 1 or not isinstance(model, Decoder)):
        raise InputError(
            f"lookup is for decoders, without beams; got shape={config.shape!r}, beams={request.beams}; leave one of them out"
        )
    if request.draft is not None:
        _check_draft(request, request.draft, model)
    prompt = check_rows([request.prompt], config.vocab_size, what)[0]
    if isinstance(model, EncoderDecoder):
        _check_source(request.source, model)
        prompt = prompt or [start_token(model)]
    elif request.source is not None:
        raise InputError("a decoder reads no source; got one; pass it as the prompt")
    if not prompt:
        if model.generation.bos is None:
            raise InputError(f"{what} is empty, and the model has no bos; got []; give at least one token")
        prompt = [model.generation.bos]
    room = request.max_new_tokens + (0 if isinstance(model, Decoder) else -1)  # the last new token is never an input
    if len(prompt) + room > config.max_len:
        raise InputError(
            f"{what} is too long: {len(prompt)} tokens + max_new_tokens={request.max_new_tokens} > "
            f"max_len={config.max_len}; shorten the prompt, or ask for fewer"
        )
    if request.draft is not None and len(prompt) + room > request.draft.config.max_len:
        raise InputError(
            f"{what} is too long for the draft model: {len(prompt)} tokens + max_new_tokens={request.max_new_tokens} > its "
            f"max_len={request.draft.config.max_len}; shorten the prompt, ask for fewer, or leave draft out"
        )
    return prompt


def _check_draft(request: Request, draft: object, model: Decoder | EncoderDecoder) -> None:
    """Refuse a draft model that can not draft for this request."""
    if not isinstance(draft, Decoder) or not isinstance(model, Decoder) or request.beams > 1:
        shapes = [getattr(getattr(one, "config", None), "shape", type(one).__name__) for one in (draft, model)]
        raise InputError(
            f"a draft model is a decoder, for a decoder without beams; got shape={shapes[0]!r} for shape={shapes[1]!r}, "
            f"beams={request.beams}; leave draft or beams out"
        )
    if request.lookup:
        raise InputError("lookup and a draft model both draft; got lookup=True and draft; leave one of them out")
    if draft.config.vocab_size != model.config.vocab_size:
        raise InputError(
            f"a draft model has the vocabulary of the model; got vocab_size={draft.config.vocab_size} for "
            f"vocab_size={model.config.vocab_size}; take one with the same tokenizer"
        )
    if (here := example_weight(draft).device) != (there := example_weight(model).device):
        raise InputError(f"a draft model lies on the device of the model; got {here} for {there}; move one of them")


def _check_ends(request: Request, model: Decoder | EncoderDecoder) -> None:
    """Check what may end a text: ids, stop sequences, and a grammar that must end it by the same ids."""
    vocab_size, stops, eos = model.config.vocab_size, _listed(request.stop), request.eos
    if stops is None:
        raise InputError(f"stop is a list of lists of ids; got {request.stop!r}; write such as [[5, 7]]")
    if any(len(stop) == 0 for stop in check_rows(stops, vocab_size, "stop")):
        raise InputError(f"a stop is a list of at least one id; got {stops}; leave the empty one out")
    ends = list(model.generation.eos) if eos is None else [eos] if type(eos) is int else _listed(eos)
    if ends is None or any(type(end) is not int for end in ends):
        raise InputError(f"eos is an id, or a list of ids; got {eos!r}; None is the model's own, () none")
    grammar = request.grammar
    if grammar is None:
        return
    if grammar.vocab_size != vocab_size:
        raise InputError(
            f"the grammar is for a vocabulary of {grammar.vocab_size}; got a model of vocab_size={vocab_size}; "
            f"make it with vocab_size={vocab_size}"
        )
    if not set(grammar.ends) <= set(ends) or (request.beams > 1 and not grammar.ends):
        raise InputError(
            f"the grammar ends a text by {grammar.ends}, which must be some of the request's own, and for a search at least "
            f"one; got eos={ends}, beams={request.beams}; make it with ends={ends}"
        )


def _listed(value: object) -> list[Any] | None:
    return list(cast("Sequence[Any]", value)) if isinstance(value, Sequence) and not isinstance(value, str) else None


def start_token(model: EncoderDecoder) -> int:
    """The token that a text of this model starts with."""
    rules = model.generation
    start = rules.bos if rules.decoder_start is None else rules.decoder_start
    if start is None:
        raise InputError(
            "the model does not say which token a text starts with; got neither decoder_start nor bos; "
            "set model.generation"
        )
    return start


def _check_source(source: Source | None, model: EncoderDecoder) -> None:
    config = model.config
    if source is None:
        raise InputError("an encoder-decoder reads a source; got none; pass source=...")
    if isinstance(source, Memory):
        if source.states.ndim != 2 or source.states.shape[1] != config.d_model or not len(source.states):
            raise InputError(
                f"a Memory holds states of shape (tokens, {config.d_model}); got {tuple(source.states.shape)}; use encode"
            )
        return
    if config.inputs == "frames":
        if not isinstance(source, Tensor) or source.ndim != 2 or source.shape[0] != config.n_mels:
            got = tuple(source.shape) if isinstance(source, Tensor) else type(source).__name__
            raise InputError(
                f"the source is sound of shape ({config.n_mels} mel bands, frames); got {got}; use log_mel"
            )
        if not 0 < source_length(source) <= config.max_source_len or not source.is_floating_point():
            raise InputError(
                f"the source must have 1 to {2 * config.max_source_len} frames of floating-point numbers; "
                f"got {source.shape[1]} of {source.dtype}; cut it into pieces"
            )
        return
    ids = check_rows([source], config.source_vocab_size or config.vocab_size, "source")[0]
    if not 0 < len(ids) <= config.max_source_len:
        raise InputError(
            f"the source must have 1 to max_source_len={config.max_source_len} tokens; got {len(ids)}; "
            f"{'shorten or split it' if ids else 'give at least one, such as the eos id'}"
        )


def source_length(source: Source | None) -> int:
    """How many positions a source takes in the KV cache."""
    if source is None:
        return 0
    if isinstance(source, Memory):
        return len(source.states)
    # The encoder's second convolution halves the frames of sound.
    return (source.shape[-1] + 1) // 2 if isinstance(source, torch.Tensor) else len(source)


def check_at_least(value: object, least: int, name: str) -> None:
    """InputError unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} is a whole number of at least {least}; got {value!r}; raise it")
