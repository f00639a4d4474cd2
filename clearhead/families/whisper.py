"""Whisper (Radford et al. 2022): mel frames through two convolutions into an encoder, a decoder that writes the text.

Positions are tables on both sides; the encoder's holds fixed sinusoids. Keys carry no bias.
"""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = dict(
    shape="encoder-decoder",
    inputs="frames",
    positions="learned",
    norm="layer",
    norm_first=True,
    feedforward="gelu",
    attention_bias="qvo",
    tie_embeddings=True,
    n_mels=80,
    max_len=448,
    max_source_len=1500,
    init="normal",
)

SIZES: dict[str, dict[str, Any]] = {
    "whisper-tiny": dict(n_layers=4, d_model=384, n_heads=6, vocab_size=51_865),
    "whisper-tiny.en": dict(n_layers=4, d_model=384, n_heads=6, vocab_size=51_864),
    "whisper-base": dict(n_layers=6, d_model=512, n_heads=8, vocab_size=51_865),
    "whisper-small": dict(n_layers=12, d_model=768, n_heads=12, vocab_size=51_865),
    "whisper-medium": dict(n_layers=24, d_model=1024, n_heads=16, vocab_size=51_865),
    "whisper-large-v3": dict(n_layers=32, d_model=1280, n_heads=20, vocab_size=51_866, n_mels=128),
}

HF: tuple[str, ...] = ()
PREFIX = ""
HEADS: tuple[str, ...] = ()
UNUSED: tuple[str, ...] = ()
EXTRAS: tuple[str, ...] = ()
