"""Attribution of a logit: to heads and layers (`logit_attribution`), and to input tokens (`saliency`).

Dropout is off. Options (`mask=`, `target_mask=`, `segments=` ...) are passed to the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.config import Config
from clearhead.errors import InputError
from clearhead.inside.evaluation_mode import eval_mode
from clearhead.inside.logit_lens import check_head, head_stack
from clearhead.inside.probe import Seen, probe
from clearhead.kernels import Packed
from clearhead.layers.attention import MultiHeadAttention
from clearhead.layers.embedding import TokenEmbedding, TokenHead
from clearhead.models import Encoder, EncoderDecoder, Model


@dataclass(frozen=True)
class Attribution:
    """A logit (or the difference of two) as a sum. Each tensor is (B, T), or (B,) for a model of classes."""

    logit: Tensor
    # By name: embedding, blocks.0.attention.0 (head 0), blocks.0.attention.bias, blocks.0.feedforward ... bias
    parts: dict[str, Tensor]

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
    """How much each head and layer adds directly to the logit of `tokens`; by default, of the model's most likely ones.

    In a pre-norm model the residual stream before the last norm is a sum. With that norm's scale held fixed the logit is linear
    in it, so the parts sum to the logit. What a layer does through later layers counts as theirs. With `against`, the
    difference to the logits of other tokens is attributed: what speaks for one and against the other.
    """
    _check_linear(model)
    stack, prefix = head_stack(model)
    steps = ("attention", "cross") if isinstance(model, EncoderDecoder) else ("attention",)
    sites = [f"{prefix}blocks.*.{site}" for site in (*(f"{step}.out" for step in steps), "feedforward.hidden")]
    last = f"{prefix}blocks.{len(stack.blocks) - 1}.residual"
    with eval_mode(model), probe(model, f"{prefix}embedding", *sites, last) as seen:
        out = model(*inputs, **options)
    chosen = out.argmax(-1) if tokens is None else tokens
    direction, bias = _logit_direction(model, out, chosen)
    logit = out.gather(-1, chosen[..., None])[..., 0]
    if against is not None:
        other, other_bias = _logit_direction(model, out, against)
        direction, bias = direction - other, bias - other_bias
        logit = logit - out.gather(-1, against[..., None])[..., 0]
    is_classes = model.config.head == "classes"
    if is_classes:
        assert isinstance(model, Encoder)
        # The weight of each position in the pooled state: pool states that are one-hot in their own position.
        T = seen[last].shape[1]
        one_hot = torch.eye(T, dtype=direction.dtype, device=direction.device).expand(len(direction), T, T)
        direction = model.pooled(one_hot, options.get("mask"))[..., None] * direction[:, None]
    pull, constant = _through_norm(stack.norm, seen[last].to(direction.dtype), direction)
    parts = _parts(model, seen, steps, pull)
    if is_classes:
        parts, constant = {name: part.sum(1) for name, part in parts.items()}, constant.sum(1)
    return Attribution(logit, {**parts, "bias": bias + constant})


def _parts(model: Model, seen: Seen, steps: tuple[str, ...], pull: Float[Tensor, "B T D"]) -> dict[str, Tensor]:
    """The product of `pull` with what the embedding, each head and each layer wrote to the stream, (B, T) each."""

    def product(x: Tensor) -> Tensor:
        return (x.to(pull.dtype) * pull).sum(-1)

    stack, prefix = head_stack(model)
    parts = {"embedding": product(seen[f"{prefix}embedding"])}
    for number, block in enumerate(stack.layers):
        name = f"{prefix}blocks.{number}"
        for step in steps:
            attention = block.attention if step == "attention" else block.cross
            assert isinstance(attention, MultiHeadAttention)
            back = (pull @ _dense(attention.o_proj).to(pull)).unflatten(-1, (-1, attention.d_head))
            heads = (seen[f"{name}.{step}.out"].to(pull).transpose(1, 2) * back).sum(-1)  # (B, T, H)
            parts |= {f"{name}.{step}.{head}": heads[..., head] for head in range(heads.shape[-1])}
            if attention.o_proj.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                parts[f"{name}.{step}.bias"] = product(attention.o_proj.bias)
        parts[f"{name}.feedforward"] = product(block.feedforward.down(seen[f"{name}.feedforward.hidden"]))
    return parts


def _logit_direction(model: Model, out: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The head's row and bias for the logit of each token or class."""
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
    """The vector g and number c with u . norm(x) = g . x + c. For a part y of x, g . y is its share at x's own scale."""
    if isinstance(norm, nn.LayerNorm):
        scaled = u * norm.weight.to(u) * (x.var(-1, correction=0, keepdim=True) + norm.eps).rsqrt()
        constant = 0 * u if norm.bias is None else u * norm.bias.to(u)  # pyright: ignore[reportUnnecessaryComparison]
        return scaled - scaled.mean(-1, keepdim=True), constant.sum(-1)
    if isinstance(norm, nn.RMSNorm):
        assert norm.eps is not None
        return u * norm.weight.to(u) * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt(), (0 * u).sum(-1)
    return u, (0 * u).sum(-1)


def _dense(linear: nn.Module) -> Tensor:
    """A module's matrix, dequantised if it is packed; with what LoRA adds to it in training."""
    weight: Any = linear.weight
    if isinstance(weight, Packed):
        weight = weight.product(torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device), None).T
    lora: Any = linear
    return weight + lora.lora_scale * (lora.lora_b @ lora.lora_a) if hasattr(linear, "lora_a") else weight


def saliency(
    model: Model, *inputs: Tensor, position: int = -1, token: Int[Tensor, " B"] | None = None, **options: Any
) -> list[Float[Tensor, "B _"]]:
    """Gradient times input: how much a logit changes if each input's embedding grows a little, summed over the width.

    One tensor for each input, one number for each token, patch or frame. The logit is that of `token` at `position` (or of the
    class `token`); by default, of the most likely one. It holds for small changes; a token that matters only by its presence
    may show as 0.
    """
    check_head(model)
    entered: list[Tensor] = []

    def replace(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        entered.append(out.detach().requires_grad_())
        return entered[-1]

    embeddings = {model.tokens}
    if isinstance(model, EncoderDecoder) and model.source is not None:
        embeddings.add(model.source)
    handles = [module.register_forward_hook(replace) for module in embeddings]
    try:
        with eval_mode(model), torch.enable_grad():
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


def is_linear(config: Config) -> bool:
    """Whether logits of a model with a head are sums of what its layers wrote: `logit_attribution` takes only these."""
    classes = config.head == "classes" and (config.pool == "max" or config.pooler or config.pool_normed)
    return config.norm_first and not (config.head == "tokens" and config.head_transform) and not classes


def _check_linear(model: Model) -> None:
    """Refuse models whose logits are not linear in the residual stream."""
    check_head(model)
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
