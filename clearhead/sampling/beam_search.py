"""Beam search: which texts go on, step by step, for many requests at once. Memory and model are the engine's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from clearhead import kernels
from clearhead.engine.batches import send, widen
from clearhead.engine.request import Hypothesis, Request, Ticket
from clearhead.errors import InputError
from clearhead.layers.masks import ABSENT
from clearhead.sampling.strategy import Shaper

Rows = slice | NDArray[np.int64]


@dataclass(frozen=True)
class Search:
    """How to search: requests that agree in this are searched together."""

    beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    shaper: Shaper

    @classmethod
    def of(cls, request: Request, shaper: Shaper) -> Search:
        return cls(request.beams, request.length_penalty, request.early_stopping, shaper)

    @property
    def n_candidates(self) -> int:
        """Of so many of each beam, all that matter are among them, and K go on even if the best of each are ends."""
        return max(2, 1 + len(self.shaper.ends)) * self.beams

    @property
    def is_plain(self) -> bool:
        """Whether the model's own probabilities are all that it looks at: then a GPU can go on without the CPU."""
        return self.shaper.is_plain and self.n_candidates <= min(32, self.shaper.vocab_size)

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
        self.worst = np.full(B, -math.inf)  # score of K finished texts; -inf: there are fewer
        self.is_traced = any(ticket.request.trace for ticket in tickets)

    def candidates(
        self, logits: Float[Tensor, "n V"], allowed: Bool[Tensor, "n V"] | None = None
    ) -> tuple[Float[np.ndarray, "B K k"], Int[np.ndarray, "B K k"]]:
        """Each beam's likeliest next tokens, under the strategy, the checkpoint's rules, and a grammar's: log-probability, id."""
        (B, K), shaper = self.scores.shape, self.search.shaper
        n = min(self.search.n_candidates, logits.shape[1])
        if self.search.is_plain and allowed is None:
            best = likeliest(logits, n)
        else:
            facts = np.array([[len(prompt) for prompt in self.prompts], self.steps, self.limits])
            n_prompt, steps, limits = send(facts.repeat(K, 1), logits.device)
            history = self._history(logits.device) if shaper.looks_back else None
            log_probs = shaper(widen(logits).log_softmax(-1), history, n_prompt, steps, limits, in_place=True)
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
        every = (values + self.scores[..., None]).reshape(len(values), -1)
        at = np.argsort(-every, axis=1, kind="stable")[:, : self.search.n_candidates]
        tokens = np.take_along_axis(ids.reshape(len(ids), -1), at, 1)
        return self.advance(slice(None), np.take_along_axis(every, at, 1), tokens, at // values.shape[2])

    def advance(
        self,
        rows: Rows,
        scores: Float[np.ndarray, "b n"],
        tokens: Int[np.ndarray, "b n"],
        parents: Int[np.ndarray, "b n"],
    ) -> tuple[Int[np.ndarray, "b K"], Int[np.ndarray, "b K"]]:
        """The same for some requests, with the candidates of all their beams, best first."""
        K, steps, limits = self.search.beams, self.steps[rows], self.limits[rows]
        length, is_open, ends = steps + 1, self.is_open[rows], self.search.shaper.ends
        is_end = np.broadcast_to((limits <= length)[:, None], scores.shape)
        if ends:
            is_end = is_end | np.isin(tokens, ends)

        # Only the first K may finish: those after them are there to go on.
        finished = is_end & is_open[:, None] & (np.arange(scores.shape[1]) < K) & (scores > -math.inf)
        numbers = np.arange(len(self.tickets))[rows]
        for row in np.flatnonzero(finished.any(1)).tolist():
            places = np.flatnonzero(finished[row])
            those = (each[row, places].tolist() for each in (parents, tokens, scores))
            self._finish(int(numbers[row]), *those)

        going, left = np.broadcast_to(np.arange(K), (len(numbers), K)), scores  # those that do not end, best first
        if is_end.any():
            going = np.argsort(is_end, axis=1, kind="stable")[:, :K]
            left = np.where(is_end, -math.inf, scores)
        after = np.take_along_axis(left, going, 1).astype(self.scores.dtype)
        if self.is_traced:
            self._trace(numbers, scores, tokens, parents, finished, going, after)
        tokens, parents = np.take_along_axis(tokens, going, 1), np.take_along_axis(parents, going, 1)
        longest = int(length.max())
        texts = self.texts[numbers[:, None], parents, :longest]
        texts[np.arange(len(numbers)), :, steps] = tokens
        self.texts[rows, :, :longest], self.scores[rows], self.steps[rows] = texts, after, length
        self.is_open[rows] = is_open & self._can_improve(numbers) & (limits > length) & (after[:, 0] > -math.inf)
        return tokens, parents

    def _finish(self, row: int, parents: list[int], tokens: list[int], totals: list[float]) -> None:
        """Texts are over: they join their request's K best, after those as good."""
        length, ends = int(self.steps[row]) + 1, self.search.shaper.ends
        done, texts = self.done[row], self.texts[row, :, : length - 1].tolist()
        for parent, token, total in zip(parents, tokens, totals, strict=True):
            ended = token in ends
            text = texts[parent] if ended else [*texts[parent], token]
            done.append(Hypothesis(text, total / length**self.search.length_penalty, ended))
        done.sort(key=lambda one: -one.score)
        del done[self.search.beams :]
        if len(done) == self.search.beams:
            self.worst[row] = done[-1].score

    def _can_improve(self, rows: NDArray[np.int64]) -> Bool[np.ndarray, " b"]:
        """Where a running beam may still come before a finished one; transformers' rule, so that both find the same."""
        early, penalty, worst = self.search.early_stopping, self.search.length_penalty, self.worst[rows]
        if early is True:
            return worst == -math.inf
        length = (self.limits if early == "never" and penalty > 0 else self.steps)[rows]
        return self.scores[rows, 0] / length.astype(self.scores.dtype) ** penalty > worst

    def _trace(
        self, numbers: Any, scores: Any, tokens: Any, parents: Any, finished: Any, going: Any, after: Any
    ) -> None:
        """Keep what this step looked at, and what became of it."""
        for row, number in enumerate(numbers.tolist()):
            ticket = self.tickets[number]
            if ticket.request.trace and self.is_open[number]:
                beams = {at: beam for beam, at in enumerate(going[row].tolist()) if after[row, beam] > -math.inf}
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
        for name in ("limits", "steps", "is_open", "texts", "scores", "worst"):
            setattr(self, name, getattr(self, name)[at])

    def merge(self, other: Beams) -> Beams:
        """The other's requests after these."""
        self.is_traced |= other.is_traced
        longest = max(self.texts.shape[-1], other.texts.shape[-1])
        for beams in (self, other):
            beams.texts = np.pad(beams.texts, ((0, 0), (0, 0), (0, longest - beams.texts.shape[-1])))
        for name in ("tickets", "prompts", "done"):
            setattr(self, name, [*getattr(self, name), *getattr(other, name)])
        for name in ("limits", "steps", "is_open", "texts", "scores", "worst"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))
        return self


