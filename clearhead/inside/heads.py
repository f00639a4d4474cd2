"""Heads: how widely and where each one looks, and what that resembles. A picture of attention is not an explanation.

    scores = head_scores(model, repeated_tokens(1000))
    max(scores, key=lambda score: score.induction)      # the head that completes repetitions, if there is one

Attention is computed in strips of rows: a long text's whole map is never in memory. Options (`mask=` ...) go on to the model.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.errors import InputError
from clearhead.inside.probe import Seen, probe, sites
from clearhead.models import EncoderDecoder, Model
from clearhead.models.encoder import real_of

STRIP = 2**22  # weights held at once


def entropy(weights: Float[Tensor, "*heads T S"]) -> Float[Tensor, "*heads T"]:
    """How widely each query looks, in nats: 0 at one key, log n at n keys alike."""
    return torch.special.entr(weights).sum(-1)


@torch.no_grad()
def attention_rollout(
    model: Model, *inputs: Tensor, stack: str = "", residual: float = 0.5, **options: Any
) -> Float[Tensor, "B T T"]:
    """From which input tokens each final state may have come (Abnar & Zuidema 2020): (1 - r) mean of heads + r I, layer on layer.

    It takes attention for all there is: what values hold, and what feed-forward layers do, is left out. `stack` is "encoder"
    or "decoder" in an encoder-decoder (the decoder's own attention; without: the encoder's).
    """
    if not 0 <= residual <= 1:
        raise InputError(f"residual={residual} is the share that stays where it is, from 0 to 1; the paper has 0.5")
    if isinstance(model, EncoderDecoder):
        stack = stack or "encoder"
        if stack not in ("encoder", "decoder"):
            raise InputError(f"stack={stack!r} is neither of the two there are; choose 'encoder' or 'decoder'")
    elif stack:
        raise InputError(f"stack={stack!r} is for encoder-decoders; this model has one stack; leave it out")
    place = f"{stack}.blocks" if stack else "blocks"
    with still(model), probe(model, f"{place}.*.attention.weights", f"{place}.*.attention.q") as seen:
        model(*inputs, **options)
    flow: Tensor | None = None
    for site in (site for site in seen if site.endswith(".weights")):
        mean = torch.cat([weights.mean(1) for _, weights in _strips(seen, site)], 1)
        step = (1 - residual) * mean + residual * torch.eye(mean.shape[-1]).to(mean)
        step = step / step.sum(-1, keepdim=True).clamp(min=1e-12)  # a row that may look at nothing stays where it is
        flow = step if flow is None else step @ flow
    assert flow is not None
    return flow


@dataclass(frozen=True)
class HeadScore:
    """What one head does with an input, as means over its queries. None: there is no query it could be asked of."""

    site: str
    head: int
    entropy: float | None  # nats
    confidence: float | None  # the largest weight
    positional: float | None  # the share of queries that look hardest at one and the same distance (Voita et al. 2019)
    distance: int | None  # that distance, key minus query: -1 is the token before
    previous: float | None = None  # weight on the token before
    first: float | None = None  # weight on the first token
    induction: float | None = (
        None  # weight on tokens that came after an earlier occurrence of this one (Olsson et al. 2022)
    )
    alignment: float | None = None  # of cross-attention: weight on the source tokens said to belong to this one


@torch.no_grad()
def head_scores(
    model: Model, *inputs: Tensor, aligned: Bool[Tensor, "B T S"] | None = None, **options: Any
) -> list[HeadScore]:
    """Every head of the model, in the order of the computation. For `induction`, give `repeated_tokens`.

    Of a text, a head with a high score behaved so on this text. What else it does, the score does not say.
    """
    attended = [site.removesuffix(".weights") for site in sites(model) if site.endswith(".weights")]
    patterns = [f"{place}.{part}" for place in attended for part in ("weights", "q")]
    with still(model), probe(model, *patterns) as seen:
        model(*inputs, **options)
    found: list[HeadScore] = []
    for place in attended:
        is_cross, in_decoder = place.endswith(".cross"), place.startswith("decoder.")
        ids = inputs[-1] if in_decoder or len(inputs) == 1 else inputs[0]
        real = real_of(options.get("target_mask" if in_decoder else "mask"))
        tally = _Tally(None if is_cross or ids.is_floating_point() else ids, real, aligned if is_cross else None)
        for start, weights in _strips(seen, f"{place}.weights"):
            tally.add(start, weights, is_cross)
        found += tally.scores(f"{place}.weights")
    return found


class _Tally:
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
            later = real & (at > first[:, None])  # the first token has none before it
            self._sum("previous", self._picked(weights, (at[:, None] - 1 == keys).expand(B, t, S)), later)
            self._sum("first", self._picked(weights, (keys == first[:, None, None]).expand(B, t, S)), later)
        if self.ids is not None:
            # Key s follows an earlier occurrence of query t's token: ids[s - 1] = ids[t], s < t.
            before = F.pad(self.ids, (1, 0), value=-1)[:, :-1]
            after = (before[:, None] == self.ids[:, start : start + t, None]) & (keys < at[:, None])
            self._sum("induction", self._picked(weights, after), real & after.any(-1))
        if self.aligned is not None:
            if tuple(self.aligned.shape[::2]) != (B, S) or self.aligned.shape[1] < start + t:
                raise InputError(
                    f"aligned has shape {tuple(self.aligned.shape)}; cross-attention has batch {B}, source {S}"
                )
            pairs = self.aligned[:, start : start + t]
            self._sum("alignment", self._picked(weights, pairs), real & pairs.any(-1))
        distance = most.indices - at
        self.distances.append(distance.transpose(0, 1)[:, later])

    def _picked(self, weights: Tensor, keys: Tensor) -> Tensor:
        return (weights * keys[:, None]).sum(-1)

    def _sum(self, name: str, values: Tensor, counted: Tensor) -> None:
        total, n = self.sums.get(name, (0, 0))
        self.sums[name] = total + (values.double() * counted[:, None]).sum((0, 2)), n + int(counted.sum())

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


def repeated_tokens(vocab_size: int, *, length: int = 32, batch: int = 4, seed: int = 0) -> Int[Tensor, "B T"]:
    """Rows of random tokens, each row twice over: what comes next is known only from what came before."""
    if vocab_size < length:
        raise InputError(f"{length} different tokens can not be drawn from {vocab_size}; take length={vocab_size}")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([torch.randperm(vocab_size, generator=generator)[:length] for _ in range(batch)])
    return torch.cat([drawn, drawn], 1)


def copied_tokens(source: Int[Tensor, "B S"], target: Int[Tensor, "B T"]) -> Bool[Tensor, "B T S"]:
    """For `head_scores(aligned=)`: the source tokens that are the token each position of the target is about to write."""
    written = F.pad(target[:, 1:], (0, 1), value=-1)
    return written[..., None] == source[:, None]


def _strips(seen: Seen, site: str) -> Iterator[tuple[int, Float[Tensor, "B H t S"]]]:
    T = seen[f"{site.removesuffix('.weights')}.q"].shape[2]
    step = max(STRIP // seen.rows(site, rows=slice(0, 1)).numel(), 1)
    for start in range(0, T, step):
        yield start, seen.rows(site, rows=slice(start, min(start + step, T)))


@contextmanager
def still(model: nn.Module) -> Generator[None]:
    """Without dropout inside; each module's mode is put back after."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
