"""Marian (Junczys-Dowmunt et al. 2018), as in the OPUS-MT models: the original with SiLU, and sines before cosines.

Its two tables of sinusoidal positions are computed, not stored, so they are not among the parameters here (2 x 512 x 512
elsewhere); its bias on the logits is fixed: loaded and saved, not trained.
"""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = dict(
    shape="encoder-decoder",
    positions="sinusoidal",
    sinusoid_halves=True,
    norm="layer",
    norm_first=False,
    feedforward="silu",
    embedding_scale=True,
    tie_embeddings=True,
    head_bias="fixed",
    max_len=512,
    init="normal",
)

SIZES: dict[str, dict[str, Any]] = {
    "opus-mt-en-de": dict(n_layers=6, d_model=512, n_heads=8, d_ff=2048, vocab_size=58_101),
}

HF: tuple[str, ...] = ()
PREFIX = ""
HEADS: tuple[str, ...] = ()
UNUSED: tuple[str, ...] = ()
EXTRAS: tuple[str, ...] = ()
