"""BERT (Devlin et al. 2018) and MiniLM: an encoder with learned positions and segments, norm after each step, gelu, a pooler."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = dict(
    shape="encoder",
    positions="learned",
    n_segments=2,
    embedding_norm=True,
    norm="layer",
    norm_first=False,
    norm_eps=1e-12,
    feedforward="gelu",
    pooler=True,
    vocab_size=30_522,
    max_len=512,
    init="truncated",
)

SIZES: dict[str, dict[str, Any]] = {
    "bert-base": dict(n_layers=12, d_model=768, n_heads=12),
    "bert-large": dict(n_layers=24, d_model=1024, n_heads=16),
    "minilm-l6": dict(n_layers=6, d_model=384, n_heads=12),
    "minilm-l12": dict(n_layers=12, d_model=384, n_heads=12),
}

HF: tuple[str, ...] = ()
PREFIX = ""
HEADS: tuple[str, ...] = ()
UNUSED: tuple[str, ...] = ()
EXTRAS: tuple[str, ...] = ()
