"""`sweep`: what a model loses without each of its heads.

    found = sweep(model, tokens, targets=following)
    found.base["loss"], found.effects[0]      # Effect(place="blocks.0.attention", head=0, delta={"loss": ..., "logit": ...})

One forward pass is kept, block by block. Without a head of layer L, everything below L and L's attention itself are as they were:
only what comes after is computed, for all heads of the layer at once. That is half of the blocks on average, in large products.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import InputError, did_you_mean
from clearhead.inside.interventions import intervene, zero
from clearhead.inside.probe import blocks_of, uncompiled
from clearhead.layers.attention import MultiHeadAttention
from clearhead.layers.block import Block
from clearhead.layers.embedding import TokenEmbedding, TokenHead
from clearhead.layers.linear import Packed
from clearhead.layers.masks import Mask
from clearhead.layers.positions import Angles, Bias
from clearhead.models import Encoder, EncoderDecoder, Model
from clearhead.models.encoder import real_of
from clearhead.models.stack import Stack

# Logits that are held at once. A processor's caches hold as many; written to fresh memory, the product takes half as long again.
ROWS, WORDS = 512, 1024


@dataclass(frozen=True)
class Effect:
    """What changes when one head is taken away."""

    place: str  # the attention's name, such as "decoder.blocks.2.cross"
    head: int
    delta: Mapping[str, float]


@dataclass(frozen=True)
class Sweep:
    """The model's own figures, and each head's effect on them. `+` is the sweep over both texts, by their number of targets."""

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
    """Any figures of the model without each head, one head at a time: {"bleu": ...} of texts it writes, say.

    `progress` is called after each head.
    """
    wanted = attentions_of(model, sites)
    base = measure(model)
    effects: list[Effect] = []
    for place, attention in wanted.items():
        for head in range(n_heads_of(attention)):
            with intervene(model, zero(f"{place}.out", head=head)):
                figures = measure(model)
            effects.append(Effect(place, head, {name: figures[name] - base[name] for name in base}))
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
    """Mean loss and mean logit of the targets without each head, less those of the whole model.

    `inputs` and `options` are what the model is called with; `targets` are the right tokens, one for each position (`ignore`:
    none), or the right classes. `sites` are the attentions' names, by pattern. `max_tokens` bounds what is computed at once;
    `progress` is called after each attention.
    """
    wanted = attentions_of(model, sites)
    with _evaluating(model), uncompiled(model):
        kept = _Kept.of(model, inputs, options)
        score = _Score(model, targets, ignore, options.get("mask"))
        loss, logit = (float(x[0]) for x in score(kept.last, 1))
        effects: list[Effect] = []
        for place, attention in wanted.items():
            at_once = max(1, max_tokens // kept.n_tokens)
            for heads in torch.arange(n_heads_of(attention)).split(at_once):
                losses, logits = score(kept.without(place, heads), len(heads))
                for head, a, b in zip(heads.tolist(), losses.tolist(), logits.tolist(), strict=True):
                    effects.append(Effect(place, head, {"loss": a - loss, "logit": b - logit}))
            progress()
    return Sweep({"loss": loss, "logit": logit}, tuple(effects), score.n)


class _Score:
    """From final states of n variants of a batch to each one's mean loss and logit."""

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
        pieces = [self._few(*pair) for pair in zip(rows.split(ROWS), right.split(ROWS), strict=True)]
        losses, logits = (torch.cat(each).view(n, -1).mean(1) for each in zip(*pieces, strict=True))
        return losses, logits

    def _few(self, rows: Float[Tensor, "N D"], right: Int[Tensor, " N"]) -> tuple[Tensor, Tensor]:
        """Each row's loss, and the logit of its target."""
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
    """log(sum(exp(x W^T + b))) over the vocabulary, some words at a time."""
    top = torch.full((len(x),), -torch.inf, device=x.device, dtype=_wide(x))
    total = torch.zeros_like(top)
    for start in range(0, len(weight), WORDS):
        words = slice(start, start + WORDS)
        logits = F.linear(x, weight[words], None if bias is None else bias[words]).to(top.dtype)
        new = torch.maximum(top, logits.amax(1))
        total = total * (top - new).exp() + logits.sub_(new[:, None]).exp_().sum(1)
        top = new
    return top + total.log()


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@dataclass(frozen=True)
class _Call:
    """What one block was called with."""

    x: Float[Tensor, "B T D"]
    mask: Mask | None
    angles: Angles | None
    bias: Bias | None
    memory: Float[Tensor, "B _ D"] | None
    memory_mask: Mask | None

    def times(self, n: int) -> _Call:
        """The same for n variants of the batch, one after the other."""
        B = len(self.x)

        def repeat(x: Any) -> Any:
            many = isinstance(x, Tensor) and x.shape[0] == B and B > 1  # what serves all rows serves all variants
            return x.repeat(n, *(1,) * (x.ndim - 1)) if many else x

        def repeat_mask(mask: Mask | None) -> Mask | None:
            if mask is None or B == 1:
                return mask
            documents = tuple(map(repeat, mask.documents))
            keys, queries, dense = repeat(mask.keys), repeat(mask.queries), repeat(mask.dense)
            return replace(mask, keys=keys, queries=queries, documents=documents, dense=dense, blocks=None)

        return _Call(
            x=self.x.repeat(n, 1, 1),
            mask=repeat_mask(self.mask),
            angles=None if self.angles is None else (repeat(self.angles[0]), repeat(self.angles[1])),
            bias=repeat(self.bias),
            memory=None if self.memory is None else self.memory.repeat(n, 1, 1),
            memory_mask=repeat_mask(self.memory_mask),
        )

    def run(self, block: Block, x: Tensor) -> Tensor:
        given = dict(angles=self.angles, bias=self.bias, memory=self.memory, memory_mask=self.memory_mask)
        return block(x, self.mask, **given)

    def attend(self, block: Block, x: Tensor) -> Tensor:
        attention, told = block.attention, dict(angles=self.angles, bias=self.bias)
        return block.step(x, block.attention_norm, lambda y: attention(y, self.mask, **told))

    def cross(self, block: Block, x: Tensor) -> Tensor:
        cross = block.cross
        if cross is None or block.cross_norm is None:
            return x
        return block.step(x, block.cross_norm, lambda y: cross(y, self.memory_mask, memory=self.memory))


@dataclass(frozen=True)
class _Kept:
    """One forward pass: what each block was given, what its heads said, and the final states."""

    model: Model
    blocks: dict[str, Block]
    calls: dict[str, _Call]  # by block
    outs: dict[str, Tensor]  # by attention, (B, H, T, E)
    last: Float[Tensor, "B _ D"]

    @classmethod
    def of(cls, model: Model, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> _Kept:
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
        """The final states of n variants of the model, each without one of these heads."""
        name, _, step = place.rpartition(".")
        block, call, n = self.blocks[name], self.calls[name], len(heads)
        attention = block.attention if step == "attention" else block.cross
        assert attention is not None
        out = self.outs[place]
        variants = out.repeat(n, 1, 1, 1)
        variants.unflatten(0, (n, -1))[torch.arange(n), :, heads] = 0
        said = attention.o_proj(variants.transpose(1, 2).flatten(2))
        many = call.times(n)
        if step == "attention":
            x = many.cross(block, block.step(many.x, block.attention_norm, lambda _: said))
        else:
            before = call.attend(block, call.x).repeat(n, 1, 1)
            assert block.cross_norm is not None
            x = block.step(before, block.cross_norm, lambda _: said)
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


@contextmanager
def _evaluating(model: Model) -> Generator[None]:
    """Without dropout, which would be another one for each head."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)
