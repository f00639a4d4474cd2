"""Readings: numbers that sum up what a model does with an input. Each takes a model and what the model is called with.

    logit_lens(model, tokens)                      # what each layer would already say
    logit_attribution(model, tokens)               # which heads and layers a logit is the sum of
    saliency(model, tokens)                        # how much each input token moves an answer

Dropout is off while a reading is taken. Options (`mask=`, `target_mask=`, `segments=` ...) go on to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.errors import InputError
from clearhead.inside.heads import still
from clearhead.inside.probe import Seen, probe
from clearhead.layers.embedding import TokenEmbedding, TokenHead
from clearhead.layers.linear import Packed
from clearhead.models import Encoder, EncoderDecoder, Model
from clearhead.models.stack import Stack

# What each layer would say.


@torch.no_grad()
def logit_lens(
    model: Model, *inputs: Tensor, **options: Any
) -> Float[Tensor, "layers B T V"] | Float[Tensor, "layers B C"]:
    """The model's head applied to the residual stream as it enters the first block and leaves each (nostalgebraist 2020).

    The last entry is the model's answer, bit for bit as it is without gradients. Early ones are a reading: no layer computes
    with them.
    """
    _check_head(model)
    look = _look(model, inputs, options, "blocks.*.residual")
    stack, _ = _writing(model)
    said: list[Tensor] = []
    for x in (look.entered, *(look.seen[site] for site in look.seen)):
        states = stack.norm(x)
        if model.config.head == "classes":
            assert isinstance(model, Encoder)
            assert model.head is not None
            said.append(model.head(model.pooled(states, options.get("mask"))))
        else:
            said.append(model.project(states))
    return torch.stack(said)


# What a logit is the sum of.


@dataclass(frozen=True)
class Attribution:
    """A logit (or the difference of two) as a sum. Each tensor is (B, T), or (B,) where the model scores classes."""

    logit: Tensor
    parts: dict[
        str, Tensor
    ]  # embedding, blocks.0.attention.0 (head 0), blocks.0.attention.bias, blocks.0.feedforward ... bias

    @property
    def total(self) -> Tensor:
        return reduce(torch.add, self.parts.values())


@torch.no_grad()
def logit_attribution(
    model: Model,
    *inputs: Tensor,
    tokens: Int[Tensor, "B T"] | Int[Tensor, " B"] | None = None,
    against: Int[Tensor, "B T"] | Int[Tensor, " B"] | None = None,
    **options: Any,
) -> Attribution:
    """How much each head and layer adds to the logit of `tokens`, directly; without `tokens`, of the model's own choice.

    In a pre-norm model the stream before the last norm is a sum, and with that norm's scale held at what it was the logit is
    linear in it: parts sum to the logit. What a layer does through later layers is counted as theirs. `against` asks for the
    difference to the logits of other tokens: what speaks for one and against the other.
    """
    _check_linear(model)
    steps = ("attention", "cross") if isinstance(model, EncoderDecoder) else ("attention",)
    patterns = [f"blocks.*.{part}" for part in (*(f"{step}.out" for step in steps), "feedforward.hidden", "residual")]
    look = _look(model, inputs, options, *patterns)
    seen, (stack, place) = look.seen, _writing(model)
    chosen = look.out.argmax(-1) if tokens is None else tokens
    direction, bias = _row(model, look.out, chosen)
    logit = look.out.gather(-1, chosen[..., None])[..., 0]
    if against is not None:
        other, other_bias = _row(model, look.out, against)
        direction, bias = direction - other, bias - other_bias
        logit = logit - look.out.gather(-1, against[..., None])[..., 0]
    if model.config.head == "classes":
        assert isinstance(model, Encoder)
        # How much of each position the pooled state holds: the pool of states that name their own position.
        T = look.entered.shape[1]
        named = torch.eye(T, dtype=direction.dtype, device=direction.device).expand(len(direction), T, T)
        direction = model.pooled(named, options.get("mask"))[..., None] * direction[:, None]
    last = seen[f"{place}blocks.{len(stack.blocks) - 1}.residual"].to(direction.dtype)
    pull, constant = _through_norm(stack.norm, last, direction)

    def add(x: Tensor) -> Tensor:
        each = (x.to(pull.dtype) * pull).sum(-1)
        return each.sum(1) if model.config.head == "classes" else each

    parts = {"embedding": add(look.entered)}
    for number, block in enumerate(stack.layers):
        name = f"{place}blocks.{number}"
        for step in steps:
            attention = block.attention if step == "attention" else block.cross
            assert attention is not None
            back = (pull @ _dense(attention.o_proj.weight).to(pull)).unflatten(-1, (-1, attention.d_head))
            heads = (seen[f"{name}.{step}.out"].to(pull).transpose(1, 2) * back).sum(-1)  # (B, T, H)
            heads = heads.sum(1) if model.config.head == "classes" else heads
            parts |= {f"{name}.{step}.{head}": heads[..., head] for head in range(heads.shape[-1])}
            if attention.o_proj.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                parts[f"{name}.{step}.bias"] = add(attention.o_proj.bias)
        parts[f"{name}.feedforward"] = add(block.feedforward.down(seen[f"{name}.feedforward.hidden"]))
    parts["bias"] = bias + (constant.sum(1) if model.config.head == "classes" else constant)
    return Attribution(logit, parts)


def _row(model: Model, out: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The direction that the head reads a token's or a class's logit from, and its bias."""
    if ids.shape != out.shape[:-1] or ids.is_floating_point() or bool((ids < 0).any() | (ids >= out.shape[-1]).any()):
        raise InputError(
            f"a logit of each place is asked for by ids of shape {tuple(out.shape[:-1])}, from 0 to {out.shape[-1] - 1}; "
            f"got {ids.dtype} of shape {tuple(ids.shape)}"
        )
    wide = torch.promote_types(out.dtype, torch.float32)
    head = model.head
    assert head is not None
    weight: Any = head.weight
    if weight is None:
        assert isinstance(model.tokens, TokenEmbedding)
        weight = model.tokens.weight
    rows = weight.rows(ids) if isinstance(weight, Packed) else F.embedding(ids, weight)
    scale = head.scale if isinstance(head, TokenHead) else 1.0
    bias: Any = head.bias
    return rows.to(wide) * scale, torch.zeros(()).to(rows) if bias is None else bias[ids].to(wide)


