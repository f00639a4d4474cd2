"""GPT-2 and GPT-3 (Radford et al. 2019, Brown et al. 2020): a decoder with learned positions, norm before each step, tanh-gelu.

GPT-3's published models alternate dense and banded sparse layers; these sizes are their dense equivalents. Where the width in
its table 2.1 is not heads times head width (1.3B, 13B), the nearest width that is one is used.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from clearhead.config import Config
from clearhead.families.allowed_fields import fields, refuse
from clearhead.families.config_translation import (
    FieldRow,
    NameRow,
    activation,
    both,
    names_of,
    read_fields,
    refuse_to_write,
    write_activation,
    write_fields,
)

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

HF = ("gpt2",)
PREFIX = "transformer."
HEADS = ("lm_head.",)
UNUSED = ("*.attn.bias", "*.attn.masked_bias")
EXTRAS = ()
CONFIG: list[FieldRow] = [
    ("n_embd", "d_model"),
    ("n_layer", "n_layers"),
    ("n_head", "n_heads"),
    ("n_inner", "d_ff", 0),
    ("vocab_size", "vocab_size"),
    ("n_positions", "max_len"),
    ("layer_norm_epsilon", "norm_eps", 1e-5),
    ("resid_pdrop", "dropout", 0.0),
    ("attn_pdrop", "attention_dropout", 0.0),
    ("tie_word_embeddings", "tie_embeddings", True),
]
FIELDS = names_of(CONFIG) | fields(
    "n_ctx activation_function embd_pdrop",
    # Another task's head; old names; float32 in attention, which changes rounding only.
    "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout",
    "n_special predict_special_tokens reorder_and_upcast_attn",
)


def read(theirs: Mapping[str, Any], keys: Container[str]) -> dict[str, Any]:
    refuse(
        *(theirs, FIELDS),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        is_causal=(None, True),
    )
    return dict(**read_fields(theirs, CONFIG), feedforward=activation(theirs, "activation_function"))


def write(config: Config) -> dict[str, Any]:
    refuse_to_write(
        *(config, "GPT-2's layout"),
        **{name: BASE[name] for name in ("shape", "positions", "norm", "norm_first")},
        **dict(gated=False, attention_bias="qkvo", bias=True, qk_norm=False, window=0, attention_scale=0.0),
        **dict(n_kv_heads=config.n_heads, d_head=config.d_model // config.n_heads, embedding_scale=False),
        **dict(embedding_norm=False, head_bias="none", head_transform=False, head_scale=False),
    )
    return dict(
        model_type="gpt2",
        architectures=["GPT2LMHeadModel"],
        **write_fields(config, CONFIG),
        activation_function=write_activation(config),
        embd_pdrop=config.dropout,
        **dict.fromkeys(("bos_token_id", "eos_token_id")),  # without these, transformers would use 50,256
    )


def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(f"blocks.{{i}}.attention.{part}_proj.{kind}" for part in "qkv")


NAMES: list[NameRow] = [  # matrices are stored transposed
    ("wte.weight", "tokens.weight"),
    ("wpe.weight", "positions.weight"),
    *both("h.{i}.ln_1", "blocks.{i}.attention_norm"),
    ("h.{i}.attn.c_attn.weight", _qkv("weight"), "transpose"),
    ("h.{i}.attn.c_attn.bias", _qkv("bias")),
    ("h.{i}.attn.c_proj.weight", "blocks.{i}.attention.o_proj.weight", "transpose"),
    ("h.{i}.attn.c_proj.bias", "blocks.{i}.attention.o_proj.bias"),
    *both("h.{i}.ln_2", "blocks.{i}.feedforward_norm"),
    ("h.{i}.mlp.c_fc.weight", "blocks.{i}.feedforward.up.weight", "transpose"),
    ("h.{i}.mlp.c_fc.bias", "blocks.{i}.feedforward.up.bias"),
    ("h.{i}.mlp.c_proj.weight", "blocks.{i}.feedforward.down.weight", "transpose"),
    ("h.{i}.mlp.c_proj.bias", "blocks.{i}.feedforward.down.bias"),
    *both("ln_f", "norm"),
    ("lm_head.weight", "head.weight"),
]
