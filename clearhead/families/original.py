"""The original Transformer (Vaswani et al. 2017): sinusoidal positions, norm after each step, relu, one shared embedding.

The paper's table 3 says 65 M and 213 M parameters. Its shared English-German vocabulary of about 37,000 gives 63.1 M and 214.2 M
with every weight, bias and norm counted; 65.0 M takes 40,745 tokens at base size, 213.0 M takes 35,784 at big.
"""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = dict(
    shape="encoder-decoder",
    positions="sinusoidal",
    norm="layer",
    norm_first=False,
    feedforward="relu",
    embedding_scale=True,
    tie_embeddings=True,
    vocab_size=37_000,
    max_len=1024,
    init="xavier",
)

SIZES: dict[str, dict[str, Any]] = {
    "transformer-base": dict(n_layers=6, d_model=512, n_heads=8, d_ff=2048, dropout=0.1),
    "transformer-big": dict(n_layers=6, d_model=1024, n_heads=16, d_ff=4096, dropout=0.3),
}

HF: tuple[str, ...] = ()
PREFIX = ""
HEADS: tuple[str, ...] = ()
UNUSED: tuple[str, ...] = ()
EXTRAS: tuple[str, ...] = ()
