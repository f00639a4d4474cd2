"""Beam search with an encoder-decoder, many sources at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
from clearhead.generation.strategies import Shaper, force
from clearhead.layers.cache import Cache
from clearhead.models import EncoderDecoder
from clearhead.models.encoder_decoder import source_mask


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
    batch_tokens: int = 16_384,
    return_scores: bool = False,
    **options: Any,
) -> list[list[int]] | list[list[Hypothesis]]:
    """Lists of source ids in, lists of new ids out, in the same order, without start and end; `beams=1` is greedy.

    With `return_scores`, each source gets its `n_best` as `Hypothesis`, best first. A score is the sum of log-probabilities
    / length**length_penalty, the end counted in both. A source's search ends when no running beam, at its present length,
    beats the worst of `beams` finished texts; `early_stopping=True`: when there are that many; "never": when none could
    win at any length. Without `max_new_tokens` a text may have 2 tokens for each of its source, and 20. Of `Strategy`'s
    fields those are taken that do not draw: repetition_penalty, presence_penalty, frequency_penalty, no_repeat_ngram,
    logit_bias, suppress, min_new_tokens. `batch_tokens` bounds the tokens held at once, sources and beams.
    """
    check_shape(model, "encoder-decoder")
    for name in ("temperature", "top_k", "top_p", "min_p"):
        if name in options:
            raise InputError(
                f"beam search takes the likeliest and draws nothing; got {name}={options[name]}; leave it out"
            )
    shaper = Shaper(model, eos, options)
    search = Search(beams, float(length_penalty), early_stopping, model, shaper)
    check_least(batch_tokens, 1, "batch_tokens")
    check_least(n_best, 1, "n_best")
    if n_best > (beams if return_scores else 1):
        raise InputError(
            f"a search finds as many texts as it has beams, and tells with return_scores=True; got n_best={n_best}, "
            f"beams={beams}, return_scores={return_scores}; change one of them"
        )
    rows = check_rows(sources, model.config.source_vocab_size or model.config.vocab_size, "source")
    limits = [_limit(row, place, max_new_tokens, model) for place, row in enumerate(rows)]
    found: list[list[Hypothesis]] = [[] for _ in rows]
    costs = [(len(row), len(row) + beams * limit) for row, limit in zip(rows, limits, strict=True)]
    with evaluating(model):
        for group in batches(costs, batch_tokens):
            texts = search([rows[place] for place in group], [limits[place] for place in group])
            for place, hypotheses in zip(group, texts, strict=True):
                found[place] = hypotheses[:n_best]
    if not all(found):
        raise InputError(
            f"source {found.index([])} has no text: no token's score is a number; got NaN logits, or every token forbidden; "
            f"look at the weights, suppress and logit_bias"
        )
    return found if return_scores else [hypotheses[0].tokens for hypotheses in found]


class Search:
    """One way to search with one model: `search(sources, limits)` gives each source's finished texts, best first."""

    def __init__(
        self, beams: int, length_penalty: float, early_stopping: object, model: EncoderDecoder, shaper: Shaper
    ) -> None:
        check_least(beams, 1, "beams")
        if beams + len(shaper.ends) > (vocab_size := model.config.vocab_size):
            raise InputError(
                f"{beams} beams need as many tokens to go on with; got vocab_size={vocab_size}; take fewer"
            )
        if not math.isfinite(length_penalty):
            raise InputError(f"length_penalty must be finite; got {length_penalty}; 1 is the mean, 0 the sum")
        if early_stopping not in (True, False, "never"):
            raise InputError(f"early_stopping is True, False or 'never'; got {early_stopping!r}; False is usual")
        start = model.generation.bos if model.generation.decoder_start is None else model.generation.decoder_start
        if start is None:
            raise InputError(
                "the model does not say which token a text starts with; got neither decoder_start nor bos; "
                "set model.generation"
            )
        self.beams, self.length_penalty, self.start = beams, length_penalty, start
        self.early_stopping = early_stopping if beams > 1 else True  # greedy stops at its end
        self.model, self.shaper = model, shaper

    def __call__(self, sources: Ids, limits: Sequence[int]) -> list[list[Hypothesis]]:
        source, real = pad(sources, self.model.tokens.weight.device)
        cache = self.model.new_cache(batch=len(sources), max_len=max(limits))
        found: list[list[Hypothesis]] = [[] for _ in sources]
        beams = Beams(limits, self, source.device)
        # The first step is one row a source: reading the source's keys costs once, not once a beam.
        tokens = torch.full((len(sources), 1), self.start, device=source.device)
        logits = self.model.decode(tokens, self.model.encode(source, real), source_mask(real), cache=cache)
        # To look whether a search is over, the CPU waits for the GPU; what is over stays as it is, so that it can wait.
        every = 1 if source.device.type == "cpu" else 4
        for step in range(max(limits)):
            tokens, parents = beams.extend(self.log_probs(logits[:, -1], beams))
            stay = beams.drop(found) if (step + 1) % every == 0 or step + 1 == max(limits) else None
            if not beams.places:
                break
            if stay is not None:
                tokens, parents = tokens[stay], parents[stay]
            if stay is not None or step == 0:
                cache.reorder(parents.flatten())
            elif self.beams > 1:
                _trade(cache, parents.flatten())
            logits = self.model.decode(tokens.flatten()[:, None], None, cache=cache)
        return found

    def log_probs(self, logits: Float[Tensor, "n V"], beams: Beams) -> Float[Tensor, "B k V"]:
        """What each row's next token scores, under the strategy and the checkpoint's rules."""
        told, step, (B, k) = self.model.generation, beams.step, beams.scores.shape
        starts = torch.full((B * k, 1), self.start, device=logits.device)
        history = torch.cat([starts, beams.texts[:, :, :step].flatten(0, 1)], 1)
        log_probs = self.shaper(widen(logits).log_softmax(-1), history, torch.ones_like(starts[:, 0]), step)
        if step == 0 and told.forced_bos is not None:
            log_probs = force(log_probs, told.forced_bos)
        if told.forced_eos is not None:
            log_probs = force(log_probs, told.forced_eos, (beams.limits == step + 1).repeat_interleave(k))
        return log_probs.unflatten(0, (B, k))