def likeliest(logits: Float[Tensor, "R V"], n: int) -> tuple[Float[Tensor, "R n"], Int[Tensor, "R n"]]:
    """Each row's n likeliest tokens: log-probability, id."""
    best = kernels.top_log_probs(logits, n)
    if best is not None:
        return best
    values, ids = widen(logits).log_softmax(-1).topk(n)
    return values, ids


def go_on(
    values: Float[Tensor, "B K n"], ids: Int[Tensor, "B K n"], scores: Float[Tensor, "B K"], ends: tuple[int, ...]
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"], Int[Tensor, "B K"], Int[Tensor, "3 B n"]]:
    """`Beams.extend` where the numbers are, for a search that is plain: the beams' new scores, tokens and parents.

    Last come the candidates of all beams, best first: scores (their bits), tokens and parents, for `Beams.advance`.
    """
    K, n = scores.shape[1], values.shape[2]
    every = (values + scores[..., None]).flatten(1)
    # NaN comes last, as it does in numpy.
    best, at = every.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).sort(
        dim=1, descending=True, stable=True
    )
    best, at = best[:, :n], at[:, :n]
    tokens, parents = ids.flatten(1).gather(1, at), at // n
    bits = torch.int64 if best.dtype == torch.float64 else torch.int32
    looked_at = torch.stack([best.contiguous().view(bits), tokens.to(bits), parents.to(bits)])
    if not ends:
        return best[:, :K], tokens[:, :K], parents[:, :K], looked_at
    is_end = tokens == ends[0]
    for end in ends[1:]:
        is_end |= tokens == end
    going = is_end.int().sort(dim=1, stable=True).indices[:, :K]
    return best.gather(1, going), tokens.gather(1, going), parents.gather(1, going), looked_at


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
