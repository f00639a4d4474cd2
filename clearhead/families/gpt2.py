"""GPT-2 and GPT-3 (Radford et al. 2019, Brown et al. 2020): a decoder with learned positions, norm before each step, tanh-gelu.

GPT-3's published models alternate dense and banded sparse layers; these sizes are the dense equivalent. Where its table 2.1 does
not multiply out (1.3B, 13B), the nearest width that does is used.
"""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = dict(
    shape="decoder",
    positions="learned",
    norm="layer",
    norm_first=True,
    feedforward="gelu_tanh",
    tie_embeddings=True,
    vocab_size=50_257,
    init="normal",
    init_residual="scaled",
)

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_layers=12, d_model=768, n_heads=12, max_len=1024),
    "gpt2-medium": dict(n_layers=24, d_model=1024, n_heads=16, max_len=1024),
    "gpt2-large": dict(n_layers=36, d_model=1280, n_heads=20, max_len=1024),
    "gpt2-xl": dict(n_layers=48, d_model=1600, n_heads=25, max_len=1024),
    "gpt3-125m": dict(n_layers=12, d_model=768, n_heads=12, max_len=2048),
    "gpt3-350m": dict(n_layers=24, d_model=1024, n_heads=16, max_len=2048),
    "gpt3-760m": dict(n_layers=24, d_model=1536, n_heads=16, max_len=2048),
    "gpt3-1.3b": dict(n_layers=24, d_model=2048, n_heads=16, max_len=2048),
    "gpt3-2.7b": dict(n_layers=32, d_model=2560, n_heads=32, max_len=2048),
    "gpt3-6.7b": dict(n_layers=32, d_model=4096, n_heads=32, max_len=2048),
    "gpt3-13b": dict(n_layers=40, d_model=5120, n_heads=40, max_len=2048),
    "gpt3-175b": dict(n_layers=96, d_model=12_288, n_heads=96, max_len=2048),
}
