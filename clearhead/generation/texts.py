"""Texts in, texts out: prompts that fit, stop texts, grammars, and many requests in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, overload

from clearhead.data.tokenizer import BYTE_PIECE, Tokenizer
from clearhead.engine.engine import Engine
from clearhead.engine.outputs import StopMatcher
from clearhead.engine.request import Request, Ticket, Token, check_at_least, source_length
from clearhead.errors import InputError, did_you_mean
from clearhead.generation.decoding import check_shape
from clearhead.generation.engines import BATCH_TOKENS, eval_step, make_engine, raise_failure
from clearhead.generation.written_texts import WrittenTexts, make_written
from clearhead.models import Decoder, EncoderDecoder
from clearhead.sampling.grammar import Grammar, Schema
from clearhead.sampling.strategy import Strategy

AT_ONCE = 256  # requests


@overload
def write_texts(
    model: Decoder, tokenizer: Tokenizer, prompts: Sequence[str], *, return_scores: Literal[True], **options: Any
) -> WrittenTexts: ...
@overload
def write_texts(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    return_scores: Literal[False] = False,
    **options: Any,
) -> list[str]: ...
def write_texts(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    seed: int = 0,
    stop: Sequence[str] = (),
    regex: str | None = None,
    json_schema: Schema | None = None,
    choices: Sequence[str] | None = None,
    batch_tokens: int = BATCH_TOKENS,
    return_scores: bool = False,
    alternatives: int = 0,
    **options: Any,
) -> list[str] | WrittenTexts:
    """A decoder's continuation of each prompt, in the same order; prompt i is sampled with seed + i.

    A text ends before the first text of `stop` in it. One of `regex`, `json_schema` and `choices` may constrain it. Further
    options are those of `make_request`. `batch_tokens` bounds the tokens in the KV cache. With `return_scores`, each is a
    `WrittenText`: its tokens with their probabilities and the likeliest `alternatives`; a notebook displays them in shades.
    """
    if isinstance(prompts, str):
        raise InputError(f"prompts is one str, {prompts!r:.60}; pass a list of texts")
    if alternatives and not return_scores:
        raise InputError(f"alternatives come with scores; got alternatives={alternatives}; add return_scores=True")
    options |= dict(scored=return_scores, alternatives=alternatives)
    check_shape(model, "decoder")
    options["grammar"] = make_grammar(model, tokenizer, regex=regex, json_schema=json_schema, choices=choices)
    requests = [
        make_request(model, tokenizer, prompt, seed=seed + place, stop=stop, **options)
        for place, prompt in enumerate(prompts)
    ]
    engine = make_engine(model, requests, batch_tokens)
    tickets = [engine.submit(request, f"prompt {place}") for place, request in enumerate(requests)]
    streams = {id(ticket): stream_of(ticket.request, tokenizer, stop) for ticket in tickets}
    written, tokens = dict.fromkeys(streams, ""), {key: list[Token]() for key in streams}
    step = eval_step(engine)
    while engine.is_busy:
        for ticket, token in step():
            stream = streams[id(ticket)]
            if stream.stop is not None:
                continue  # a token of the same step has ended the text
            raise_failure(ticket)
            written[id(ticket)] += stream.finish() if token is None else stream.push(token.id)
            tokens[id(ticket)] += [] if token is None else [token]
            if stream.stop is not None:
                engine.cancel(ticket)
    if not return_scores:
        return [written[id(ticket)] for ticket in tickets]
    keys = [id(ticket) for ticket in tickets]
    each = zip(prompts, keys, strict=True)
    return WrittenTexts(make_written(prompt, written[key], tokens[key], tokenizer) for prompt, key in each)


def stream_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    stop: Sequence[str] = (),
    regex: str | None = None,
    json_schema: Schema | None = None,
    choices: Sequence[str] | None = None,
    **options: Any,
) -> Iterator[str]:
    """One prompt's continuation in pieces, each as soon as it is certain: the text of `write_texts`, with the same options."""
    check_shape(model, "decoder")
    options["grammar"] = make_grammar(model, tokenizer, regex=regex, json_schema=json_schema, choices=choices)
    request = make_request(model, tokenizer, prompt, stop=stop, **options)
    engine = make_engine(model, [request])
    pieces = follow(engine, engine.submit(request), stream_of(request, tokenizer, stop))
    return (text for _, text in pieces if text)


