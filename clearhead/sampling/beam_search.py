"""Beam search over candidates: which beams continue, which end, and when a search is over, for many requests at once.

It works on logits, ids and scores alone. Blocks of memory and the model belong to the engine.
"""

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
from clearhead.errors import InputError
from clearhead.layers.masks import ABSENT
from clearhead.sampling.logits_processors import LogitsProcessor, upcast
from clearhead.sampling.token_ids import pad

Rows = slice | NDArray[np.int64]
MAX_DEVICE_CANDIDATES = 32  # as many as the GPU's top-k kernel returns


@dataclass(frozen=True)
class Hypothesis:
    """One text and its score.

    `tokens` are the new ids, without the one that ended them. `score` is the sum of their log-probabilities, the end's
    included; of a beam search or an encoder-decoder it is divided by length**length_penalty. `finished`: the text ended by
    itself, and was not cut by its limit.
    """

    tokens: list[int]
    score: float
    finished: bool


@dataclass(frozen=True)
class Candidate:
    """One continuation considered by a step of a search: a token after a beam, the score with it, and its fate."""

    token: int
    parent: int
    score: float
    fate: Literal["kept", "finished", "dropped"]
    beam: int | None  # if kept: the number of the new beam


@dataclass(frozen=True)
class BeamSearchParams:
    """How to search. Requests with equal params are searched together."""

    beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    processor: LogitsProcessor

    def __post_init__(self) -> None:
        vocab_size = self.processor.vocab_size
        if self.beams + len(self.processor.ends) > vocab_size:
            raise InputError(
                f"{self.beams} beams need as many tokens to go on with; got vocab_size={vocab_size}; take fewer"
            )

    @property
    def n_candidates(self) -> int:
        """Candidates considered for each beam, and for each request. Even if every beam's best are ends, K others remain."""
        return max(2, 1 + len(self.processor.ends)) * self.beams

    @property
    def fits_device(self) -> bool:
        """Whether the model's own probabilities decide everything: then the device extends the beams without the CPU."""
        fewest = min(MAX_DEVICE_CANDIDATES, self.processor.vocab_size)
        return self.processor.is_identity and self.n_candidates <= fewest


