"""T5 (Raffel et al. 2020): buckets of relative distance, RMS norm before each step, scores unscaled, no biases.

Version 1.0 has relu and a tied head that scales its input down; 1.1 (and Flan-T5) a gated tanh-gelu and a head of its own.
"""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = dict(
    shape="encoder-decoder",
    positions="t5",
    norm="rms",
    norm_first=True,
    norm_eps=1e-6,
    bias=False,
    attention_scale=1.0,
    d_head=64,
    vocab_size=32_128,
    max_len=512,
    init="fan_in",
)

TIED: dict[str, Any] = dict(feedforward="relu", tie_embeddings=True, head_scale=True)
GATED: dict[str, Any] = dict(feedforward="gelu_tanh", gated=True)

SIZES: dict[str, dict[str, Any]] = {
    "t5-small": dict(n_layers=6, d_model=512, n_heads=8, d_ff=2048, **TIED),
    "t5-base": dict(n_layers=12, d_model=768, n_heads=12, d_ff=3072, **TIED),
    "t5-large": dict(n_layers=24, d_model=1024, n_heads=16, d_ff=4096, **TIED),
    "t5-v1.1-small": dict(n_layers=8, d_model=512, n_heads=6, d_ff=1024, **GATED),
    "t5-v1.1-base": dict(n_layers=12, d_model=768, n_heads=12, d_ff=2048, **GATED),
    "t5-v1.1-large": dict(n_layers=24, d_model=1024, n_heads=16, d_ff=2816, **GATED),
}

HF: tuple[str, ...] = ()
PREFIX = ""
HEADS: tuple[str, ...] = ()
UNUSED: tuple[str, ...] = ()
EXTRAS: tuple[str, ...] = ()