def make_request(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 64,
    seed: int = 0,
    stop: Sequence[str] = (),
    truncate: Literal["left"] | None = None,
    grammar: Grammar | None = None,
    lookup: bool = False,
    draft: Decoder | None = None,
    scored: bool = False,
    alternatives: int = 0,
    **options: Any,
) -> Request:
    """A request to continue a text, or the ids of one.

    A prompt that leaves no room for `max_new_tokens` is an error, or with truncate="left" loses its start, but not its bos.
    `options` are the fields of `Strategy`. The engine stops at special tokens; a `StoppingStream` finds the other stop texts.
    """
    check_at_least(max_new_tokens, 1, "max_new_tokens")
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    return Request(
        prompt=fit(ids, model, max_new_tokens, truncate),
        max_new_tokens=max_new_tokens,
        seed=seed,
        strategy=Strategy.of(options, make_request),
        stop=[[tokenizer.vocab[text]] for text in check_stops(stop, tokenizer) if is_special(text, tokenizer)],
        grammar=grammar,
        lookup=lookup,
        draft=draft,
        scored=scored,
        alternatives=alternatives,
    )


def fit(ids: list[int], model: Decoder, max_new_tokens: int, truncate: str | None) -> list[int]:
    """The prompt, cut at its start if needed, so that the new tokens fit after it."""
    if truncate not in (None, "left"):
        raise InputError(f"a prompt can be cut at its start only; got truncate={truncate!r}; pass 'left' or None")
    room = model.config.max_len - max_new_tokens
    if len(ids) <= room:
        return ids
    if room < 2:
        raise InputError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt: the model's max_len={model.config.max_len}; "
            f"ask for fewer"
        )
    if truncate is None:
        raise InputError(
            f"the prompt has {len(ids)} tokens, but with max_new_tokens={max_new_tokens} the model's "
            f"max_len={model.config.max_len} leaves room for {room}; shorten it, ask for fewer, or cut its start: truncate='left'"
        )
    start = ids[:1] if ids[0] == model.generation.bos else []
    return [*start, *ids[len(ids) - room + len(start) :]]


def make_grammar(
    model: Decoder | EncoderDecoder,
    tokenizer: Tokenizer,
    *,
    regex: str | None = None,
    json_schema: Schema | None = None,
    choices: Sequence[str] | None = None,
) -> Grammar | None:
    """The grammar that a text must match, for this model's vocabulary and end tokens; None: anything."""
    asked = {"regex": regex, "json_schema": json_schema, "choices": choices}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"a text can be asked to match one thing; got {' and '.join(given)}; leave the others out")
    facts: dict[str, Any] = dict(vocab_size=model.config.vocab_size, ends=model.generation.eos)
    if regex is not None:
        return Grammar.regex(regex, tokenizer, **facts)
    if json_schema is not None:
        return Grammar.json_schema(json_schema, tokenizer, **facts)
    return None if choices is None else Grammar.choice(choices, tokenizer, **facts)


def check_stops(stops: Sequence[str], tokenizer: Tokenizer) -> list[str]:
    """The stop texts; InputError for one that can never occur in a generated text."""
    if isinstance(stops, str):
        raise InputError(f"stop is one str, {stops!r:.60}; pass a list of texts")
    for text in stops:
        if not text:
            raise InputError("a stop is empty, and every text would end at once; give the text to end before")
        if is_special(text, tokenizer):
            continue
        if tokenizer.unk is not None and tokenizer.unk in tokenizer.encode(text, special=False):
            names = [tokenizer.token(id) for id in tokenizer.special_ids]
            hint = did_you_mean(text, names) if text[0] in "<[|" and names else "leave it out"
            raise InputError(f"the stop {text!r} can not be written: the vocabulary has no tokens for it; {hint}")
    return list(stops)


def is_special(text: str, tokenizer: Tokenizer) -> bool:
    """Whether this is the name of a special token, which is never part of a text."""
    return tokenizer.vocab.get(text) in tokenizer.special_ids


