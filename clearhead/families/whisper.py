"""Whisper (Radford et al. 2022): mel frames pass two convolutions and an encoder; a decoder writes the text.

Encoder and decoder have tables of positions; the encoder's holds fixed sinusoids. Key projections have no bias.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from clearhead.config import Config
from clearhead.families.allowed_fields import fields, refuse
from clearhead.families.config_translation import (
    BART_FIELDS,
    FieldRow,
    NameRow,
    both,
    names_of,
    read_bart,
    read_fields,
    refuse_to_write,
    write_bart,
    write_fields,
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
CONFIG: list[FieldRow] = [
    ("vocab_size", "vocab_size"),
    ("num_mel_bins", "n_mels"),
    ("max_target_positions", "max_len"),
    ("max_source_positions", "max_source_len"),
]
FIELDS = (
    BART_FIELDS
    | names_of(CONFIG)
    | fields(
        # Noise in training, another task's head, word times.
        "apply_spec_augment mask_time_prob mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length",
        "mask_feature_min_masks use_weighted_layer_sum classifier_proj_size median_filter_width",
    )
)


def read(theirs: Mapping[str, Any], keys: Container[str]) -> dict[str, Any]:
    refuse(theirs, FIELDS, scale_embedding=(None, False), is_encoder_decoder=(None, True), is_causal=(None, True))
    return {**read_bart(theirs), **read_fields(theirs, CONFIG)}


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
        **write_bart(config),
        **write_fields(config, CONFIG),
        # Without these, transformers would use the ids of the English vocabulary.
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
