"""How tokens, pictures and sound enter the residual stream, and how tokens leave it."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.errors import ConfigError, InputError, did_you_mean
from clearhead.layers.feedforward import ACTIVATIONS
from clearhead.layers.linear import Linear, Packed, linear


def check_ids(ids: Tensor, shape: tuple[int, ...], limit: int, what: str, of: str) -> Tensor:
    """Refuse ids that name nothing. Those on a GPU are not looked at: the CPU would have to wait for them at each step."""
    if tuple(ids.shape) != shape or ids.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"{what} are whole numbers of shape {shape}; got {ids.dtype} of shape {tuple(ids.shape)}; one a token"
        )
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
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
        ids, weight = self.check(input), cast(Tensor | Packed, self.weight)
        x = weight.rows(ids) if isinstance(weight, Packed) else F.embedding(ids, weight)
        return x if self.factor == 1.0 else x * self.factor

    def check(self, tokens: Tensor) -> Tensor:
        """Refuse what is no batch of ids."""
        if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"tokens are whole numbers of shape (batch, length); got {tokens.dtype} of shape {tuple(tokens.shape)}; "
                f"for one text use tokens[None]"
            )
        if tokens.numel() == 0:
            raise InputError(
                f"tokens of shape {tuple(tokens.shape)} hold no token; give at least one, such as the bos id"
            )
        return check_ids(tokens, tuple(tokens.shape), self.num_embeddings, "token ids", "vocab_size")


class PatchEmbedding(nn.Module):
    """A picture as a sequence: each patch projected, a class token in front (Dosovitskiy et al. 2020)."""

    def __init__(self, *, d_model: int, image_size: int, patch_size: int, n_channels: int = 3) -> None:
        super().__init__()
        self.image_size, self.n_channels = image_size, n_channels
        self.projection = nn.Conv2d(n_channels, d_model, kernel_size=patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(d_model))

    def forward(self, pictures: Float[Tensor, "B c h w"]) -> Float[Tensor, "B P D"]:
        wanted = (self.n_channels, self.image_size, self.image_size)
        if pictures.ndim != 4 or tuple(pictures.shape[1:]) != wanted or not pictures.is_floating_point():
            raise InputError(
                f"pictures are real numbers of shape (batch, {', '.join(map(str, wanted))}); got {pictures.dtype} of shape "
                f"{tuple(pictures.shape)}; resize them first, to numbers near 0"
            )
        patches = self.projection(pictures).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(len(patches), 1, -1), patches], 1)


class FrameEmbedding(nn.Module):
    """Mel frames through two convolutions, the second halving their number (Radford et al. 2022)."""

    def __init__(self, *, d_model: int, n_mels: int) -> None:
        super().__init__()
        self.n_mels = n_mels
        self.conv1 = nn.Conv1d(n_mels, d_model, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(d_model, d_model, kernel_size=3, stride=2, padding=1)

    def forward(self, frames: Float[Tensor, "B m n"]) -> Float[Tensor, "B S D"]:
        if frames.ndim != 3 or frames.shape[1] != self.n_mels or frames.shape[2] == 0 or not frames.is_floating_point():
            raise InputError(
                f"sound has shape (batch, {self.n_mels} mel bands, frames); got {tuple(frames.shape)}; is the axis order right?"
            )
        return F.gelu(self.conv2(F.gelu(self.conv1(frames)))).transpose(1, 2)


class TokenHead(nn.Module):
    """From the residual stream to a score for each token of the vocabulary.

    A tied head has no weight of its own: it is handed the embedding's, so the tensor exists once and is saved once.
    A fixed bias (Marian) is loaded and saved but not trained.
    """

    eight = False  # whether training multiplies in 8 bits (fp8.py); the loss, which takes the parts, does it

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
        """What goes into the last product, for a loss that never holds all its results."""
        if self.activation is not None:
            x = self.norm(ACTIVATIONS[self.activation](self.dense(x)))
        if self.scale != 1.0:
            x = x * self.scale
        weight = embedding if self.weight is None else self.weight
        assert weight is not None, "a tied head is called with the embedding's weight"
        return x, weight, self.bias
