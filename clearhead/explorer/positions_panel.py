"""The positions panel: `positions`, every kind of position encoding side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.explorer.fields import Fields
from clearhead.explorer.forward_passes import ForwardPasses
from clearhead.explorer.wire_format import pack
from clearhead.layers.positions import DistanceBias, Learned, Positions, Rotary, Sinusoidal
from clearhead.layers.relative_positions import Alibi, RelativeBuckets
from clearhead.models import EncoderDecoder

WORDS = {
    "sinusoidal": "waves of growing length are added to the embeddings; near positions have near vectors",
    "learned": "one trained vector for each position is added to the embeddings",
    "rotary": "queries and keys are turned by an angle that grows with the position, so that only the distance matters",
    "alibi": "each head loses a fixed amount of score for each step of distance",
    "t5": "each head has a trained bias for each bucket of distance; buckets widen with the distance",
    "none": "this model is told nothing of positions",
}


def positions(passes: ForwardPasses, fields: Fields) -> bytes:
    """Each kind over the first `length` positions; the model's own kind with its own weights."""
    length, config = fields.integer("length", 2, 512, 64), passes.model.config
    model = passes.model
    own = model.decoder.positions if isinstance(model, EncoderDecoder) else model.positions
    d_pair = config.d_head + config.d_head % 2
    generator = torch.Generator().manual_seed(0)
    learned, buckets = Learned(d_model=config.d_model, max_len=length), RelativeBuckets(n_heads=config.n_heads)
    for weight in (learned.weight, buckets.weight):  # as they are before training
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
    examples: dict[str, Positions] = {
        "sinusoidal": Sinusoidal(d_model=config.d_model + config.d_model % 2),
        "learned": learned,
        "rotary": Rotary(d_head=d_pair),
        "alibi": Alibi(n_heads=config.n_heads),
        "t5": buckets,
        config.positions: own,
    }
    kinds: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for name, kind in examples.items():
        is_model = name == config.positions
        trained = "" if is_model or name not in ("learned", "t5") else "; this model has none, so these are untrained"
        kinds.append({"name": name, "is_model": is_model, "words": WORDS[name] + trained})
        for part, values in _numbers(kind, length).items():
            arrays[f"{name}.{part}"] = values.float().cpu().numpy()
    return pack({"kinds": kinds, "length": length}, **arrays)


def _numbers(kind: Positions, length: int) -> dict[str, Tensor]:
    """The table by position, the similarity of every two positions (1: equal), and its mean by distance."""
    n = length if kind.max_len is None else min(length, kind.max_len)
    at = torch.arange(n)
    if isinstance(kind, DistanceBias):
        # How much smaller a weight is for the distance alone, the mean over heads.
        distance = at[None, None, :] - at[None, :, None]
        bias = kind.dense(distance.to(_device(kind))).float().cpu()
        similarity = (bias - bias[:, :, :1, :1]).exp()[0].mean(0)
        return {"similarity": similarity, "bydistance": similarity[:, 0]}
    if isinstance(kind, Rotary):
        angles = at[:, None].float() * kind.frequencies(torch.device("cpu"))
        table = angles.cos()
        similarity = (angles[:, None] - angles[None]).cos().mean(-1)
    elif isinstance(kind, Sinusoidal | Learned):
        table = kind.table(at) if isinstance(kind, Sinusoidal) else kind.weight[:n].detach().float().cpu()
        unit = F.normalize(table.float(), dim=-1)
        similarity = unit @ unit.T
    else:
        return {"similarity": torch.ones(n, n), "bydistance": torch.ones(n)}
    by = torch.stack([similarity.diagonal(-d).mean() for d in range(n)])
    return {"table": table, "similarity": similarity, "bydistance": by}


def _device(kind: Positions) -> torch.device:
    return next((weight.device for weight in kind.parameters()), torch.device("cpu"))