def stream_of(request: Request, tokenizer: Tokenizer, stops: Sequence[str]) -> StoppingStream:
    """The stream for a request's text, which continues its prompt. A text that matches a grammar starts anew."""
    return StoppingStream(tokenizer, stops, after=() if request.grammar is not None else request.prompt)


class StoppingStream:
    """Ids in, text out, up to the first stop text; `stop` is the one that was found, or None.

    The results of all `push` and then `finish()`, joined, are the text. Characters that may become part of a stop text are held
    back until that is known. `after` are the ids that the text continues: only at the start of a text a word loses its space.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), after: Sequence[int] = ()) -> None:
        self._stream, self._held = tokenizer.stream(), ""
        self._stops = [text for text in check_stops(stops, tokenizer) if not is_special(text, tokenizer)]
        self._matchers = [StopMatcher(text) for text in self._stops]
        self.stop: str | None = None
        # Any complete piece of text will do; a single byte of a character would be held back.
        start = next((id for id in reversed(after) if _is_text(tokenizer, id)), None)
        if start is not None:
            self._stream.push(start)

    def push(self, id: int) -> str:
        """Append an id; returns the text that is now certain, often one word, sometimes none."""
        return "" if self.stop is not None else self._pass(self._stream.push(id))

    def finish(self) -> str:
        """The text that was held back."""
        text = "" if self.stop is not None else self._pass(self._stream.finish())
        rest, self._held = self._held, ""
        return text + rest

    def _pass(self, piece: str) -> str:
        held = self._held + piece
        # Of several stop texts, the one that is complete first.
        met = min(
            ((held.find(stop) + len(stop), held.find(stop), stop) for stop in self._stops if stop in held), default=None
        )
        if met is not None:
            _, certain, self.stop = met
            self._held = ""
            return held[:certain]
        certain = len(held) - max((matcher.push(piece) for matcher in self._matchers), default=0)
        self._held = held[certain:]
        return held[:certain]


def _is_text(tokenizer: Tokenizer, id: int) -> bool:
    text = tokenizer.decode([id])
    return bool(text.strip()) and "\ufffd" not in text and not BYTE_PIECE.fullmatch(tokenizer.token(id))


def follow(
    engine: Engine, ticket: Ticket, stream: StoppingStream, *, ends: bool = True
) -> Iterator[tuple[Token | None, str]]:
    """Each new token of the engine's only request, with the text that is then certain; last, None with the rest of the text.

    Closing the generator cancels the request. With `ends=False` the text goes on in another request: the rest stays in the stream.
    """
    step = eval_step(engine)
    try:
        while not ticket.is_done:
            for _, token in step():
                if token is not None and stream.stop is None:
                    yield token, stream.push(token.id)
            if stream.stop is not None:
                return
        raise_failure(ticket)
        if ends:
            yield None, stream.finish()
    finally:
        engine.cancel(ticket)


def in_order(engine: Engine, requests: Iterable[Request], at_once: int = AT_ONCE) -> Iterator[Ticket]:
    """Finished tickets in the order of their requests, each as soon as it and all before it are done.

    While fewer than `at_once` requests are running, as many more are submitted, longest first: prompts that are computed together
    are then about as long. At most four times `at_once` tickets wait behind a slow one.
    """
    pending, tickets, more, step = iter(requests), deque[Ticket](), True, eval_step(engine)
    while more or tickets:
        n_running = sum(not ticket.is_done for ticket in tickets)
        if more and n_running < at_once and len(tickets) <= 4 * at_once:
            chunk = list(islice(pending, at_once))
            more = len(chunk) == at_once
            longest_first = sorted(range(len(chunk)), key=lambda at: -_length(chunk[at]))
            made = {at: engine.submit(chunk[at]) for at in longest_first}
            tickets.extend(made[at] for at in range(len(chunk)))
        while tickets and tickets[0].is_done:
            raise_failure(tickets[0])
            yield tickets.popleft()
        if tickets:
            step()


def _length(request: Request) -> int:
    return len(request.prompt) + source_length(request.source)