def _through_norm(norm: nn.Module, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The vector g and number c with u . norm(x) = g . x + c, and g . y what y, a part of x, adds under x's own scale."""
    if isinstance(norm, nn.LayerNorm):
        scaled = u * norm.weight.to(u) * (x.var(-1, correction=0, keepdim=True) + norm.eps).rsqrt()
        constant = 0 * u if norm.bias is None else u * norm.bias.to(u)  # pyright: ignore[reportUnnecessaryComparison]
        return scaled - scaled.mean(-1, keepdim=True), constant.sum(-1)
    if isinstance(norm, nn.RMSNorm):
        assert norm.eps is not None
        return u * norm.weight.to(u) * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt(), (0 * u).sum(-1)
    return u, (0 * u).sum(-1)


def _dense(weight: Tensor | Packed) -> Tensor:
    if isinstance(weight, Packed):
        return weight.product(torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device), None).T
    return weight


# What an answer depends on.


def saliency(
    model: Model, *inputs: Tensor, position: int = -1, token: Int[Tensor, " B"] | None = None, **options: Any
) -> list[Float[Tensor, "B _"]]:
    """How much a logit would change if each input's embedding grew a little: gradient times input, summed over the width.

    One tensor for each input, one number a token, patch or frame. The logit is that of `token` at `position` (of the class
    `token`, where classes are scored); without, of the model's own choice there. True for small changes; a token that matters
    only by being there at all may show as 0.
    """
    _check_head(model)
    entered: list[Tensor] = []

    def replace(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        entered.append(out.detach().requires_grad_())
        return entered[-1]

    embeddings = {model.tokens}
    if isinstance(model, EncoderDecoder) and model.source is not None:
        embeddings.add(model.source)
    handles = [module.register_forward_hook(replace) for module in embeddings]
    try:
        with still(model), torch.enable_grad():
            out = model(*inputs, **options)
            if out.ndim == 3:
                if not -out.shape[1] <= position < out.shape[1]:
                    raise InputError(f"position={position} is outside of {out.shape[1]} tokens; -1 is the last")
                out = out[:, position]
            chosen = out.argmax(-1) if token is None else token
            logits = out.gather(-1, chosen[:, None])
            slopes = torch.autograd.grad(logits.sum(), entered, materialize_grads=True)
    finally:
        for handle in handles:
            handle.remove()
    return [(x.detach() * slope).sum(-1) for x, slope in zip(entered, slopes, strict=True)]


# What lies near what.


@torch.no_grad()
def neighbours(
    model: Model | Float[Tensor, "V D"], plus: Sequence[int], minus: Sequence[int] = (), *, n: int = 10
) -> list[tuple[int, float]]:
    """Tokens whose embeddings point the same way, with their cosine, nearest first.

    Of several tokens, those near the sum of their directions: king - man + woman is plus=[king, woman], minus=[man]
    (Mikolov et al. 2013). The tokens asked with are left out of the answer, as they always are; they would often win.
    """
    table = _table(model)
    given = [*plus, *minus]
    if not plus or not all(0 <= id < len(table) for id in given):
        raise InputError(f"neighbours are asked for by at least one id, each from 0 to {len(table) - 1}; got {given}")
    unit = F.normalize(table.float(), dim=-1)
    wish = unit[list(plus)].sum(0) - (unit[list(minus)].sum(0) if minus else 0.0)
    near = unit @ F.normalize(wish, dim=0)
    near[given] = -torch.inf
    best = near.topk(min(n, len(table) - len(set(given))))
    return [(int(id), float(cosine)) for cosine, id in zip(best.values, best.indices, strict=True)]


def _table(model: Model | Tensor) -> Tensor:
    if isinstance(model, Tensor):
        return model
    if not isinstance(model.tokens, TokenEmbedding):
        raise InputError("this model reads pictures and has no embedding of tokens; give a table of shape (V, D)")
    weight: Any = model.tokens.weight
    return weight.rows(torch.arange(weight.shape[0], device=weight.device)) if isinstance(weight, Packed) else weight


# What readings share.


@dataclass(frozen=True)
class _Look:
    seen: Seen
    entered: Tensor  # the residual stream before the first block
    out: Tensor


def _look(model: Model, inputs: tuple[Tensor, ...], options: dict[str, Any], *patterns: str) -> _Look:
    """One run of the stack that writes the answer, with these of its sites kept."""
    stack, place = _writing(model)
    entered: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Any, ...]) -> None:
        entered.append(given[0].detach())

    handle = stack.blocks[0].register_forward_pre_hook(keep)
    try:
        with still(model), probe(model, *(place + pattern for pattern in patterns)) as seen:
            out = model(*inputs, **options)
    finally:
        handle.remove()
    return _Look(seen, entered[-1], out)


def _writing(model: Model) -> tuple[Stack, str]:
    """The stack whose states the head reads, and how the names of its sites begin."""
    return (model.decoder, "decoder.") if isinstance(model, EncoderDecoder) else (model, "")


def _check_head(model: Model) -> None:
    if model.config.head == "none":
        raise InputError(
            "this model ends in states (head='none') and scores nothing; build it with head='tokens' or 'classes'"
        )


def _check_linear(model: Model) -> None:
    """Refuse models whose logits are no sum over the stream."""
    _check_head(model)
    config = model.config
    if not config.norm_first:
        raise InputError(
            "this model norms its stream after each step (norm_first=false), so that its logits are no sum of what the layers "
            "wrote; ablate heads instead, or use saliency"
        )
    if config.head == "tokens" and config.head_transform:
        raise InputError(
            "this model's head has a layer of its own (head_transform=true), so that logits are no sum; ablate heads instead"
        )
    if config.head == "classes" and (config.pool == "max" or config.pooler or config.pool_normed):
        raise InputError(
            f"classes are read from a pooled state that is no sum (pool={config.pool!r}, pooler={config.pooler}, "
            f"pool_normed={config.pool_normed}); ablate heads instead"
        )
