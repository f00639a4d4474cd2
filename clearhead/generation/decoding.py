"""A decoder goes on from prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import torch

from clearhead.errors import InputError
from clearhead.generation.batches import (
    Hypothesis,
    Ids,
    batches,
    check_least,
    check_rows,
    check_shape,
    evaluating,
    pad,
    widen,
    worth_dropping,
)
from clearhead.generation.strategies import Shaper
from clearhead.layers.masks import ABSENT
from clearhead.models import Decoder


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
    batch_tokens: int = 16_384,
    return_scores: bool = False,
    **options: Any,
) -> list[list[int]] | list[Hypothesis]:
    """Lists of ids in, lists of new ids out, in the same order; with `return_scores`, a `Hypothesis` each.

    A text ends before an `eos` (None: the checkpoint's own; (): none), before any of the id sequences in `stop`, or after
    `max_new_tokens`; what ended it is not part of it. Further options are the fields of `Strategy`: temperature (0, the
    default, is greedy), top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, no_repeat_ngram,
    logit_bias, suppress, min_new_tokens. Prompt i is drawn with seed + i, or with its own of a list of seeds: same seed,
    same text, whatever else is in the batch. `batch_tokens` bounds the tokens held at once, prompts and room for the new.
    A score is of the model's own probabilities, before any option. An empty prompt is the model's bos, where it has one.
    """
    check_shape(model, "decoder")
    check_least(max_new_tokens, 1, "max_new_tokens")
    check_least(batch_tokens, 1, "batch_tokens")
    shaper = Shaper(model, eos, options)
    starts = [
        _start(model, row, place, max_new_tokens)
        for place, row in enumerate(check_rows(prompts, model.config.vocab_size, "prompt"))
    ]
    stops = check_rows(stop, model.config.vocab_size, "stop")
    if not all(stops):
        raise InputError(f"a stop is a list of at least one id; got {stops}; leave the empty one out")
    stops += [[end] for end in shaper.ends]
    seeds = [seed + place for place in range(len(starts))] if isinstance(seed, int) else list(seed)
    if len(seeds) != len(starts) or not all(abs(one) < 2**63 for one in seeds):
        raise InputError(
            f"seed is one number of up to 63 bits, or one for each of {len(starts)} prompts; got {seed}; leave it out for 0"
        )
    found: list[Hypothesis] = [Hypothesis([], 0.0, False)] * len(starts)
    with evaluating(model):
        for group in batches([(len(row), len(row) + max_new_tokens) for row in starts], batch_tokens):
            texts = [(list[int](), list[float]()) for _ in group]
            rows = [(starts[place], seeds[place]) for place in group]
            for row, token, score in decode(model, rows, max_new_tokens, shaper, stops, scored=return_scores):
                texts[row][0].append(token)
                texts[row][1].append(score)
            for place, (text, scores) in zip(group, texts, strict=True):
                cut = ending(text, stops)
                found[place] = Hypothesis(text[: len(text) - cut], sum(scores), cut > 0)
    return found if return_scores else [one.tokens for one in found]


def stream(
    model: Decoder,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 64,
    seed: int = 0,
    eos: int | Sequence[int] | None = None,
    **options: Any,
) -> Iterator[int]:
    """One prompt's new ids, each as soon as it is chosen; options as in `generate`, whose ids these are."""
    check_shape(model, "decoder")
    check_least(max_new_tokens, 1, "max_new_tokens")
    shaper = Shaper(model, eos, options)
    row = _start(model, check_rows([prompt], model.config.vocab_size, "prompt")[0], 0, max_new_tokens)
    stops = [[end] for end in shaper.ends]
    with evaluating(model):
        for _, token, _ in decode(model, [(row, seed)], max_new_tokens, shaper, stops, scored=False):
            if token not in shaper.ends:
                yield token


def decode(
    model: Decoder, rows: Sequence[tuple[list[int], int]], limit: int, shaper: Shaper, stops: Ids, *, scored: bool
) -> Iterator[tuple[int, int, float]]:
    """One batch of (prompt, seed), step by step: each new token as (row, id, log-probability), those that end included."""
    device = model.tokens.weight.device
    tokens, real = pad([prompt for prompt, _ in rows], device)
    n_prompt = torch.tensor([len(prompt) for prompt, _ in rows], device=device)
    seeds = torch.tensor([seed for _, seed in rows], device=device)
    cache = model.new_cache(batch=len(rows), max_len=tokens.shape[1] + limit)
    history = torch.full((len(rows), cache.max_len), ABSENT, device=device)
    history[:, : tokens.shape[1]] = tokens if real is None else torch.where(real, tokens, ABSENT)
    states = model.states(tokens, real, cache=cache)
    states = states[torch.arange(len(rows), device=device), n_prompt - 1][
        :, None
    ]  # only the last token's logits are made
    here, texts = list(range(len(rows))), {row: list[int]() for row in range(len(rows))}
    for step in range(limit):
        logits = widen(model.project(states)[:, 0])
        shaped = shaper(logits, history[:, : cache.length], n_prompt, step)
        chosen = shaper.strategy.choose(shaped, seeds, torch.full_like(seeds, step))
        history.scatter_(1, (n_prompt + step)[:, None], chosen[:, None])
        scores = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].tolist() if scored else [0.0] * len(here)
        for row, token, score in zip(here, chosen.tolist(), scores, strict=True):
            if row in texts:
                yield row, token, score
                texts[row].append(token)
                if ending(texts[row], stops):
                    del texts[row]
        if not texts or step + 1 == limit:
            return
        if worth_dropping(len(here) - len(texts), len(here)):
            kept = torch.tensor([at for at, row in enumerate(here) if row in texts], device=device)
            cache.reorder(kept)
            history, n_prompt, seeds, chosen = (each[kept] for each in (history, n_prompt, seeds, chosen))
            here = list(texts)
        states = model.states(chosen[:, None], cache=cache)


def ending(text: list[int], stops: Ids) -> int:
    """How many of a text's last ids end it: 0, while it goes on."""
    return max((len(stop) for stop in stops if text[-len(stop) :] == list(stop)), default=0)


def _start(model: Decoder, prompt: list[int], place: int, max_new_tokens: int) -> list[int]:
    bos, max_len = model.generation.bos, model.config.max_len
    if not prompt and bos is None:
        raise InputError(f"prompt {place} is empty, and the model has no bos; got []; give at least one token")
    if len(prompt) + max_new_tokens > max_len:
        raise InputError(
            f"prompt {place} is too long: {len(prompt)} tokens + max_new_tokens={max_new_tokens} > max_len={max_len}; "
            f"shorten the prompt, or ask for fewer"
        )
    return prompt if prompt or bos is None else [bos]
