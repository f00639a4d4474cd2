"""A stack of blocks over the residual stream: what an encoder and a decoder have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clearhead import kernels
from clearhead.config import Config, Generation
from clearhead.errors import InputError
from clearhead.layers import packing
from clearhead.layers.attention import Lowered, check_mask, lower
from clearhead.layers.block import Block
from clearhead.layers.cache import AnyCache
from clearhead.layers.embedding import check_ids
from clearhead.layers.masks import Mask, check_real, padding
from clearhead.layers.positions import check_length
from clearhead.models.parts import make_block, make_positions, norm_of

Padding = Bool[Tensor, "B T"] | Mask | None  # what a model's `mask=` takes; True = a real token


class Stack(nn.Module):
    """Positions, then blocks, then (pre-norm) a last norm. `causal` makes it a decoder's, `cross` one with an encoder."""

    generation = Generation()  # replaced by the checkpoint's
    extras: Mapping[str, Tensor] = MappingProxyType({})  # tensors of a checkpoint that are kept, but not computed with

    def __init__(self, config: Config, *, n_layers: int, max_len: int, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.facts = Mask(causal=causal, window=config.window, patterns=config.patterns)
        self.positions = make_positions(config, max_len=max_len, causal=causal)
        self.embedding_norm = norm_of(config) if config.embedding_norm else nn.Identity()
        stack = ("decoder." if cross else "encoder.") if config.shape == "encoder-decoder" else ""
        self.blocks = nn.ModuleList(make_block(config, stack, i, cross=cross) for i in range(n_layers))
        self.norm = norm_of(config) if config.norm_first else nn.Identity()
        self.stream: torch.dtype | None = None  # of the residual stream under autocast; None: the embedding's

    def run(
        self,
        x: Float[Tensor, "B T D"],
        mask: Padding = None,
        *,
        positions: Int[Tensor, "*B T"] | None = None,
        memory: Float[Tensor, "B S D"] | None = None,
        memory_mask: Mask | None = None,
        cache: AnyCache | None = None,
        checkpointing: bool = False,
    ) -> Float[Tensor, "B T D"]:
        """From embeddings to final states. With a cache, x follows the tokens already in it."""
        if checkpointing and cache is not None:
            raise InputError("checkpointing is for training and a cache for generating; got both; leave one out")
        counted, facts = self._place(x, mask, cache, given=positions is not None)
        at = counted.clamp(min=0) if positions is None else self._check_positions(positions, x)
        x = self.enter(x, at)
        lowered, angles = self._lower(facts, x, cache), self.positions.angles(at)
        for i, block in enumerate(self.blocks):
            layer = partial(block, angles=angles, memory=memory, memory_mask=memory_mask)
            if checkpointing:
                x = checkpoint(layer, x, lowered, use_reentrant=False)
            else:
                x = layer(x, lowered, cache=None if cache is None else cache.layers[i])
        if cache is not None:
            cache.advance(counted)
        return self.norm(x)

    def enter(self, x: Float[Tensor, "B T D"], positions: Int[Tensor, "*B T"]) -> Float[Tensor, "B T D"]:
        """From embeddings to the residual stream."""
        x = F.dropout(self.embedding_norm(self.positions.enter(x, positions)), self.config.dropout, self.training)
        return x.to(self.stream) if self.stream is not None and torch.is_autocast_enabled(x.device.type) else x

    @property
    def layers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def packs(self, mask: Mask, like: Tensor) -> bool:
        """Whether this stack attends to texts packed into one row (`mask` of `packed()`) one by one, at no cost for the others."""
        return packing.pays(mask & self.facts, self.positions.bias, like, self.config.kernel, self._attention_dropout)

    @property
    def _attention_dropout(self) -> float:
        return self.config.attention_dropout if self.training else 0.0

    def _lower(self, mask: Mask, x: Tensor, cache: AnyCache | None) -> Lowered:
        T, held = x.shape[1], 0 if cache is None else cache.length
        S = T + held if mask.keys is None else mask.keys.shape[1]
        kernel, dropout = self.config.kernel, self._attention_dropout
        return lower(mask, self.positions.bias, T=T, S=S, like=x, kernel=kernel, dropout=dropout)

    def _check_positions(self, positions: Tensor, x: Tensor) -> Tensor:
        shape = tuple(x.shape[:2]) if positions.ndim == 2 else (x.shape[1],)
        return check_ids(positions, shape, self.positions.max_len or 2**31, "positions", "max_len")

    def _place(
        self, x: Tensor, mask: Padding, cache: AnyCache | None, *, given: bool
    ) -> tuple[Int[Tensor, "*B T"], Mask]:
        """Each token's position, padding not counted, and the whole mask. With `given` positions a row may be longer than any
        position, since they may start anew."""
        B, T = x.shape[:2]
        if isinstance(mask, Tensor):
            check_padding(mask, (B, T), whole=cache is None)
        if cache is None:
            facts = padding(mask) if isinstance(mask, Tensor) else check_mask(mask)
            facts.check(B, T, T)
            if not given:
                check_length(T, self.positions)
            counted = torch.arange(T, device=x.device) if facts.keys is None else facts.keys
            return counted, facts & self.facts
        if isinstance(mask, Mask):
            raise InputError(
                "with a cache, mask is a boolean tensor (True = a real token); got a Mask; pass the padding alone"
            )
        cache.check(B, T)
        check_length(cache.length + T, self.positions)
        counted, facts = cache.place(T, mask)
        return counted, replace(facts, causal=self.causal, window=self.facts.window, patterns=self.facts.patterns)


def check_padding(real: Tensor, shape: tuple[int, int], *, whole: bool = True) -> None:
    """Refuse a padding mask of the wrong type or shape, and one that seems inverted: a whole row without a real token."""
    check_real(real, shape)
    if whole and kernels.can_read(real) and not bool(real.any(1).all()):
        row = int((~real.any(1)).nonzero()[0])
        raise InputError(
            f"row {row} of the mask holds no real token; True = a real token, False = padding; "
            f"if yours says True for padding, pass mask=~mask"
        )