class Beams:
    """The running and the finished texts of a batch of sources, and their scores, best first; -inf where there is none."""

    def __init__(self, limits: Sequence[int], search: Search, device: torch.device) -> None:
        B, K, self.step, self.search = len(limits), search.beams, 0, search
        self.places = list(range(B))  # of the sources still here, among all of the batch
        self.limits = torch.tensor(limits, device=device)
        self.ends = torch.tensor(search.shaper.ends, dtype=torch.long, device=device)
        self.is_open = torch.ones(B, dtype=torch.bool, device=device)
        self.texts = torch.zeros(B, 1, max(limits), dtype=torch.long, device=device)
        self.scores = torch.zeros(B, 1, device=device)  # one beam, until the first step
        self.done_texts = self.texts.expand(-1, K, -1)
        self.done_scores = torch.full((B, K), -math.inf, device=device)
        self.done_lengths = torch.zeros(B, K, dtype=torch.long, device=device)

    def extend(self, log_probs: Float[Tensor, "B k V"]) -> tuple[Int[Tensor, "B K"], Int[Tensor, "B K"]]:
        """One step: each running beam's new token, and the row of the batch that it goes on from. `log_probs` is used up."""
        (B, k, V), K, step = log_probs.shape, self.search.beams, self.step
        length, self.step = step + 1, step + 1
        # Of so many candidates at least K go on, even if the best of each beam are ends.
        keep = min(max(2, 1 + len(self.ends)) * K, k * V)
        scores, at = log_probs.add_(self.scores[..., None]).flatten(1).topk(keep)
        parents, tokens = at // V, at % V
        texts = _take(self.texts, parents)
        texts[:, :, step] = tokens
        is_end = (tokens[..., None] == self.ends).any(-1) | (self.limits <= length)[:, None]

        # Only the first K may finish: those after them are there to go on.
        finished = is_end & self.is_open[:, None] & (torch.arange(keep, device=at.device) < K)
        final = (scores / length**self.search.length_penalty).masked_fill(~finished, -math.inf)
        self.done_scores, best = torch.cat([self.done_scores.to(final.dtype), final], 1).topk(K)
        self.done_texts = _take(torch.cat([self.done_texts, texts], 1), best)
        self.done_lengths = torch.cat([self.done_lengths, torch.full_like(at, length)], 1).gather(1, best)

        self.scores, best = scores.masked_fill(is_end, -math.inf).topk(K)
        self.texts = _take(texts, best)
        self.is_open = self.is_open & self._can_improve() & (self.limits > length)
        rows = parents.gather(1, best) + k * torch.arange(B, device=at.device)[:, None]
        return tokens.gather(1, best), rows

    def _can_improve(self) -> Tensor:
        """Where a running beam may still come before a finished one; transformers' rule, so that both find the same."""
        worst, early, penalty = self.done_scores[:, -1], self.search.early_stopping, self.search.length_penalty
        if early is True:
            return worst == -math.inf
        length = self.limits if early == "never" and penalty > 0 else self.step
        return self.scores[:, 0] / length**penalty > worst

    def drop(self, found: list[list[Hypothesis]]) -> Int[Tensor, " b"] | None:
        """Move texts of sources that are done to `found`, if it is time; the places here of those that stay."""
        is_open = self.is_open.tolist()
        done = [at for at, going in enumerate(is_open) if not going]
        if not worth_dropping(len(done), len(is_open)):
            return None
        out = (each[done].tolist() for each in (self.done_texts, self.done_scores, self.done_lengths))
        for at, texts, scores, lengths in zip(done, *out, strict=True):
            for text, score, length in zip(texts, scores, lengths, strict=True):
                if score > -math.inf:
                    ended = text[length - 1] in self.search.shaper.ends
                    found[self.places[at]].append(Hypothesis(text[: length - ended], score, ended))
        stay = self.is_open.nonzero()[:, 0]
        self.places = [place for place, going in zip(self.places, is_open, strict=True) if going]
        for name in ("limits", "is_open", "texts", "scores", "done_texts", "done_scores", "done_lengths"):
            setattr(self, name, getattr(self, name)[stay])
        return stay


