"""The ablation sweep: what a model loses without each of its heads.

    found = sweep(model, tokens, targets=following)
    found.base["loss"], found.effects[0]      # Effect(place="blocks.0.attention", head=0, delta={"loss": ..., "logit": ...})

`sweep` keeps one forward pass, block by block. Removing a head of layer L changes nothing below L nor in L's attention, so only
what comes after is computed, for all heads of the layer in one batch: on average half of the blocks, in large matrix products.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import InputError, did_you_mean
from clearhead.inside.evaluation_mode import eval_mode
from clearhead.inside.interventions import intervene, zero
from clearhead.inside.sites import blocks_of, uncompiled
from clearhead.inside.target_loss import TargetLoss
from clearhead.layers.attention import Lowered, MultiHeadAttention
from clearhead.layers.block import Block
from clearhead.layers.masks import Mask
from clearhead.layers.positions import Angles
from clearhead.models import EncoderDecoder, Model
from clearhead.models.stack import Stack


@dataclass(frozen=True)
class Effect:
    """What changes when one head is removed."""

    place: str  # the attention's name, such as "decoder.blocks.2.cross"
    head: int
    delta: Mapping[str, float]


@dataclass(frozen=True)
class Sweep:
    """Measures of the whole model, and the effect of each head on them. `+` is the mean of two sweeps, weighted by `n_targets`."""

    base: Mapping[str, float]
    effects: tuple[Effect, ...]
    n_targets: int = 1

    def __add__(self, other: Sweep) -> Sweep:
        n, m = self.n_targets, other.n_targets

        def mix(one: Mapping[str, float], two: Mapping[str, float]) -> dict[str, float]:
            return {name: (n * one[name] + m * two[name]) / (n + m) for name in one}

        pairs = zip(self.effects, other.effects, strict=True)
        effects = tuple(replace(one, delta=mix(one.delta, two.delta)) for one, two in pairs)
        return Sweep(mix(self.base, other.base), effects, n + m)


def attentions_of(model: Model, pattern: str = "*") -> dict[str, MultiHeadAttention]:
    """The attentions whose names match, such as "decoder.blocks.*.cross"."""
    found: dict[str, MultiHeadAttention] = {}
    for name, block in blocks_of(model).items():
        steps = ("attention", block.attention), ("cross", block.cross)
        found |= {f"{name}.{step}": attention for step, attention in steps if attention is not None}
    matched = fnmatch.filter(found, pattern)
    if not matched:
        raise InputError(f"no attention matches {pattern!r}; {did_you_mean(pattern, found)}")
    return {name: found[name] for name in matched}


def n_heads_of(attention: MultiHeadAttention) -> int:
    return attention.o_proj.in_features // attention.d_head


def sweep_by(
    model: Model,
    measure: Callable[[Model], Mapping[str, float]],
    *,
    sites: str = "*",
    progress: Callable[[], object] = lambda: None,
) -> Sweep:
    """Any measures of the model, such as {"bleu": ...} of generated texts, without each head, one head at a time.

    `progress` is called after each head.
    """
    wanted = attentions_of(model, sites)
    base = measure(model)
    effects: list[Effect] = []
    for place, attention in wanted.items():
        for head in range(n_heads_of(attention)):
            with intervene(model, zero(f"{place}.out", head=head)):
                measured = measure(model)
            effects.append(Effect(place, head, {name: measured[name] - base[name] for name in base}))
            progress()
    return Sweep(base, tuple(effects))


@torch.no_grad()
def sweep(
    model: Model,
    *inputs: Tensor,
    targets: Int[Tensor, "B T"] | Int[Tensor, " B"],
    sites: str = "*",
    ignore: int = -100,
    max_tokens: int = 4096,
    progress: Callable[[], object] = lambda: None,
    **options: Any,
) -> Sweep:
    """Mean loss and mean logit of the targets without each head, minus those of the whole model.

    The model is called with `inputs` and `options`. `targets` are the right tokens, one for each position (`ignore` for none),
    or the right classes. `sites` is a pattern of attention names. At most about `max_tokens` tokens are computed at once.
    `progress` is called after each attention.
    """
    wanted = attentions_of(model, sites)
    if options.get("cache") is not None:
        raise InputError(
            "a sweep computes blocks anew, without the tokens that a cache holds; got cache=...; give the whole text, and "
            "ignore= where no loss is to be measured"
        )
    with eval_mode(model), uncompiled(model):
        record = _ForwardRecord.of(model, inputs, options)
        score = TargetLoss(model, targets, ignore, options.get("mask"))
        loss, logit = (float(x[0]) for x in score(record.last, 1))
        effects: list[Effect] = []
        for place, attention in wanted.items():
            at_once = max(1, max_tokens // record.n_tokens)
            for heads in torch.arange(n_heads_of(attention)).split(at_once):
                losses, logits = score(record.without(place, heads), len(heads))
                for head, a, b in zip(heads.tolist(), losses.tolist(), logits.tolist(), strict=True):
                    effects.append(Effect(place, head, {"loss": a - loss, "logit": b - logit}))
            progress()
    return Sweep({"loss": loss, "logit": logit}, tuple(effects), score.n)


@dataclass(frozen=True)
class _Call:
    """The inputs of one block."""

    x: Float[Tensor, "B T D"]
    mask: Mask | Lowered | None
    angles: Angles | None
    memory: Float[Tensor, "B _ D"] | None
    memory_mask: Mask | None

    def times(self, n: int) -> _Call:
        """The inputs for n copies of the batch, one after the other."""
        B = len(self.x)

        def repeat(x: Any) -> Any:
            many = (
                isinstance(x, Tensor) and x.shape[0] == B and B > 1
            )  # what is shared by all rows is shared by all copies
            return x.repeat(n, *(1,) * (x.ndim - 1)) if many else x

        def repeat_mask(mask: Any) -> Any:
            if mask is None or B == 1:
                return mask
            if isinstance(mask, Lowered):
                pairs, empty, bias = repeat(mask.pairs), repeat(mask.empty), repeat(mask.bias)
                return replace(mask, mask=repeat_mask(mask.mask), bias=bias, pairs=pairs, empty=empty, blocks=None)
            documents = tuple(map(repeat, mask.documents))
            return replace(mask, keys=repeat(mask.keys), queries=repeat(mask.queries), documents=documents)

        return _Call(
            x=self.x.repeat(n, 1, 1),
            mask=repeat_mask(self.mask),
            angles=None if self.angles is None else (repeat(self.angles[0]), repeat(self.angles[1])),
            memory=None if self.memory is None else self.memory.repeat(n, 1, 1),
            memory_mask=repeat_mask(self.memory_mask),
        )

    def run(self, block: Block, x: Tensor) -> Tensor:
        return block(x, self.mask, angles=self.angles, memory=self.memory, memory_mask=self.memory_mask)

    def attend(self, block: Block, x: Tensor) -> Tensor:
        attention = block.attention
        return block.step(x, block.attention_norm, lambda y: attention(y, self.mask, angles=self.angles))

    def cross(self, block: Block, x: Tensor) -> Tensor:
        cross = block.cross
        if cross is None or block.cross_norm is None:
            return x
        return block.step(x, block.cross_norm, lambda y: cross(y, self.memory_mask, memory=self.memory))


@dataclass(frozen=True)
class _ForwardRecord:
    """One forward pass: the inputs of each block, the outputs of its heads, and the final states."""

    model: Model
    blocks: dict[str, Block]
    calls: dict[str, _Call]  # by block
    outs: dict[str, Tensor]  # by attention, (B, H, T, E)
    last: Float[Tensor, "B _ D"]

    @classmethod
    def of(cls, model: Model, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> _ForwardRecord:
        calls: dict[str, _Call] = {}
        outs: dict[str, Tensor] = {}

        def enter(name: str) -> Callable[..., None]:
            def hook(_: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                calls[name] = _Call(*args, **{key: x for key, x in kwargs.items() if key != "cache"})

            return hook

        def leave(name: str) -> Callable[..., None]:
            def hook(_: Any, __: Any, out: Tensor) -> None:
                outs[name] = out

            return hook

        blocks = blocks_of(model)
        with ExitStack() as attached:
            for name, block in blocks.items():
                attached.callback(block.register_forward_pre_hook(enter(name), with_kwargs=True).remove)
            for name, attention in attentions_of(model).items():
                attached.callback(attention.heads.register_forward_hook(leave(name)).remove)
            stack = _stack(model, next(reversed(blocks)))
            attached.callback(stack.norm.register_forward_hook(leave("")).remove)
            model(*inputs, **options)
        return cls(model, blocks, calls, outs, outs.pop(""))

    @property
    def n_tokens(self) -> int:
        return max(call.x.shape[0] * call.x.shape[1] for call in self.calls.values())

    def without(self, place: str, heads: Int[Tensor, " n"]) -> Float[Tensor, "nB T D"]:
        """The final states of n copies of the model, each without one of these heads."""
        name, _, step = place.rpartition(".")
        block, call, n = self.blocks[name], self.calls[name], len(heads)
        attention = block.attention if step == "attention" else block.cross
        assert attention is not None
        out = self.outs[place]
        variants = out.repeat(n, 1, 1, 1)
        variants.unflatten(0, (n, -1))[torch.arange(n), :, heads] = 0
        projected = attention.o_proj(variants.transpose(1, 2).flatten(2))
        many = call.times(n)
        if step == "attention":
            x = many.cross(block, block.step(many.x, block.attention_norm, lambda _: projected))
        else:
            before = call.attend(block, call.x).repeat(n, 1, 1)
            assert block.cross_norm is not None
            x = block.step(before, block.cross_norm, lambda _: projected)
        x = block.step(x, block.feedforward_norm, block.feedforward)
        return self._finish(name, x, n)

    def _finish(self, name: str, x: Tensor, n: int) -> Tensor:
        """From the output of this block to the final states."""
        stack = name.rpartition("blocks.")[0]
        names = [key for key in self.blocks if key.startswith(f"{stack}blocks.")]
        for later in names[names.index(name) + 1 :]:
            x = self.calls[later].times(n).run(self.blocks[later], x)
        x = _stack(self.model, name).norm(x)
        if stack != "encoder.":
            return x
        memory, x = x, self.calls["decoder.blocks.0"].x.repeat(n, 1, 1)
        for later in (key for key in self.blocks if key.startswith("decoder.")):
            x = replace(self.calls[later].times(n), memory=memory).run(self.blocks[later], x)
        return _stack(self.model, "decoder.").norm(x)


def _stack(model: Model, block: str) -> Stack:
    if not isinstance(model, EncoderDecoder):
        return model
    return model.encoder if block.startswith("encoder.") else model.decoder
