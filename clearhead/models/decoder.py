"""The decoder alone: GPT, LLaMA and their kin. Each token is predicted from those before it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.config import Config
from clearhead.kernels import Packed
from clearhead.layers.cache import AnyCache, Cache
from clearhead.layers.embedding import TokenEmbedding, TokenHead
from clearhead.models.parts import make_head
from clearhead.models.stack import Padding, Stack
from clearhead.viewers import Described


class Decoder(Described, Stack):
    """`model(tokens) -> logits`: at each position, scores for the next token."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, n_layers=config.n_layers, max_len=config.max_len, causal=True)
        self.tokens = TokenEmbedding(config.vocab_size, config.d_model, scale=config.embedding_scale)
        self.head: TokenHead = make_head(config)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Padding = None,
        *,
        positions: Int[Tensor, "*B T"] | None = None,
        cache: AnyCache | None = None,
        checkpointing: bool = False,
    ) -> Float[Tensor, "B T V"]:
        """Scores for the token after each position.

        `mask` is True for real tokens; padding on either side changes nothing for them. A `Mask` such as `documents(ids)`
        is taken too, and is added to the causal one. `positions` replaces counting from 0 (documents that each start anew).
        With `cache`, tokens are those after what it holds, and no gradient is kept. `checkpointing` trades time for memory
        in training.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            states = self.states(tokens, mask, positions=positions, cache=cache, checkpointing=checkpointing)
            return self.project(states)

    def states(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Padding = None,
        *,
        positions: Int[Tensor, "*B T"] | None = None,
        cache: AnyCache | None = None,
        checkpointing: bool = False,
    ) -> Float[Tensor, "B T D"]:
        """The final states, before the head."""
        return self.run(self.tokens(tokens), mask, positions=positions, cache=cache, checkpointing=checkpointing)

    def project(self, states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """From final states to logits."""
        return self.head(states, self.tokens.weight)

    def new_cache(self, *, batch: int, max_len: int) -> Cache:
        """Room for `batch` rows of up to `max_len` tokens, on the model's device, in its precision."""
        return make_cache(self.config, self.tokens.weight, batch=batch, max_len=max_len, n_layers=self.config.n_layers)


def make_cache(config: Config, like: Tensor | Packed, *, batch: int, max_len: int, n_layers: int) -> Cache:
    device_type = like.device.type
    # Under autocast, keys and values come in the autocast type, not in the weights'.
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else like.dtype
    stack, group = "decoder." if config.shape == "encoder-decoder" else "", config.n_heads // config.n_kv_heads
    return Cache(
        batch=batch,
        max_len=max_len,
        n_layers=n_layers,
        n_kv_heads=[len(config.kept_heads(f"{stack}blocks.{i}.attention")) // group for i in range(n_layers)],
        d_head=config.d_head,
        window=config.window,
        device=like.device,
        dtype=dtype,
    )
