"""Marian (Junczys-Dowmunt et al. 2018), as in the OPUS-MT models: the original with SiLU, and sines before cosines.

Its two tables of sinusoidal positions are computed, not stored, so they do not count as parameters here (elsewhere they are
2 x 512 x 512). The bias on its logits is fixed: loaded and saved, but not trained.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from clearhead.config import Config
from clearhead.families.allowed_fields import fields, refuse
from clearhead.families.config_translation import (
    BART_FIELDS,
    NameRow,
    both,
    read_bart,
    refuse_to_write,
    take,
    write_bart,
)

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

HF: tuple[str, ...] = ("marian",)
PREFIX = "model."
HEADS: tuple[str, ...] = ("lm_head.", "final_logits_bias")
# Old files store the sinusoids. Files with separate embeddings for source and target also have an unused shared one.
UNUSED: tuple[str, ...] = ("*embed_positions.weight", "*shared.weight")
EXTRAS: tuple[str, ...] = ()
FIELDS = BART_FIELDS | fields(
    "vocab_size decoder_vocab_size share_encoder_decoder_embeddings max_position_embeddings scale_embedding"
)


def read(theirs: Mapping[str, Any], keys: Container[str]) -> dict[str, Any]:
    refuse(
        *(theirs, FIELDS),
        add_final_layer_norm=(None, False),
        is_encoder_decoder=(None, True),
        is_causal=(None, True),
    )
    vocab_size, tied = take(theirs, "vocab_size"), theirs.get("tie_word_embeddings", True)
    sizes: dict[str, Any] = dict(vocab_size=vocab_size)
    if (
        not theirs.get("share_encoder_decoder_embeddings", True) or not tied
    ):  # without tying, transformers shares nothing
        sizes = dict(vocab_size=theirs.get("decoder_vocab_size") or vocab_size, source_vocab_size=vocab_size)
    return dict(
        **sizes,
        **read_bart(theirs),
        max_len=take(theirs, "max_position_embeddings", 512),
        embedding_scale=theirs.get("scale_embedding", False),
        head_bias="fixed" if "final_logits_bias" in keys else "none",
    )


def write(config: Config) -> dict[str, Any]:
    refuse_to_write(
        *(config, "Marian's layout"),
        **{name: BASE[name] for name in ("shape", "positions", "sinusoid_halves", "norm", "norm_first")},
        **dict(inputs="tokens", embedding_norm=False, norm_eps=1e-5, bias=True, attention_bias="qkvo", qk_norm=False),
        **dict(n_kv_heads=config.n_heads, d_head=config.d_model // config.n_heads, attention_scale=0.0, window=0),
        **dict(gated=False, head_transform=False, head_scale=False),
    )
    if not config.source_vocab_size:  # transformers shares the embedding of source and target only if the head is tied
        refuse_to_write(config, "Marian's layout with one embedding for source and target", tie_embeddings=True)
    return dict(
        model_type="marian",
        architectures=["MarianMTModel"],
        **write_bart(config),
        vocab_size=config.source_vocab_size or config.vocab_size,
        decoder_vocab_size=config.vocab_size,
        share_encoder_decoder_embeddings=config.source_vocab_size == 0,
        max_position_embeddings=max(config.max_len, config.max_source_len),
        scale_embedding=config.embedding_scale,
        # Without these, transformers would use the ids of a vocabulary of 58,101.
        **dict.fromkeys(("pad_token_id", "eos_token_id", "forced_eos_token_id")),
    )


def _attention(theirs: str, ours: str) -> list[NameRow]:
    parts = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}
    return [row for part, name in parts.items() for row in both(f"{theirs}.{part}", f"{ours}.{name}")]


def _layers(stack: str) -> list[NameRow]:
    theirs, ours = f"{stack}.layers.{{i}}", f"{stack}.blocks.{{i}}"
    return [
        *_attention(f"{theirs}.self_attn", f"{ours}.attention"),
        *both(f"{theirs}.self_attn_layer_norm", f"{ours}.attention_norm"),
        *_attention(f"{theirs}.encoder_attn", f"{ours}.cross"),
        *both(f"{theirs}.encoder_attn_layer_norm", f"{ours}.cross_norm"),
        *both(f"{theirs}.fc1", f"{ours}.feedforward.up"),
        *both(f"{theirs}.fc2", f"{ours}.feedforward.down"),
        *both(f"{theirs}.final_layer_norm", f"{ours}.feedforward_norm"),
    ]


LAYERS: list[NameRow] = [*_layers("encoder"), *_layers("decoder")]  # also Whisper's


def names(config: Config) -> list[NameRow]:
    source = "source.weight" if config.source_vocab_size else "tokens.weight"
    return [
        *([] if config.source_vocab_size else [("shared.weight", "tokens.weight")]),
        ("decoder.embed_tokens.weight", "tokens.weight"),
        ("encoder.embed_tokens.weight", source),
        *LAYERS,
        ("lm_head.weight", "head.weight"),
        ("final_logits_bias", "head.bias", "row"),
    ]


NAMES = names
