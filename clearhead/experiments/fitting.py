"""One short training loop for all experiments: fresh batches, cross-entropy, AdamW unless another optimizer is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

import clearhead.models as models
from clearhead.config import Config
from clearhead.families import preset

IGNORED = -100  # a target that is not asked for
PATIENCE = 10

Batch = tuple[tuple[Tensor, ...], Int[Tensor, "B T"]]  # what the model is called with, and the answers
Batches = Callable[[torch.Generator], Batch]


def small(name: str = "gpt2", **changes: Any) -> Config:
    """A preset at an experiment's size, without dropout: data is made anew for each step, so there is nothing to overfit.

    With Xavier's init and a head of its own, two layers complete repetitions after 200 steps; with GPT-2's small init and tied
    embeddings not after 500.
    """
    width = dict(d_model=64, n_heads=4, n_layers=2, dropout=0.0, attention_dropout=0.0)
    start = dict(init="xavier", init_residual="same", embedding_scale=True, tie_embeddings=False)
    return preset(name, **{**width, **start, **changes})


def build(config: Config, seed: int) -> models.Model:
    return models.build(config, seed=seed)


def fit(
    model: nn.Module,
    batches: Batches,
    *,
    steps: int,
    lr: float = 3e-3,
    warmup: int = 20,
    seed: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    enough: float = 0.0,
) -> list[float]:
    """Train the model in place; the losses of all steps. A loss that is not finite ends the training: the rest counts as infinite.

    The learning rate rises for `warmup` steps and falls linearly to 0 in the second half. Training ends before `steps` once the
    mean loss of PATIENCE steps is below `enough`.
    """
    generator = torch.Generator().manual_seed(1_000 + seed)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    losses: list[float] = []
    model.train()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / max(warmup, 1), 2 * (1 - step / (steps + 1)))
        loss = loss_on(model, batches(generator))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            losses += [math.inf] * (steps - len(losses))
            break
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if len(losses) >= PATIENCE and sum(losses[-PATIENCE:]) < enough * PATIENCE:
            break
    model.eval()
    return losses


def loss_on(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(*inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches, *, seed: int = 0, rounds: int = 4) -> float:
    """The share of asked-for targets that have the highest score, on batches that training has not drawn."""
    generator, right, asked = torch.Generator().manual_seed(9_000_000 + seed), 0, 0
    model.eval()
    for _ in range(rounds):
        inputs, targets = batches(generator)
        counted = targets != IGNORED
        right += int((model(*inputs).argmax(-1) == targets)[counted].sum())
        asked += int(counted.sum())
    return right / asked


def last(losses: list[float], share: float = 0.1) -> float:
    """The mean loss of the last steps."""
    tail = losses[-max(1, round(share * len(losses))) :]
    return sum(tail) / len(tail)
