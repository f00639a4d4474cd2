"""How tokens enter the residual stream, and how they leave it. Pictures and sound: media.py."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead import kernels
from clearhead.errors import ConfigError, InputError, did_you_mean
from clearhead.kernels import Packed
from clearhead.layers.linear import ACTIVATIONS, Linear, linear


def check_ids(ids: Tensor, shape: tuple[int, ...], limit: int, what: str, of: str) -> Tensor:
    """Refuse ids outside 0 .. limit - 1, where reading them costs nothing."""
    if tuple(ids.shape) != shape or ids.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"{what} are whole numbers of shape {shape}; got {ids.dtype} of shape {tuple(ids.shape)}; one a token"
        )
    if kernels.can_read(ids):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= limit:
            raise InputError(
                f"{what} must be 0 .. {limit - 1} ({of}={limit}); got {low} .. {high}; is this the model's own tokenizer?"
            )
    return ids


class TokenEmbedding(nn.Embedding):
    """One vector a token; times sqrt(d_model) where the family does so (section 3.4)."""

    def __init__(self, vocab_size: int, d_model: int, *, scale: bool = False) -> None:
        super().__init__(vocab_size, d_model)
        self.factor = math.sqrt(d_model) if scale else 1.0

    def forward(self, input: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        ids = self.check(input)
        x = kernels.rows(self.weight, ids)
        x = F.embedding(ids, self.weight) if x is None else x
        return x if self.factor == 1.0 else x * self.factor

    def check(self, tokens: Tensor) -> Tensor:
        """Refuse anything but a batch of ids."""
        if getattr(tokens, "ndim", 0) != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"tokens are a tensor of whole numbers, of shape (batch, length); got {getattr(tokens, 'dtype', type(tokens))} of "
                f"shape {tuple(getattr(tokens, 'shape', ()))}; for one text use tokens[None]"
            )
        if tokens.numel() == 0:
            raise InputError(
                f"tokens of shape {tuple(tokens.shape)} hold no token; give at least one, such as the bos id"
            )
        return check_ids(tokens, tuple(tokens.shape), self.num_embeddings, "token ids", "vocab_size")


class TokenHead(nn.Module):
    """From the residual stream to a score for each token of the vocabulary.

    A tied head has no weight of its own: it is handed the embedding's, so the tensor exists once and is saved once.
    A fixed bias (Marian) is loaded and saved but not trained.
    """

    def __init__(
        self,
        *,
        d_model: int,
        vocab_size: int,
        tied: bool = False,
        bias: str = "none",
        transform: tuple[str, nn.Module] | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        if bias not in ("none", "learned", "fixed"):
            raise ConfigError(f"head_bias={bias!r} is not known; {did_you_mean(bias, ['none', 'learned', 'fixed'])}")
        self.scale = scale
        self.activation = transform[0] if transform else None
        if transform:
            self.dense = Linear(d_model, d_model)
            self.norm = transform[1]
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, d_model).normal_(std=0.02))
        self.bias: Tensor | None
        if bias == "fixed":
            self.register_buffer("bias", torch.zeros(vocab_size))
        else:
            self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias == "learned" else None

    def forward(
        self, x: Float[Tensor, "B T D"], embedding: Float[Tensor, "V D"] | Packed | None = None
    ) -> Float[Tensor, "B T V"]:
        return linear(*self.parts(x, embedding))

    def parts(
        self, x: Float[Tensor, "B T D"], embedding: Float[Tensor, "V D"] | Packed | None = None
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "V D"] | Packed, Float[Tensor, "V"] | None]:
        """The operands of the last product, for a loss that never holds all logits."""
        if self.activation is not None:
            x = self.norm(ACTIVATIONS[self.activation](self.dense(x)))
        if self.scale != 1.0:
            x = x * self.scale
        weight = embedding if self.weight is None else self.weight
        assert weight is not None, "a tied head is called with the embedding's weight"
        return x, weight, self.bias
