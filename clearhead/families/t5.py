"""T5 (Raffel et al. 2020): relative positions in buckets, RMS norm before each step, unscaled scores, no biases.

Version 1.0 has relu and a tied head that scales its input down; 1.1 (and Flan-T5) has a gated tanh-gelu and an untied head.
An encoder without decoder (T5EncoderModel, as image generators use it) is read too.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from clearhead.config import Config
from clearhead.errors import CheckpointError
from clearhead.families.allowed_fields import fields, refuse
from clearhead.families.config_translation import (
    FieldRow,
    NameRow,
    activation,
    names_of,
    pooling,
    read_fields,
    refuse_to_write,
    take,
    take_layers,
    write_activation,
    write_fields,
    write_pooling,
)

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

HF: tuple[str, ...] = ("t5",)
PREFIX = ""
HEADS: tuple[str, ...] = ("lm_head.",)
UNUSED: tuple[str, ...] = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)  # old files
EXTRAS: tuple[str, ...] = ()
CONFIG: list[FieldRow] = [
    ("d_model", "d_model"),
    ("num_layers", "n_layers"),
    ("num_heads", "n_heads"),
    ("d_kv", "d_head"),
    ("d_ff", "d_ff"),
    ("vocab_size", "vocab_size"),
    ("n_positions", "max_len", 512),
    ("relative_attention_num_buckets", "t5_buckets"),
    ("relative_attention_max_distance", "t5_max_distance", 128),
    ("layer_norm_epsilon", "norm_eps", 1e-6),
    ("dropout_rate", "dropout", 0.0),
]
FIELDS = names_of(CONFIG) | fields(
    "num_decoder_layers feed_forward_proj dense_act_fn is_gated_act",
    "scale_decoder_outputs is_encoder_decoder modules",
)


def read(theirs: Mapping[str, Any], keys: Container[str]) -> dict[str, Any]:
    refuse(theirs, FIELDS, is_causal=(None, True))
    found = dict(**read_fields(theirs, CONFIG), **_read_feedforward(theirs))
    found["attention_dropout"] = found["dropout"]
    kinds = theirs.get("architectures") or ()
    if "T5EncoderModel" in kinds or not theirs.get("is_encoder_decoder", True):
        return dict(found, shape="encoder", **pooling(theirs))
    if "modules" in theirs:
        raise CheckpointError(
            f"modules.json makes sentence embeddings, but architectures={list(kinds)} has a decoder, which embeddings do not use; "
            f"save the model as T5EncoderModel, or delete modules.json to load it whole"
        )
    if "T5Model" in kinds:
        raise CheckpointError("config.json's architectures=['T5Model'] is a T5 without its head; load the whole model")
    n_decoder_layers = take_layers(theirs, "num_decoder_layers", found["n_layers"])
    return dict(found, n_decoder_layers=n_decoder_layers, **_read_head(theirs, keys))


def _read_feedforward(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Older files have only `feed_forward_proj`, where "gated-gelu" means gelu_new; newer ones add `dense_act_fn` and
    `is_gated_act`."""
    stated = str(take(theirs, "feed_forward_proj", "relu"))
    name = "gelu_new" if stated == "gated-gelu" else stated.removeprefix("gated-")
    field = "feed_forward_proj" if theirs.get("dense_act_fn") is None else "dense_act_fn"
    return dict(
        feedforward=activation({**theirs, "feed_forward_proj": name}, field),
        gated=theirs.get("is_gated_act", stated.startswith("gated-")),
    )


def _read_head(theirs: Mapping[str, Any], keys: Container[str]) -> dict[str, Any]:
    """Whether the head is tied, and whether it scales its input.

    Before transformers 5, `tie_word_embeddings` meant both, and files could store a tied head a second time. Now that field is
    always true: `scale_decoder_outputs` means the scaling, and the file has a head only if it is not tied.
    """
    tied, own = theirs.get("tie_word_embeddings", True), "lm_head.weight" in keys
    if "scale_decoder_outputs" in theirs:
        return dict(tie_embeddings=not own, head_scale=theirs["scale_decoder_outputs"])
    return dict(tie_embeddings=tied or not own, head_scale=tied)


def write(config: Config) -> dict[str, Any]:
    encoder = config.shape == "encoder"
    refuse_to_write(
        *(config, "T5's layout"),
        **dict(shape=("encoder-decoder", "encoder"), head="none" if encoder else "tokens", inputs="tokens"),
        **{name: BASE[name] for name in ("positions", "norm", "norm_first", "bias", "attention_scale")},
        **dict(attention_bias="", n_kv_heads=config.n_heads, qk_norm=False, window=0, source_vocab_size=0),
        **dict(embedding_scale=False, embedding_norm=False, head_bias="none", head_transform=False),
        **dict(n_segments=0, dropped_token=-1, pooler=False),
    )
    name = write_activation(config)
    return dict(
        model_type="t5",
        architectures=["T5EncoderModel" if encoder else "T5ForConditionalGeneration"],
        **write_fields(config, CONFIG),
        num_decoder_layers=config.n_decoder_layers,
        feed_forward_proj=f"gated-{'gelu' if name == 'gelu_new' else name}" if config.gated else name,
        dense_act_fn=name,
        is_gated_act=config.gated,
        tie_word_embeddings=config.head_scale,
        scale_decoder_outputs=config.head_scale,
        is_encoder_decoder=not encoder,
        # A T5 encoder has no pooler: without modules its embedding is the first state.
        **(write_pooling(config) if config.pool != "first" or config.pool_normed else {}),
        **dict.fromkeys(("pad_token_id", "eos_token_id")),
    )


def _layers(config: Config, stack: str) -> list[NameRow]:
    theirs, ours = f"{stack}.block.{{i}}.layer", f"{stack}." if config.shape == "encoder-decoder" else ""
    block, last = f"{ours}blocks.{{i}}", 2 if stack == "decoder" else 1
    steps = [(0, "SelfAttention", "attention")] + ([(1, "EncDecAttention", "cross")] if last == 2 else [])
    up = {"wi_0": "gate", "wi_1": "up"} if config.gated else {"wi": "up"}
    return [
        (f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"{ours}positions.weight"),
        *(
            (f"{theirs}.{n}.{kind}.{letter}.weight", f"{block}.{name}.{letter}_proj.weight")
            for n, kind, name in steps
            for letter in "qkvo"
        ),
        *((f"{theirs}.{n}.layer_norm.weight", f"{block}.{name}_norm.weight") for n, _, name in steps),
        *(
            (f"{theirs}.{last}.DenseReluDense.{wi}.weight", f"{block}.feedforward.{name}.weight")
            for wi, name in up.items()
        ),
        (f"{theirs}.{last}.DenseReluDense.wo.weight", f"{block}.feedforward.down.weight"),
        (f"{theirs}.{last}.layer_norm.weight", f"{block}.feedforward_norm.weight"),
        (f"{stack}.final_layer_norm.weight", f"{ours}norm.weight"),
    ]


def names(config: Config) -> list[NameRow]:
    return [
        ("shared.weight", "tokens.weight"),
        ("encoder.embed_tokens.weight", "tokens.weight"),
        ("decoder.embed_tokens.weight", "tokens.weight"),
        *_layers(config, "encoder"),
        *(_layers(config, "decoder") if config.shape == "encoder-decoder" else []),
        ("lm_head.weight", "head.weight"),
    ]


NAMES = names
