"""The original Transformer's shape: an encoder reads the source, a decoder writes the target while looking at it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.config import Config, Generation
from clearhead.errors import InputError
from clearhead.layers.cache import AnyCache, Cache
from clearhead.layers.embedding import TokenEmbedding
from clearhead.layers.masks import ABSENT, Mask, padding
from clearhead.layers.media import FrameEmbedding
from clearhead.models.decoder import make_cache
from clearhead.models.parts import make_head
from clearhead.models.stack import Padding, Stack
from clearhead.viewers import Described

Source = Int[Tensor, "B S"] | Float[Tensor, "B m n"]  # tokens, or mel frames of sound
SourcePadding = Bool[Tensor, "B _"] | Mask | None  # of tokens, or of what the convolutions leave of the frames


class EncoderDecoder(Described, nn.Module):
    """`model(source, target) -> logits`: at each position of the target, scores for its next token.

    One token embedding serves source, target and (tied) head, unless the config gives the source a vocabulary of its own,
    or the source is sound.
    """

    generation = Generation()  # replaced by what a checkpoint says
    extras: Mapping[str, Tensor] = MappingProxyType({})  # tensors of a checkpoint that are kept, but not computed with

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = TokenEmbedding(config.vocab_size, config.d_model, scale=config.embedding_scale)
        self.source: nn.Module | None = None
        if config.inputs == "frames":
            self.source = FrameEmbedding(d_model=config.d_model, n_mels=config.n_mels)
        elif config.source_vocab_size:
            self.source = TokenEmbedding(config.source_vocab_size, config.d_model, scale=config.embedding_scale)
        self.encoder = Stack(config, n_layers=config.n_layers, max_len=config.max_source_len, causal=False)
        if config.inputs == "frames" and config.positions == "learned":  # Whisper's sinusoids: a table, never trained
            self.encoder.positions.requires_grad_(False)
        self.decoder = Stack(config, n_layers=config.n_decoder_layers, max_len=config.max_len, causal=True, cross=True)
        self.head = make_head(config)

    def forward(
        self,
        source: Source | None,
        target: Int[Tensor, "B T"],
        mask: SourcePadding = None,
        *,
        target_mask: Padding = None,
        cache: AnyCache | None = None,
        checkpointing: bool = False,
    ) -> Float[Tensor, "B T V"]:
        """Scores for the token after each position of the target.

        `mask` is True for the source's real tokens, `target_mask` for the target's. With `cache`, the first call reads the
        source; later calls pass `source=None` and only the target's new tokens; no gradient is kept.
        """
        if source is None and (cache is None or cache.layers[0].cross is None):
            raise InputError(
                "source=None needs a cache that has already read a source; got none; pass the source first"
            )
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            memory = None if source is None else self.encode(source, mask, checkpointing=checkpointing)
            memory_mask = None if source is None else source_mask(mask)
            return self.project(
                self.states(target, memory, memory_mask, mask=target_mask, cache=cache, checkpointing=checkpointing)
            )

    def encode(
        self,
        source: Source,
        mask: SourcePadding = None,
        *,
        positions: Int[Tensor, "*B S"] | None = None,
        checkpointing: bool = False,
    ) -> Float[Tensor, "B S D"]:
        """The encoder's output, the decoder's memory of the source. `positions`: of sources packed into one row."""
        embed = self.tokens if self.source is None else self.source
        return self.encoder.run(embed(source), mask, positions=positions, checkpointing=checkpointing)

    def decode(
        self,
        target: Int[Tensor, "B T"],
        memory: Float[Tensor, "B S D"] | None,
        memory_mask: Mask | None = None,
        *,
        mask: Padding = None,
        cache: AnyCache | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits for a target over an encoder's output; with a cache that has read one, `memory=None`."""
        return self.project(self.states(target, memory, memory_mask, mask=mask, cache=cache))

    def states(
        self,
        target: Int[Tensor, "B T"],
        memory: Float[Tensor, "B S D"] | None,
        memory_mask: Mask | None = None,
        *,
        mask: Padding = None,
        positions: Int[Tensor, "*B T"] | None = None,
        cache: AnyCache | None = None,
        checkpointing: bool = False,
    ) -> Float[Tensor, "B T D"]:
        """The decoder's final states, before the head. `positions`: of targets packed into one row, as their sources are."""
        if memory is not None and memory.shape[0] != target.shape[0]:
            raise InputError(
                f"the source has {memory.shape[0]} rows, the target {target.shape[0]}; give each target its own source"
            )
        if cache is not None:
            if memory is not None and cache.layers[0].cross is not None:
                raise InputError(
                    "this cache has already read a source, and got another; pass source=None, or a new cache"
                )
            if memory is not None:
                cache.memory_mask = memory_mask
            memory_mask = cache.memory_mask
        return self.decoder.run(
            *(self.tokens(target), mask),
            positions=positions,
            memory=memory,
            memory_mask=memory_mask,
            cache=cache,
            checkpointing=checkpointing,
        )

    def project(self, states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """From the decoder's final states to logits."""
        return self.head(states, self.tokens.weight)

    def new_cache(self, *, batch: int, max_len: int) -> Cache:
        """Room for `batch` targets of up to `max_len` tokens; the source's keys and values join at the first call."""
        return make_cache(
            self.config, self.tokens.weight, batch=batch, max_len=max_len, n_layers=self.config.n_decoder_layers
        )


def source_mask(mask: SourcePadding) -> Mask:
    """What cross-attention may look at: the source's real tokens."""
    if isinstance(mask, Tensor):
        return padding(mask)
    if mask is not None and mask.spans is not None:
        raise InputError(
            "sources packed into one row are looked at through across(target mask, source mask); pass that"
        )
    if mask is None or mask.keys is None:
        return Mask()
    return padding(mask.keys != ABSENT)