class Beams:
    """The running beams and the finished texts of B requests, best first; a score of -inf means that there is no beam.

    All K beams of a request start from its prompt: at the first step all but the first have a score of -inf. Logits stay on
    their device; only each beam's likeliest candidates come to the CPU. `limits` are the requests' max_new_tokens. `traces`
    has a list for each request whose steps are to be recorded, else None.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        prompts: Sequence[list[int]],
        limits: Sequence[int],
        dtype: torch.dtype,
        traces: Sequence[list[list[Candidate]] | None],
    ) -> None:
        B, K = len(prompts), params.beams
        self.params, self.prompts, self.traces = params, list(prompts), list(traces)
        self.limits = np.array(limits)
        self.steps = np.zeros_like(self.limits)  # tokens written so far
        self.is_open = np.ones(B, bool)
        self.tokens = np.zeros((B, K, self.limits.max()), np.int64)
        self.scores = np.full((B, K), -math.inf, np.float64 if dtype == torch.float64 else np.float32)
        self.scores[:, 0] = 0.0
        self.finished: list[list[Hypothesis]] = [[] for _ in prompts]
        self.worst = np.full(B, -math.inf)  # the lowest score of K finished texts; -inf: there are fewer than K
        self.is_traced = any(trace is not None for trace in traces)

    def candidates(
        self, logits: Float[Tensor, "n V"], allowed: Bool[Tensor, "n V"] | None = None
    ) -> tuple[Float[np.ndarray, "B K k"], Int[np.ndarray, "B K k"]]:
        """Log-probabilities and ids of each beam's likeliest next tokens, after the logits processor and a grammar's mask."""
        (B, K), processor = self.scores.shape, self.params.processor
        n = min(self.params.n_candidates, logits.shape[1])
        if processor.only_biases and allowed is None:
            best = top_log_probs(logits, n, processor.bias)
        else:
            facts = np.array([[len(prompt) for prompt in self.prompts], self.steps, self.limits]).repeat(K, 1)
            n_prompt, steps, limits = torch.from_numpy(facts).to(logits.device)
            history = self._history().to(logits.device) if processor.needs_history else None
            log_probs = processor(upcast(logits).log_softmax(-1), history, n_prompt, steps, limits, in_place=True)
            if allowed is not None:
                log_probs = log_probs.masked_fill(~allowed, -math.inf)
            best = log_probs.topk(n)
        values, ids = (each.cpu().numpy().reshape(B, K, n) for each in best)
        return values, ids

    def _history(self) -> Int[Tensor, "n L"]:
        """Each beam's prompt and text, then ABSENT."""
        rows = [
            [*prompt, *tokens[:step]]
            for prompt, beams, step in zip(self.prompts, self.tokens.tolist(), self.steps.tolist(), strict=True)
            for tokens in beams
        ]
        return torch.from_numpy(pad(rows, ABSENT)[0])

    def extend(
        self, values: Float[np.ndarray, "B K k"], ids: Int[np.ndarray, "B K k"]
    ) -> tuple[Int[np.ndarray, "B K"], Int[np.ndarray, "B K"]]:
        """One step with these candidates: each new beam's token, and its parent, the beam of its request that it extends."""
        is_broken = (np.isnan(values).any(2) & (self.scores > -math.inf)).any(1)
        totals = (values + self.scores[..., None]).reshape(len(values), -1)
        totals[np.isnan(totals)] = -math.inf  # after a beam that is not there
        totals[is_broken] = math.nan
        at = np.argsort(-totals, axis=1, kind="stable")[:, : self.params.n_candidates]
        tokens = np.take_along_axis(ids.reshape(len(ids), -1), at, 1)
        return self.advance(slice(None), np.take_along_axis(totals, at, 1), tokens, at // values.shape[2])

    def advance(
        self,
        rows: Rows,
        scores: Float[np.ndarray, "b n"],
        tokens: Int[np.ndarray, "b n"],
        parents: Int[np.ndarray, "b n"],
    ) -> tuple[Int[np.ndarray, "b K"], Int[np.ndarray, "b K"]]:
        """`extend` for some requests, from the best candidates of all their beams, best first.

        Scores of NaN: a beam's logits are NaN. The search is over, and without texts: nobody knows what it would have found.
        """
        K, steps, limits = self.params.beams, self.steps[rows], self.limits[rows]
        length, is_open, ends = steps + 1, self.is_open[rows], self.params.processor.ends
        is_end = np.broadcast_to((limits <= length)[:, None], scores.shape)
        if ends:
            is_end = is_end | np.isin(tokens, ends)

        # Only the first K may finish. The others are there to replace them as running beams.
        finished = is_end & is_open[:, None] & (np.arange(scores.shape[1]) < K) & (scores > -math.inf)
        numbers = np.arange(len(self.prompts))[rows]
        for row in np.flatnonzero(finished.any(1)).tolist():
            places = np.flatnonzero(finished[row])
            self._finish(int(numbers[row]), *(each[row, places].tolist() for each in (parents, tokens, scores)))

        kept, left = np.broadcast_to(np.arange(K), (len(numbers), K)), scores  # the K best that do not end
        if is_end.any():
            kept = np.argsort(is_end, axis=1, kind="stable")[:, :K]
            left = np.where(is_end, -math.inf, scores)
        after = np.take_along_axis(left, kept, 1).astype(self.scores.dtype)
        is_broken = np.isnan(scores[:, 0])
        after[is_broken] = -math.inf
        for row in numbers[is_broken & is_open].tolist():
            self.finished[row] = []
        if self.is_traced:
            self._trace(numbers, scores, tokens, parents, finished, kept, after)
        tokens, parents = np.take_along_axis(tokens, kept, 1), np.take_along_axis(parents, kept, 1)
        longest = int(length.max())
        written = self.tokens[numbers[:, None], parents, :longest]
        written[np.arange(len(numbers)), :, steps] = tokens
        self.tokens[rows, :, :longest], self.scores[rows], self.steps[rows] = written, after, length
        self.is_open[rows] = is_open & self._can_improve(numbers) & (limits > length) & (after[:, 0] > -math.inf)
        return tokens, parents

    def _finish(self, row: int, parents: list[int], tokens: list[int], totals: list[float]) -> None:
        """Add finished texts to a request's K best; among equal scores the earlier come first."""
        length, ends = int(self.steps[row]) + 1, self.params.processor.ends
        finished, written = self.finished[row], self.tokens[row, :, : length - 1].tolist()
        for parent, token, total in zip(parents, tokens, totals, strict=True):
            is_end = token in ends
            ids = written[parent] if is_end else [*written[parent], token]
            finished.append(Hypothesis(ids, total / length**self.params.length_penalty, is_end))
        finished.sort(key=lambda one: -one.score)
        del finished[self.params.beams :]
        if len(finished) == self.params.beams:
            self.worst[row] = finished[-1].score

    def _can_improve(self, rows: NDArray[np.int64]) -> Bool[np.ndarray, " b"]:
        """Whether a running beam may still beat a finished text; the rule of transformers, so that both find the same texts."""
        early, penalty, worst = self.params.early_stopping, self.params.length_penalty, self.worst[rows]
        if early is True:
            return worst == -math.inf
        length = (self.limits if early == "never" and penalty > 0 else self.steps)[rows]
        return self.scores[rows, 0] / length.astype(self.scores.dtype) ** penalty > worst

    def _trace(
        self, numbers: Any, scores: Any, tokens: Any, parents: Any, finished: Any, kept: Any, after: Any
    ) -> None:
        """Record this step's candidates, and the fate of each."""
        for row, number in enumerate(numbers.tolist()):
            trace = self.traces[number]
            if trace is not None and self.is_open[number] and not math.isnan(scores[row, 0]):
                beams = {at: beam for beam, at in enumerate(kept[row].tolist()) if after[row, beam] > -math.inf}
                each = zip(*(t[row].tolist() for t in (tokens, parents, scores, finished)), strict=True)
                trace.append(
                    [
                        Candidate(token, parent, score, "finished", None)
                        if ended
                        else Candidate(token, parent, score, "kept" if at in beams else "dropped", beams.get(at))
                        for at, (token, parent, score, ended) in enumerate(each)
                    ]
                )

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these requests, in this order."""
        at = np.array(rows, np.int64)
        for name in ("prompts", "traces", "finished"):
            setattr(self, name, [getattr(self, name)[row] for row in rows])
        for name in ("limits", "steps", "is_open", "tokens", "scores", "worst"):
            setattr(self, name, getattr(self, name)[at])

    def merge(self, other: Beams) -> None:
        """Append the other's requests."""
        self.is_traced |= other.is_traced
        longest = max(self.tokens.shape[-1], other.tokens.shape[-1])
        for beams in (self, other):
            beams.tokens = np.pad(beams.tokens, ((0, 0), (0, 0), (0, longest - beams.tokens.shape[-1])))
        for name in ("prompts", "traces", "finished"):
            setattr(self, name, [*getattr(self, name), *getattr(other, name)])
        for name in ("limits", "steps", "is_open", "tokens", "scores", "worst"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))


