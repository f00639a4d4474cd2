"""Whisper's timestamps: which tokens may come next in a text with times (Radford et al. 2022, section 4.5).

Times are the vocabulary's last tokens, one for every 20 ms. A text starts with a time; times come in pairs, the end of a segment
and the start of the next, except before the text's end; they never decrease, and a segment is not empty. Where all times together
are likelier than any token of text, a time must come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Timestamps:
    """The ids: `first` is 0.00 s, `n` the number of times, `end` ends a text; ids below it are text. The first time is at most
    number `max_initial`."""

    first: int
    n: int
    end: int
    max_initial: int = 50

    def apply(
        self,
        logits: Float[Tensor, "B V"],
        history: Int[Tensor, "B _"],
        n_prompt: Int[Tensor, " B"],
        steps: Int[Tensor, " B"],
    ) -> Float[Tensor, "B V"]:
        """The log-probabilities that these rules leave. A row's text is the `steps` ids of its history after the prompt."""
        ids = torch.arange(logits.shape[-1], device=logits.device)
        is_time = (ids >= self.first) & (ids < self.first + self.n)
        at = torch.arange(history.shape[1], device=history.device)
        is_written = (at >= n_prompt[:, None]) & (at < (n_prompt + steps)[:, None])
        written = torch.where(is_written, history, -1)
        is_late = written >= self.first
        ends_in_time = self._is_time_at(is_late, n_prompt + steps - 1) & (steps >= 1)
        is_pair = ends_in_time & (self._is_time_at(is_late, n_prompt + steps - 2) | (steps < 2))
        is_open = ends_in_time & ~is_pair  # a segment has just ended: its text may end here, or another segment start
        newest = torch.where(is_late, written, -1).amax(-1)
        least = torch.where(is_open, newest, newest + 1)
        forbidden = (ids > self.end) & ~is_time
        forbidden = forbidden | is_pair[:, None] & is_time | is_open[:, None] & (ids < self.end)
        forbidden |= (newest >= 0)[:, None] & is_time & (ids < least[:, None])
        forbidden |= (steps == 0)[:, None] & (~is_time | (ids > self.first + self.max_initial))
        scores = logits.masked_fill(forbidden, -math.inf).log_softmax(-1)
        times = scores[:, self.first : self.first + self.n].logsumexp(-1)
        must = times > scores[:, : self.first].amax(-1)
        return scores.masked_fill(must[:, None] & ~is_time, -math.inf).log_softmax(-1)

    @staticmethod
    def _is_time_at(is_late: Tensor, at: Tensor) -> Tensor:
        return is_late.gather(1, at.clamp(min=0)[:, None])[:, 0]
