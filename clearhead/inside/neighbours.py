"""Which tokens have embeddings that point the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.kernels import Packed
from clearhead.layers.embedding import TokenEmbedding
from clearhead.models import Model


@torch.no_grad()
def neighbours(
    model: Model | Float[Tensor, "V D"], plus: Sequence[int], minus: Sequence[int] = (), *, n: int = 10
) -> list[tuple[int, float]]:
    """The n tokens with the largest cosine to the given ones, as (id, cosine), nearest first.

    Several tokens stand for the sum of their directions: king - man + woman is plus=[king, woman], minus=[man]
    (Mikolov et al. 2013). The given tokens are left out, as is usual: they would often be the nearest.
    """
    table = embedding_table(model)
    given = [*plus, *minus]
    if not plus or not all(0 <= id < len(table) for id in given):
        raise InputError(f"neighbours are asked for by at least one id, each from 0 to {len(table) - 1}; got {given}")
    unit = F.normalize(table.float(), dim=-1)
    direction = unit[list(plus)].sum(0) - (unit[list(minus)].sum(0) if minus else 0.0)
    near = unit @ F.normalize(direction, dim=0)
    near[given] = -torch.inf
    best = near.topk(min(n, len(table) - len(set(given))))
    return [(int(id), float(cosine)) for cosine, id in zip(best.values, best.indices, strict=True)]


def embedding_table(model: Model | Tensor) -> Float[Tensor, "V D"]:
    """The embedding's rows, dequantised if they are packed; a table is returned as it is."""
    if isinstance(model, Tensor):
        return model
    if not isinstance(model.tokens, TokenEmbedding):
        raise InputError("this model reads pictures and has no embedding of tokens; give a table of shape (V, D)")
    weight: Any = model.tokens.weight
    return weight.rows(torch.arange(weight.shape[0], device=weight.device)) if isinstance(weight, Packed) else weight
