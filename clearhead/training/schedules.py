"""Schedules of the learning rate, of the batch and of the windows' length: pure functions of the step."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from clearhead.training.recipe import Train


class Stage(NamedTuple):
    """Steps whose batches have one shape: from `first` on, before `stop`."""

    first: int
    stop: int
    batch_halvings: int  # a step's batch has batch_tokens / 2^halvings tokens
    length_halvings: int  # and its windows data.length / 2^halvings


def lr_factor(step: int, train: Train) -> float:
    """The learning rate at a step (counted from 0), divided by its highest value. All schedules rise linearly over `warmup`.

    noam: then falls as 1 / sqrt(step) (section 5.3 of the paper). cosine: then falls along half a cosine to `min_lr`.
    wsd: stays, and falls linearly over the last `decay` of the steps. constant: stays.
    """
    now, warmup = step + 1, max(train.warmup, 1)
    rise = min(1.0, now / warmup)
    match train.schedule:
        case "noam":
            return min(rise, math.sqrt(warmup / now))
        case "cosine":
            done = min(1.0, max(0.0, (now - warmup) / max(train.steps - warmup, 1)))
            return rise * (train.min_lr + (1 - train.min_lr) * (1 + math.cos(math.pi * done)) / 2)
        case "wsd":
            length = max(train.decay * train.steps, 1)
            left = min(1.0, (train.steps - now + 1) / length)
            return rise * (train.min_lr + (1 - train.min_lr) * left)
        case "constant":
            return rise


def max_lr(train: Train, d_model: int) -> float:
    """The highest learning rate of AdamW; with noam and lr=0 the paper's: 1 / sqrt(d_model x warmup)."""
    return train.lr or 1 / math.sqrt(d_model * max(train.warmup, 1))


def stages(train: Train) -> list[Stage]:
    """The steps of a run, cut where their batches change shape.

    Each schedule's doublings are at equal distances, the last one when `growth` of the steps are done, so that the last step has
    the full batch and length. Where there are fewer steps than doublings, some stages are empty and left out.
    """
    end = min(int(train.growth * train.steps), train.steps - 1)
    kinds = (train.batch_doublings, train.length_doublings)
    doubled = [[-(-i * end // n) for i in range(1, n + 1)] for n in kinds]  # at these steps
    firsts = sorted({0, *doubled[0], *doubled[1]})
    halvings = ([sum(at > first for at in steps) for steps in doubled] for first in firsts)
    return [
        Stage(first, stop, *left)
        for (first, stop), left in zip(pairwise([*firsts, train.steps]), halvings, strict=True)
    ]


def mean_batch(train: Train) -> float:
    """The tokens of all steps, as a share of what they would be without a batch schedule."""
    return sum((each.stop - each.first) / 2**each.batch_halvings for each in stages(train)) / train.steps


def spell_batch(train: Train) -> str:
    """The tokens of a step, for a sentence."""
    first = train.batch_tokens >> stages(train)[0].batch_halvings
    return f"{first:,} to {train.batch_tokens:,}" if first < train.batch_tokens else f"{first:,}"
