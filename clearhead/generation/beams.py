"""Beam search: which texts go on, step by step, for many requests at once. Memory and model are the engine's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.errors import InputError
from clearhead.generation.batches import send, widen
from clearhead.generation.requests import Hypothesis, Ticket
from clearhead.generation.strategies import Shaper
from clearhead.layers.masks import ABSENT


@dataclass(frozen=True)
class Search:
    """How to search: requests that agree in this are searched together."""

    beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    shaper: Shaper

    def __post_init__(self) -> None:
        vocab_size = self.shaper.vocab_size
        if self.beams + len(self.shaper.ends) > vocab_size:
            raise InputError(
                f"{self.beams} beams need as many tokens to go on with; got vocab_size={vocab_size}; take fewer"
            )


class Beams:
    """The running and the finished texts of some requests, and their scores, best first; -inf where there is none.

    Requests start with one text, their prompt, that all beams share: at that step all but the first have a score of -inf. What
    the model says of each token stays on its device; of each beam only the likeliest few come here.
    """

    def __init__(
        self, search: Search, tickets: Sequence[Ticket], prompts: Sequence[list[int]], dtype: torch.dtype
    ) -> None:
        B, K = len(tickets), search.beams
        self.search, self.tickets, self.prompts = search, list(tickets), list(prompts)
        self.limits = np.array([ticket.request.max_new_tokens for ticket in tickets])
        self.steps = np.zeros_like(self.limits)  # tokens written so far
        self.is_open = np.ones(B, bool)
        self.texts = np.zeros((B, K, self.limits.max()), np.int64)
        self.scores = np.full((B, K), -math.inf, np.float64 if dtype == torch.float64 else np.float32)
        self.scores[:, 0] = 0.0
        self.done: list[list[Hypothesis]] = [[] for _ in tickets]

    @property
    def n_candidates(self) -> int:
        """Of so many of each beam, all that matter are among them, and K go on even if the best of each are ends."""
        return max(2, 1 + len(self.search.shaper.ends)) * self.search.beams

    def candidates(
        self, logits: Float[Tensor, "n V"], allowed: Bool[Tensor, "n V"] | None = None
    ) -> tuple[Float[np.ndarray, "B K k"], Int[np.ndarray, "B K k"]]:
        """Each beam's likeliest next tokens, under the strategy, the checkpoint's rules, and a grammar's: log-probability, id."""
        (B, K), shaper = self.scores.shape, self.search.shaper
        n = min(self.n_candidates, logits.shape[1])
        if logits.is_cuda and shaper.is_plain and allowed is None and n <= 32:
            from clearhead.layers.gpu import top_log_probs

            best = top_log_probs(logits, n)
        else:
            facts = np.array([[len(prompt) for prompt in self.prompts], self.steps, self.limits])
            n_prompt, steps, limits = send(facts.repeat(K, 1), logits.device)
            history = self._history(logits.device) if shaper.looks_back else None
            log_probs = shaper(widen(logits).log_softmax(-1), history, n_prompt, steps, limits)
            if allowed is not None:
                log_probs = log_probs.masked_fill(~allowed, -math.inf)
            best = log_probs.topk(n)
        values, ids = (each.cpu().numpy().reshape(B, K, n) for each in best)
        return values, ids

    def _history(self, device: torch.device) -> Int[Tensor, "n L"]:
        """Each beam's prompt and text, then ABSENT."""
        rows = [
            [*prompt, *text[:step]]
            for prompt, texts, step in zip(self.prompts, self.texts.tolist(), self.steps.tolist(), strict=True)
            for text in texts
        ]
        return lay_out(rows, device)

    def extend(
        self, values: Float[np.ndarray, "B K k"], ids: Int[np.ndarray, "B K k"]
    ) -> tuple[Int[np.ndarray, "B K"], Int[np.ndarray, "B K"]]:
        """One step with these candidates: each running beam's new token, and the beam of its request that it goes on from."""
        (B, K, n), length = values.shape, self.steps + 1
        every = (values + self.scores[..., None]).reshape(B, -1)
        at = np.argsort(-every, axis=1, kind="stable")[:, : self.n_candidates]
        scores, parents = np.take_along_axis(every, at, 1), at // n
        tokens = np.take_along_axis(ids.reshape(B, -1), at, 1)
        is_end = np.isin(tokens, self.search.shaper.ends) | (self.limits <= length)[:, None]

        # Only the first K may finish: those after them are there to go on.
        finished = is_end & self.is_open[:, None] & (np.arange(at.shape[1]) < K) & (scores > -math.inf)
        for row, place in zip(*finished.nonzero(), strict=True):
            self._finish(int(row), int(parents[row, place]), int(tokens[row, place]), float(scores[row, place]))

        going = np.argsort(is_end, axis=1, kind="stable")[:, :K]  # those that do not end, best first
        self.scores = np.take_along_axis(np.where(is_end, -math.inf, scores).astype(scores.dtype), going, 1)
        if any(ticket.request.trace for ticket in self.tickets):
            self._trace(scores, tokens, parents, finished, going)
        tokens, parents = np.take_along_axis(tokens, going, 1), np.take_along_axis(parents, going, 1)
        self.texts = np.take_along_axis(self.texts, parents[..., None], 1)
        self.texts[np.arange(B), :, self.steps] = tokens
        self.steps = length
        self.is_open &= self._can_improve() & (self.limits > length) & (self.scores[:, 0] > -math.inf)
        return tokens, parents

    def _finish(self, row: int, parent: int, token: int, total: float) -> None:
        """A text is over: it joins its request's K best, after those as good."""
        length = int(self.steps[row]) + 1
        ended = token in self.search.shaper.ends
        text = [*self.texts[row, parent, : length - 1].tolist(), *([] if ended else [token])]
        done = self.done[row]
        done.append(Hypothesis(text, total / length**self.search.length_penalty, ended))
        done.sort(key=lambda one: -one.score)
        del done[self.search.beams :]

    def _can_improve(self) -> Bool[np.ndarray, " B"]:
        """Where a running beam may still come before a finished one; transformers' rule, so that both find the same."""
        K, early, penalty = self.search.beams, self.search.early_stopping, self.search.length_penalty
        worst = np.array([done[-1].score if len(done) == K else -math.inf for done in self.done])
        if early is True:
            return worst == -math.inf
        length = self.limits if early == "never" and penalty > 0 else self.steps
        return self.scores[:, 0] / length.astype(self.scores.dtype) ** penalty > worst

    def _trace(self, scores: Any, tokens: Any, parents: Any, finished: Any, going: Any) -> None:
        """Keep what this step looked at, and what became of it."""
        for row, ticket in enumerate(self.tickets):
            if ticket.request.trace and self.is_open[row]:
                beams = {at: beam for beam, at in enumerate(going[row].tolist()) if self.scores[row, beam] > -math.inf}
                each = zip(*(t[row].tolist() for t in (tokens, parents, scores, finished)), strict=True)
                ticket.trace.append(
                    [
                        Candidate(token, parent, score, "finished", None)
                        if ended
                        else Candidate(token, parent, score, "kept" if at in beams else "dropped", beams.get(at))
                        for at, (token, parent, score, ended) in enumerate(each)
                    ]
                )

    def keep(self, rows: Sequence[int]) -> None:
        """Only these requests stay."""
        at = np.array(rows, np.int64)
        for name in ("tickets", "prompts", "done"):
            setattr(self, name, [getattr(self, name)[row] for row in rows])
        for name in ("limits", "steps", "is_open", "texts", "scores"):
            setattr(self, name, getattr(self, name)[at])

    def merge(self, other: Beams) -> Beams:
        """The other's requests after these."""
        longest = max(self.texts.shape[-1], other.texts.shape[-1])
        for beams in (self, other):
            beams.texts = np.pad(beams.texts, ((0, 0), (0, 0), (0, longest - beams.texts.shape[-1])))
        for name in ("tickets", "prompts", "done"):
            setattr(self, name, [*getattr(self, name), *getattr(other, name)])
        for name in ("limits", "steps", "is_open", "texts", "scores"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))
        return self


@dataclass(frozen=True)
class Candidate:
    """One way on that a step of a search looked at: a token after a beam, the score with it, and what became of it."""

    token: int
    parent: int
    score: float
    fate: Literal["kept", "finished", "dropped"]
    beam: int | None  # which it became, if kept


def lay_out(rows: Sequence[Sequence[int]], device: Any) -> Int[Tensor, "n L"]:
    """Rows side by side, filled up with ABSENT."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[ABSENT] * (longest - len(row))] for row in rows], device=device)
