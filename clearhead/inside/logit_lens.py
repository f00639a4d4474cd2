"""The logit lens: what the model would predict after each layer."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.inside.evaluation_mode import eval_mode
from clearhead.inside.probe import probe
from clearhead.models import Encoder, EncoderDecoder, Model
from clearhead.models.stack import Stack


@torch.no_grad()
def logit_lens(
    model: Model, *inputs: Tensor, **options: Any
) -> Float[Tensor, "layers B T V"] | Float[Tensor, "layers B C"]:
    """The model's head applied to the residual stream before the first block and after each block (nostalgebraist 2020).

    The last entry equals the model's output without gradients, bit for bit. The earlier ones are an interpretation: no layer
    computes them. Dropout is off. `options` (`mask=`, `target_mask=`, `segments=` ...) are passed to the model.
    """
    check_head(model)
    stack, prefix = head_stack(model)
    with eval_mode(model), probe(model, f"{prefix}embedding", f"{prefix}blocks.*.residual") as seen:
        model(*inputs, **options)
    logits: list[Tensor] = []
    for site in seen:
        states = stack.norm(seen[site])
        if model.config.head == "classes":
            assert isinstance(model, Encoder)
            assert model.head is not None
            logits.append(model.head(model.pooled(states, options.get("mask"))))
        else:
            logits.append(model.project(states))
    return torch.stack(logits)


def head_stack(model: Model) -> tuple[Stack, str]:
    """The stack whose states the head reads, and the prefix of its sites' names."""
    return (model.decoder, "decoder.") if isinstance(model, EncoderDecoder) else (model, "")


def check_head(model: Model) -> None:
    """Refuse a model without logits."""
    if model.config.head == "none":
        raise InputError(
            "this model ends in states (head='none') and scores nothing; build it with head='tokens' or 'classes'"
        )
