"""Attention rollout: attention summed up over all layers of a stack."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.inside.evaluation_mode import eval_mode
from clearhead.inside.head_scores import strips
from clearhead.inside.probe import Seen, probe
from clearhead.models import EncoderDecoder, Model


@torch.no_grad()
def attention_rollout(
    model: Model, *inputs: Tensor, stack: str = "", residual: float = 0.5, **options: Any
) -> Float[Tensor, "B T T"]:
    """From which input tokens each final state may come (Abnar & Zuidema 2020): the product over layers of (1 - r) mean + r I.

    It treats attention as all there is: the content of values and the feed-forward layers are left out. In an encoder-decoder,
    `stack` is "encoder" (the default) or "decoder" (its self-attention).
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
    with eval_mode(model), probe(model, f"{place}.*.attention.weights") as seen:
        model(*inputs, **options)
    flow: Tensor | None = None
    for site in seen:
        flow = roll(flow, mean_of_heads(seen, site), residual)
    assert flow is not None
    return flow


def roll(
    below: Float[Tensor, "B T T"] | None, mean: Float[Tensor, "B T T"], residual: float = 0.5
) -> Float[Tensor, "B T T"]:
    """The rollout after one more layer, from its attention's mean over heads."""
    step = (1 - residual) * mean + residual * torch.eye(mean.shape[-1]).to(mean)
    step = step / step.sum(-1, keepdim=True).clamp(min=1e-12)  # a row that may attend to nothing stays where it is
    return step if below is None else step @ below


def mean_of_heads(seen: Seen, site: str) -> Float[Tensor, "B T S"]:
    """The mean over heads of a site's weights, computed strip by strip."""
    S = seen.attention[site.removesuffix(".weights")].k.shape[2]
    return torch.cat([F.pad(weights.mean(1), (0, S - weights.shape[-1])) for _, weights in strips(seen, site)], 1)
