"""Lists of ids in, lists of new ids out: `generate` and `stream` with a decoder, `translate` with an encoder-decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

from torch import nn

from clearhead.engine.engine import Engine
from clearhead.engine.request import Request, Ticket, check_at_least, start_token
from clearhead.errors import InputError
from clearhead.generation.engines import eval_step, make_engine, raise_failure, reuse_engine
from clearhead.models import Decoder, EncoderDecoder
from clearhead.sampling.beam_search import Hypothesis
from clearhead.sampling.grammar import Grammar
from clearhead.sampling.strategy import Strategy
from clearhead.sampling.token_ids import Ids, check_rows


@overload
def generate(model: Decoder, prompts: Ids, *, return_scores: Literal[True], **options: Any) -> list[Hypothesis]: ...
@overload
def generate(
    model: Decoder, prompts: Ids, *, return_scores: Literal[False] = False, **options: Any
) -> list[list[int]]: ...
def generate(
    model: Decoder,
    prompts: Ids,
    *,
    max_new_tokens: int = 64,
    seed: int | Sequence[int] = 0,
    eos: int | Sequence[int] | None = None,
    stop: Ids = (),
    grammar: Grammar | None = None,
    lookup: bool = False,
    draft: Decoder | None = None,
    batch_tokens: int = 16_384,
    return_scores: bool = False,
    **options: Any,
) -> list[list[int]] | list[Hypothesis]:
    """Lists of ids in, lists of new ids out, in the same order; with `return_scores`, a `Hypothesis` each.

    A text ends before an `eos` (None: the checkpoint's own; (): none), before any of the id sequences in `stop`, or after
    `max_new_tokens`; the ids that ended it are not part of it. Further options are the fields of `Strategy`: temperature (0, the
    default, is greedy), top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, no_repeat_ngram,
    logit_bias, suppress, min_new_tokens. `grammar` is what each text must match (`Grammar.regex`, `.json_schema`, `.choice`).
    `lookup` is faster where a text repeats parts of its prompt or of itself, and the text stays the same (prompt lookup).
    `draft` is a smaller decoder with the same vocabulary, which drafts the text; that stays the same, too (speculative decoding).
    Prompt i is sampled with seed + i, or with seed[i] of a list: the same seed gives the same text, whatever else is in the
    batch, unless two tokens are as close as rounding. `batch_tokens` bounds the tokens in the KV cache, of prompts and new texts.
    Scores are log-probabilities of the model itself, before any option. An empty prompt is replaced by the model's bos, if it has
    one.
    """
    check_shape(model, "decoder")
    check_at_least(max_new_tokens, 1, "max_new_tokens")
    strategy = Strategy.of(options, generate)
    rows = check_rows(prompts, model.config.vocab_size, "prompt")
    seeds = [seed + place for place in range(len(rows))] if isinstance(seed, int) else list(seed)
    if len(seeds) != len(rows) or not all(-(2**63) <= each < 2**63 for each in seeds):
        raise InputError(
            f"seed is one number of up to 63 bits, or one for each of {len(rows)} prompts; got {seed}; leave some out, or add some"
        )
    common: dict[str, Any] = dict(max_new_tokens=max_new_tokens, strategy=strategy, eos=eos, stop=stop)
    common |= dict(grammar=grammar, lookup=lookup, draft=draft)
    requests = [
        Request(prompt=row, seed=each, scored=return_scores, **common) for row, each in zip(rows, seeds, strict=True)
    ]
    tickets = run_requests(model, requests, batch_tokens, "prompt")
    if error := next((ticket.error for ticket in tickets if ticket.error), None):
        raise error
    found = [ticket.hypotheses[0] for ticket in tickets]
    return found if return_scores else [one.tokens for one in found]


def stream(
    model: Decoder,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 64,
    seed: int = 0,
    eos: int | Sequence[int] | None = None,
    stop: Ids = (),
    grammar: Grammar | None = None,
    lookup: bool = False,
    draft: Decoder | None = None,
    **options: Any,
) -> Iterator[int]:
    """One prompt's new ids, each as soon as it is sampled: the same ids as `generate`, with the same options."""
    check_shape(model, "decoder")
    row = check_rows([prompt], model.config.vocab_size, "prompt")[0]
    common: dict[str, Any] = dict(strategy=Strategy.of(options, stream), eos=eos, stop=stop)
    common |= dict(grammar=grammar, lookup=lookup, draft=draft)
    request = Request(prompt=row, max_new_tokens=max_new_tokens, seed=seed, **common)
    engine = make_engine(model, [request])
    return _follow(engine, engine.submit(request))


def _follow(engine: Engine, ticket: Ticket) -> Iterator[int]:
    step = eval_step(engine)
    try:
        while engine.is_busy:
            yield from (token.id for _, token in step() if token is not None)
        raise_failure(ticket)
    finally:
        engine.cancel(ticket)


@overload
def translate(
    model: EncoderDecoder, sources: Ids, *, return_scores: Literal[True], **options: Any
) -> list[list[Hypothesis]]: ...
@overload
def translate(
    model: EncoderDecoder, sources: Ids, *, return_scores: Literal[False] = False, **options: Any
) -> list[list[int]]: ...
def translate(
    model: EncoderDecoder,
    sources: Ids,
    *,
    beams: int = 4,
    max_new_tokens: int | None = None,
    length_penalty: float | int = 1.0,
    early_stopping: bool | Literal["never"] = False,
    n_best: int = 1,
    eos: int | Sequence[int] | None = None,
    grammar: Grammar | None = None,
    batch_tokens: int = 16_384,
    return_scores: bool = False,
    **options: Any,
) -> list[list[int]] | list[list[Hypothesis]]:
    """Lists of source ids in, lists of new ids out, in the same order, without start and end tokens; `beams=1` is greedy.

    With `return_scores`, each source gets its `n_best` texts as `Hypothesis`, best first. A score is the sum of
    log-probabilities / length**length_penalty; the end token counts in both. A search stops when no running beam, at its present
    length, beats the worst of `beams` finished texts; with `early_stopping=True`, as soon as there are so many finished texts;
    with "never", when no beam could win at any length. Without `max_new_tokens` the limit is 2 tokens for each source token,
    plus 20, or less if the checkpoint has a `max_length`. Further options are the fields of `Strategy` that do not sample:
    repetition_penalty, presence_penalty,
    frequency_penalty, no_repeat_ngram, logit_bias, suppress, min_new_tokens. `batch_tokens` bounds the tokens in the KV cache,
    of sources and beams.
    """
    check_shape(model, "encoder-decoder")
    for name in ("temperature", "top_k", "top_p", "min_p"):
        if name in options:
            raise InputError(
                f"beam search takes the likeliest and draws nothing; got {name}={options[name]}; leave it out"
            )
    strategy = Strategy.of(options, translate)
    check_at_least(beams, 1, "beams")
    check_at_least(n_best, 1, "n_best")
    if n_best > (beams if return_scores else 1):
        raise InputError(
            f"a search finds as many texts as it has beams, and tells with return_scores=True; got n_best={n_best}, "
            f"beams={beams}, return_scores={return_scores}; change one of them"
        )
    start_token(model)
    rows = check_rows(sources, model.config.source_vocab_size or model.config.vocab_size, "source")
    common: dict[str, Any] = dict(beams=beams, length_penalty=float(length_penalty), early_stopping=early_stopping)
    common |= dict(n_best=n_best, eos=eos, strategy=strategy, grammar=grammar, scored=return_scores)
    requests = [
        Request(source=row, max_new_tokens=_limit(row, place, max_new_tokens, model), **common)
        for place, row in enumerate(rows)
    ]
    found = [ticket.hypotheses for ticket in run_requests(model, requests, batch_tokens, "source")]
    if not all(found):
        raise InputError(
            f"source {found.index([])} has no text: no token's score is a number; got NaN logits, or every token forbidden; "
            f"look at the weights, suppress and logit_bias"
        )
    return found if return_scores else [hypotheses[0].tokens for hypotheses in found]


def run_requests(
    model: Decoder | EncoderDecoder, requests: Sequence[Request], batch_tokens: int, what: str
) -> list[Ticket]:
    """The requests' tickets, done, in the same order. Errors call the prompts or sources `what` 0, `what` 1 and so on.

    The longest start first: if one does not fit in memory, that shows at once, and those computed together are about as long.
    """
    check_at_least(batch_tokens, 1, "batch_tokens")
    if not requests:
        return []
    with reuse_engine(model, requests, batch_tokens) as engine:
        tickets = [engine.submit(request, f"{what} {place}") for place, request in enumerate(requests)]
        engine.scheduler.sort_longest_first()
        engine.run()
    return tickets


def check_shape(model: nn.Module, shape: str) -> None:
    """InputError unless the model has this shape, and reads tokens."""
    config = getattr(model, "config", None)
    found, inputs = getattr(config, "shape", type(model).__name__), getattr(config, "inputs", None)
    if (found, inputs) != (shape, "tokens"):
        raise InputError(
            f"this takes a model of shape={shape!r} over tokens; got shape={found!r}, inputs={inputs!r}; "
            f"generate is for decoders, translate for encoder-decoders"
        )


def default_limit(model: EncoderDecoder, n_source: int) -> int:
    """The most tokens that a text may have where the caller does not say: 2 for each of the source, plus 20; what the checkpoint
    allows (`max_length`, in which the start token counts)."""
    longest = model.config.max_len
    if model.generation.max_length is not None:
        longest = min(longest, max(model.generation.max_length - 1, 1))
    return min(2 * n_source + 20, longest)


def _limit(source: list[int], place: int, max_new_tokens: int | None, model: EncoderDecoder) -> int:
    """The most tokens that a source's text may have."""
    max_len, max_source_len = model.config.max_len, model.config.max_source_len
    if not 0 < len(source) <= max_source_len:
        raise InputError(
            f"source {place} must have 1 to max_source_len={max_source_len} tokens; got {len(source)}; "
            f"{'shorten or split it' if source else 'give at least one, such as the eos id'}"
        )
    if max_new_tokens is None:
        return default_limit(model, len(source))
    check_at_least(max_new_tokens, 1, "max_new_tokens")
    if max_new_tokens > max_len:
        raise InputError(f"max_new_tokens={max_new_tokens} is more than the model's max_len={max_len}; lower it")
    return max_new_tokens
