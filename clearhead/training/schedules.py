"""Learning rate schedules: pure functions of the step."""

from __future__ import annotations

import math

from clearhead.training.recipe import Train


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