def top_log_probs(
    logits: Float[Tensor, "R V"], n: int, bias: Float[Tensor, " V"] | None = None
) -> tuple[Float[Tensor, "R n"], Int[Tensor, "R n"]]:
    """Each row's n likeliest tokens: log-probabilities, after `bias` is added to them, and ids."""
    best = kernels.top_log_probs(logits, n, bias)
    if best is not None:
        return best
    log_probs = upcast(logits).log_softmax(-1)
    values, ids = (log_probs if bias is None else log_probs.add_(bias)).topk(n)
    return values, ids


def extend_on_device(
    values: Float[Tensor, "B K n"], ids: Int[Tensor, "B K n"], scores: Float[Tensor, "B K"], ends: tuple[int, ...]
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"], Int[Tensor, "B K"], Int[Tensor, "3 B n"]]:
    """`Beams.extend` on the logits' device, for params with `fits_device`: the new beams' scores, tokens and parents.

    Last come the best candidates of all beams, best first, for `Beams.advance`: the bits of their scores, tokens and parents.
    """
    K, n = scores.shape[1], values.shape[2]
    totals = (values + scores[..., None]).flatten(1)
    # After a beam that is not there, NaN is sorted last; elsewhere it ends the search.
    is_broken = (values.isnan().any(2) & (scores > -math.inf)).any(1)[:, None]
    best, at = totals.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).sort(
        dim=1, descending=True, stable=True
    )
    best, at = best[:, :n], at[:, :n]
    tokens, parents = ids.flatten(1).gather(1, at), at // n
    bits = torch.int64 if best.dtype == torch.float64 else torch.int32
    told = best.masked_fill(is_broken, math.nan)
    candidates = torch.stack([told.view(bits), tokens.to(bits), parents.to(bits)])
    best = best.masked_fill(is_broken, -math.inf)
    if not ends:
        return best[:, :K], tokens[:, :K], parents[:, :K], candidates
    is_end = tokens == ends[0]
    for end in ends[1:]:
        is_end |= tokens == end
    kept = is_end.int().sort(dim=1, stable=True).indices[:, :K]
    return best.gather(1, kept), tokens.gather(1, kept), parents.gather(1, kept), candidates
