"""The loss and the logit of target tokens or classes, computed from final states without holding all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import InputError
from clearhead.kernels import Packed
from clearhead.layers.embedding import TokenEmbedding, TokenHead
from clearhead.models import Encoder, Model
from clearhead.models.encoder import real_of

# Logits in memory at once, rows x columns: they fit a CPU's caches. Written to fresh memory, the product takes 1.5 times as long.
ROWS, COLUMNS = 512, 1024


class TargetLoss:
    """Mean loss and mean logit of the targets, from the final states of n copies of a batch."""

    def __init__(self, model: Model, targets: Tensor, ignore: int, mask: Any) -> None:
        self.model, self.targets, self.mask = model, targets, mask
        self.is_classes = isinstance(model, Encoder) and model.config.head == "classes"
        if model.config.head == "none":
            raise InputError("this model has head='none', no scores that could have a loss; build it with a head")
        self.chosen = targets != ignore
        self.n = int(self.chosen.sum())
        if self.n == 0:
            raise InputError(f"none of the {targets.numel()} targets counts (ignore={ignore}); give some")

    def __call__(self, states: Float[Tensor, "nB T D"], n: int) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        B, T = len(states) // n, states.shape[1]
        if self.targets.shape != ((B,) if self.is_classes else (B, T)):
            raise InputError(
                f"there are {B} rows of {T} tokens, but the targets are of shape {tuple(self.targets.shape)}; give one for "
                f"each {'row' if self.is_classes else 'token'}"
            )
        if self.is_classes:
            assert isinstance(self.model, Encoder)
            real = real_of(self.mask)
            states = self.model.pooled(states, None if real is None else real.repeat(n, 1))
        rows = states.unflatten(0, (n, B))[:, self.chosen].flatten(0, 1)
        right = self.targets[self.chosen].repeat(n).to(rows.device)
        parts = [self._per_row(*pair) for pair in zip(rows.split(ROWS), right.split(ROWS), strict=True)]
        losses, logits = (torch.cat(each).view(n, -1).mean(1) for each in zip(*parts, strict=True))
        return losses, logits

    def _per_row(self, rows: Float[Tensor, "N D"], right: Int[Tensor, " N"]) -> tuple[Tensor, Tensor]:
        """The loss and the target's logit of each row."""
        head, model = self.model.head, self.model
        if isinstance(head, TokenHead):
            table = model.tokens.weight if isinstance(model.tokens, TokenEmbedding) else None
            x, weight, bias = head.parts(rows[None], table)
            if not isinstance(weight, Packed):
                picked = (x[0] * weight[right]).sum(-1) + (0 if bias is None else bias[right])
                return log_sum_exp(x[0], weight, bias) - picked.to(_wide(picked)), picked
            logits = head(rows[None], table)[0]
        else:
            assert head is not None
            logits = head(rows)
        logits = logits.to(_wide(logits))
        picked = logits.gather(1, right[:, None])[:, 0]
        return logits.logsumexp(1) - picked, picked


def log_sum_exp(
    x: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], bias: Float[Tensor, " V"] | None = None
) -> Float[Tensor, " N"]:
    """log(sum(exp(x W^T + b))) over the vocabulary, COLUMNS of it at a time."""
    top = torch.full((len(x),), -torch.inf, device=x.device, dtype=_wide(x))
    total = torch.zeros_like(top)
    for start in range(0, len(weight), COLUMNS):
        columns = slice(start, start + COLUMNS)
        logits = F.linear(x, weight[columns], None if bias is None else bias[columns]).to(top.dtype)
        new = torch.maximum(top, logits.amax(1))
        total = total * (top - new).exp() + logits.sub_(new[:, None]).exp_().sum(1)
        top = new
    return top + total.log()


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
