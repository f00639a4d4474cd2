"""How pictures and sound enter the residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.errors import InputError


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
