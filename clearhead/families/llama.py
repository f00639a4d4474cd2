"""LLaMA and its kin: a decoder with rotary positions, RMS norm before each step, gated SiLU, grouped-query heads, no biases.

Mistral adds a sliding window, Qwen2 biases on q, k and v; SmolLM2 and the small ones tie head and embedding.
"""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = dict(
    shape="decoder",
    positions="rotary",
    norm="rms",
    norm_first=True,
    feedforward="silu",
    gated=True,
    bias=False,
)

LLAMA3: dict[str, Any] = dict(vocab_size=128_256, rotary_base=500_000.0)
LONG: dict[str, Any] = dict(max_len=131_072, rotary_scaling="llama3", rotary_original_len=8192)
QWEN2: dict[str, Any] = dict(attention_bias="qkv", rotary_base=1e6, norm_eps=1e-6)
SMOL: dict[str, Any] = dict(vocab_size=49_152, tie_embeddings=True, max_len=8192)

SIZES: dict[str, dict[str, Any]] = {
    "llama-7b": dict(
        n_layers=32, d_model=4096, n_heads=32, d_ff=11_008, vocab_size=32_000, max_len=2048, norm_eps=1e-6
    ),
    "llama-13b": dict(
        n_layers=40, d_model=5120, n_heads=40, d_ff=13_824, vocab_size=32_000, max_len=2048, norm_eps=1e-6
    ),
    "llama-2-7b": dict(n_layers=32, d_model=4096, n_heads=32, d_ff=11_008, vocab_size=32_000, max_len=4096),
    "llama-2-70b": dict(
        n_layers=80, d_model=8192, n_heads=64, n_kv_heads=8, d_ff=28_672, vocab_size=32_000, max_len=4096
    ),
    "llama-3-8b": dict(n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, d_ff=14_336, max_len=8192, **LLAMA3),
    "llama-3-70b": dict(n_layers=80, d_model=8192, n_heads=64, n_kv_heads=8, d_ff=28_672, max_len=8192, **LLAMA3),
    "llama-3.1-8b": dict(
        n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, d_ff=14_336, rotary_factor=8.0, **LLAMA3, **LONG
    ),
    "llama-3.2-1b": dict(
        n_layers=16,
        d_model=2048,
        n_heads=32,
        n_kv_heads=8,
        d_ff=8192,
        tie_embeddings=True,
        rotary_factor=32.0,
        **LLAMA3,
        **LONG,
    ),
    "mistral-7b": dict(
        n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, d_ff=14_336, vocab_size=32_000, max_len=32_768, window=4096
    ),
    "smollm2-135m": dict(n_layers=30, d_model=576, n_heads=9, n_kv_heads=3, d_ff=1536, rotary_base=1e5, **SMOL),
    "smollm2-360m": dict(n_layers=32, d_model=960, n_heads=15, n_kv_heads=5, d_ff=2560, rotary_base=1e5, **SMOL),
    "smollm2-1.7b": dict(n_layers=24, d_model=2048, n_heads=32, d_ff=8192, rotary_base=1.3e5, **SMOL),
    "qwen2-0.5b": dict(
        n_layers=24,
        d_model=896,
        n_heads=14,
        n_kv_heads=2,
        d_ff=4864,
        vocab_size=151_936,
        max_len=131_072,
        tie_embeddings=True,
        **QWEN2,
    ),
    "qwen2-1.5b": dict(
        n_layers=28,
        d_model=1536,
        n_heads=12,
        n_kv_heads=2,
        d_ff=8960,
        vocab_size=151_936,
        max_len=131_072,
        tie_embeddings=True,
        **QWEN2,
    ),
    "qwen2-7b": dict(
        n_layers=28, d_model=3584, n_heads=28, n_kv_heads=4, d_ff=18_944, vocab_size=152_064, max_len=131_072, **QWEN2
    ),
}
