"""Whisper (Radford et al. 2022): mel frames through two convolutions into an encoder, a decoder that writes the text.

Positions are tables on both sides; the encoder's holds fixed sinusoids. Keys carry no bias.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from clearhead.config import Config
from clearhead.families.config_translation import (
    NameRow,
    activation,
    both,
    refuse,
    refuse_to_write,
    same,
    take,
    write_activation,
)
from clearhead.families.marian import LAYERS

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

HF: tuple[str, ...] = ("whisper",)
PREFIX = "model."
HEADS: tuple[str, ...] = ("proj_out.",)
UNUSED: tuple[str, ...] = ()
EXTRAS: tuple[str, ...] = ()


def read(theirs: Mapping[str, Any], keys: Container[str]) -> dict[str, Any]:
    refuse(theirs, scale_embedding=(None, False), is_encoder_decoder=(None, True))
    return dict(
        d_model=take(theirs, "d_model"),
        n_layers=take(theirs, "encoder_layers"),
        n_decoder_layers=take(theirs, "decoder_layers"),
        n_heads=same(theirs, "encoder_attention_heads", "decoder_attention_heads"),
        d_ff=same(theirs, "encoder_ffn_dim", "decoder_ffn_dim"),
        vocab_size=take(theirs, "vocab_size"),
        n_mels=take(theirs, "num_mel_bins"),
        max_len=take(theirs, "max_target_positions"),
        max_source_len=take(theirs, "max_source_positions"),
        feedforward=activation(theirs, "activation_function"),
        dropout=take(theirs, "dropout", 0.0),
        attention_dropout=take(theirs, "attention_dropout", 0.0),
        tie_embeddings=theirs.get("tie_word_embeddings", True),
    )


def write(config: Config) -> dict[str, Any]:
    refuse_to_write(
        *(config, "Whisper's layout"),
        **{name: BASE[name] for name in ("shape", "inputs", "positions", "norm", "norm_first", "attention_bias")},
        **dict(embedding_scale=False, embedding_norm=False, norm_eps=1e-5, bias=True, qk_norm=False, window=0),
        **dict(n_kv_heads=config.n_heads, d_head=config.d_model // config.n_heads, attention_scale=0.0),
        **dict(gated=False, head_bias="none", head_transform=False, head_scale=False),
    )
    return dict(
        model_type="whisper",
        architectures=["WhisperForConditionalGeneration"],
        d_model=config.d_model,
        encoder_layers=config.n_layers,
        decoder_layers=config.n_decoder_layers,
        encoder_attention_heads=config.n_heads,
        decoder_attention_heads=config.n_heads,
        encoder_ffn_dim=config.d_ff,
        decoder_ffn_dim=config.d_ff,
        vocab_size=config.vocab_size,
        num_mel_bins=config.n_mels,
        max_target_positions=config.max_len,
        max_source_positions=config.max_source_len,
        activation_function=write_activation(config),
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        tie_word_embeddings=config.tie_embeddings,
        is_encoder_decoder=True,
        # Left out, these would become the ids of the English vocabulary.
        **dict.fromkeys(("bos_token_id", "pad_token_id", "eos_token_id", "begin_suppress_tokens")),
    )


NAMES: list[NameRow] = [
    ("decoder.embed_tokens.weight", "tokens.weight"),
    *both("encoder.conv1", "source.conv1"),
    *both("encoder.conv2", "source.conv2"),
    ("encoder.embed_positions.weight", "encoder.positions.weight"),
    ("decoder.embed_positions.weight", "decoder.positions.weight"),
    *LAYERS,
    *both("encoder.layer_norm", "encoder.norm"),
    *both("decoder.layer_norm", "decoder.norm"),
    ("proj_out.weight", "head.weight"),
]
