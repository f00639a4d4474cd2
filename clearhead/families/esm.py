"""ESM-2 (Lin et al. 2023): an encoder over amino acids with rotary positions, norm before each step, gelu."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = dict(
    shape="encoder",
    positions="rotary",
    norm="layer",
    norm_first=True,
    feedforward="gelu",
    n_heads=20,
    vocab_size=33,
    max_len=1026,
    init="normal",
)

SIZES: dict[str, dict[str, Any]] = {
    "esm2-8m": dict(n_layers=6, d_model=320),
    "esm2-35m": dict(n_layers=12, d_model=480),
    "esm2-150m": dict(n_layers=30, d_model=640),
    "esm2-650m": dict(n_layers=33, d_model=1280),
}

HF: tuple[str, ...] = ()
PREFIX = ""
HEADS: tuple[str, ...] = ()
UNUSED: tuple[str, ...] = ()
EXTRAS: tuple[str, ...] = ()
