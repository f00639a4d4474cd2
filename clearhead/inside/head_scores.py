"""Head scores: where each head attends on an input, as numbers. A picture of attention is not an explanation.

    scores = head_scores(model, repeated_tokens(1000))
    max(scores, key=lambda score: score.induction)      # the head that completes repetitions, if there is one

Attention is computed in strips of rows, so that a long text's whole map is never in memory. Options (`mask=` ...) are passed to
the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead import kernels
from clearhead.errors import InputError
from clearhead.inside.evaluation_mode import eval_mode
from clearhead.inside.probe import Seen, probe
from clearhead.inside.sites import sites
from clearhead.models import Model
from clearhead.models.encoder import real_of

STRIP = 2**20  # weights in memory at once: about what a CPU's caches hold


def entropy(weights: Float[Tensor, "*heads T S"]) -> Float[Tensor, "*heads T"]:
    """The entropy of each query's weights, in nats: 0 for one key, log n for n equal keys."""
    return torch.special.entr(weights).sum(-1)


@dataclass(frozen=True)
class HeadScore:
    """Where one head attends on an input: means over its queries. None if no query counts for a score."""

    site: str
    head: int
    entropy: float | None  # nats
    confidence: float | None  # the largest weight
    # The share of queries whose largest weight is at the most frequent distance (Voita et al. 2019).
    positional: float | None
    distance: int | None  # that distance, key minus query: -1 is the token before
    previous: float | None = None  # weight on the token before
    first: float | None = None  # weight on the first token
    induction: float | None = None  # weight on what followed an earlier occurrence of this token (Olsson et al. 2022)
    alignment: float | None = None  # cross-attention only: weight on the source tokens that `aligned` names


@torch.no_grad()
def head_scores(
    model: Model, *inputs: Tensor, aligned: Bool[Tensor, "B T S"] | None = None, **options: Any
) -> list[HeadScore]:
    """The scores of every head, in the order of the computation. For `induction`, use `repeated_tokens`.

    A high score says how the head behaved on this input, and nothing about what else it does.
    """
    names = [site.removesuffix(".weights") for site in sites(model) if site.endswith(".weights")]
    with eval_mode(model), probe(model, *(f"{place}.weights" for place in names)) as seen:
        model(*inputs, **options)
    found: list[HeadScore] = []
    for place in names:
        is_cross, in_decoder = place.endswith(".cross"), place.startswith("decoder.")
        ids = inputs[-1] if in_decoder or len(inputs) == 1 else inputs[0]
        real = real_of(options.get("target_mask" if in_decoder else "mask"))
        sums = HeadScoreSums(None if is_cross or ids.is_floating_point() else ids, real, aligned if is_cross else None)
        for start, weights in strips(seen, f"{place}.weights"):
            sums.add(start, weights, is_cross)
        found += sums.scores(f"{place}.weights")
    return found