def _take(x: Int[Tensor, "B n L"], at: Int[Tensor, "B m"]) -> Int[Tensor, "B m L"]:
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def _trade(cache: Cache, rows: Int[Tensor, " n"]) -> None:
    """Beams take each other's past. They stay with their source, so that its keys need not move, nor slots not yet used."""
    used = min(cache.length, cache.slots)
    for layer in cache.layers:
        for held in (layer.k[:, :, :used], layer.v[:, :, :used]):
            held.copy_(held.index_select(0, rows))


def _limit(source: list[int], place: int, max_new_tokens: int | None, model: EncoderDecoder) -> int:
    """How many tokens a source's text may have."""
    max_len, max_source_len = model.config.max_len, model.config.max_source_len
    if not 0 < len(source) <= max_source_len:
        raise InputError(
            f"source {place} must have 1 to max_source_len={max_source_len} tokens; got {len(source)}; "
            f"{'shorten or split it' if source else 'give at least one, such as the eos id'}"
        )
    if max_new_tokens is None:
        return min(2 * len(source) + 20, max_len)
    check_least(max_new_tokens, 1, "max_new_tokens")
    if max_new_tokens > max_len:
        raise InputError(f"max_new_tokens={max_new_tokens} is more than the model's max_len={max_len}; lower it")
    return max_new_tokens