class HeadScoreSums:
    """Sums over the queries of one site, strip by strip."""

    def __init__(self, ids: Tensor | None, real: Tensor | None, aligned: Tensor | None) -> None:
        self.ids, self.real, self.aligned = ids, real, aligned
        self.sums: dict[str, tuple[Tensor, int]] = {}
        self.distances: list[Tensor] = []  # (H, queries) each

    def add(self, start: int, weights: Tensor, is_cross: bool) -> None:
        B, _, t, S = weights.shape
        device = weights.device
        at, keys = torch.arange(start, start + t, device=device), torch.arange(S, device=device)
        real = (
            torch.ones(B, t, dtype=torch.bool, device=device) if self.real is None else self.real[:, start : start + t]
        )
        most = weights.max(-1)
        self._sum("entropy", entropy(weights), real)
        self._sum("confidence", most.values, real)
        later = real
        if not is_cross:
            first = torch.zeros(B, dtype=torch.int64, device=device) if self.real is None else self.real.int().argmax(1)
            later = real & (at > first[:, None])  # the first token has no token before it
            before = (at - 1).clamp(min=0).expand(B, t)
            self._sum("previous", _at(weights, before), later)
            self._sum("first", _at(weights, first[:, None].expand(B, t)), later)
        if self.ids is not None:
            # Key s follows an earlier occurrence of query t's token: ids[s - 1] = ids[t], s < t. Padding occurs nowhere.
            ids = self.ids if self.real is None else self.ids.masked_fill(~self.real, -1)
            before = F.pad(ids, (1, 0), value=-1)[:, :S]
            after = (before[:, None] == self.ids[:, start : start + t, None]) & (keys < at[:, None])
            self._sum("induction", _picked(weights, after), real & after.any(-1))
        if self.aligned is not None:
            if tuple(self.aligned.shape[::2]) != (B, S) or self.aligned.shape[1] < start + t:
                raise InputError(
                    f"aligned has shape {tuple(self.aligned.shape)}; cross-attention has batch {B}, source {S}"
                )
            pairs = self.aligned[:, start : start + t]
            self._sum("alignment", _picked(weights, pairs), real & pairs.any(-1))
        distance = most.indices - at
        self.distances.append(distance.transpose(0, 1)[:, later])

    def _sum(self, name: str, values: Tensor, counted: Tensor) -> None:
        total, n = self.sums.get(name, (0, 0))
        exact = kernels.to_float64(values) * kernels.to_float64(counted)[:, None]
        self.sums[name] = total + exact.sum((0, 2)), n + int(counted.sum())

    def scores(self, site: str) -> Iterator[HeadScore]:
        distances = torch.cat(self.distances, 1)
        for head, row in enumerate(distances):
            means = {name: float(total[head]) / n if n else None for name, (total, n) in self.sums.items()}
            values, counts = row.unique(return_counts=True)
            best = int(counts.argmax()) if len(row) else None
            yield HeadScore(
                site,
                head,
                entropy=means.pop("entropy"),
                confidence=means.pop("confidence"),
                positional=None if best is None else int(counts[best]) / len(row),
                distance=None if best is None else int(values[best]),
                **means,
            )


def _at(weights: Float[Tensor, "B H t S"], keys: Int[Tensor, "B t"]) -> Float[Tensor, "B H t"]:
    """Each query's weight on one key."""
    return torch.take_along_dim(weights, keys[:, None, :, None], -1)[..., 0]


def _picked(weights: Float[Tensor, "B H t S"], keys: Bool[Tensor, "B t S"]) -> Float[Tensor, "B H t"]:
    """Each query's weight on its own set of keys. The sets are small, so only their weights are read."""
    row, query, key = keys.nonzero(as_tuple=True)
    out = torch.zeros(weights.shape[:3], dtype=weights.dtype, device=weights.device).transpose(1, 2)  # (B, t, H)
    return out.contiguous().index_put((row, query), weights[row, :, query, key], accumulate=True).transpose(1, 2)


def repeated_tokens(vocab_size: int, *, length: int = 32, batch: int = 4, seed: int = 0) -> Int[Tensor, "B T"]:
    """Rows of random tokens, each repeated once: the second half can be predicted only from the first."""
    if vocab_size < length:
        raise InputError(f"{length} different tokens can not be drawn from {vocab_size}; take length={vocab_size}")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([torch.randperm(vocab_size, generator=generator)[:length] for _ in range(batch)])
    return torch.cat([drawn, drawn], 1)


def copied_tokens(source: Int[Tensor, "B S"], target: Int[Tensor, "B T"]) -> Bool[Tensor, "B T S"]:
    """For `head_scores(aligned=)`: for each target position, the source tokens equal to the token it predicts."""
    following = F.pad(target[:, 1:], (0, 1), value=-1)
    return following[..., None] == source[:, None]


def strips(seen: Seen, site: str) -> Iterator[tuple[int, Float[Tensor, "B H t s"]]]:
    """The weights of a site in strips of rows, at most STRIP weights each, and the first row of each strip.

    For causal self-attention a strip has only the columns up to its last row: later keys are masked for all its rows.
    """
    given = seen.attention[site.removesuffix(".weights")]
    (B, H, T, _), S, mask = given.q.shape, given.k.shape[2], given.mask
    is_text = mask.causal and mask.is_ordered and not mask.documents and given.bias is None
    is_text = is_text and T == S == given.T
    step = max(STRIP // (B * H * S), 1)
    for start in range(0, T, step):
        end = min(start + step, T)
        if is_text:
            part = replace(given, q=given.q[:, :, start:end], k=given.k[:, :, :end], T=end, kept=slice(start, end))
            yield start, part.weights(tuple(range(H)), slice(None))
        else:
            yield start, seen.rows(site, rows=slice(start, end))
