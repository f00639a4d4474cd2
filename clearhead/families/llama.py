"""LLaMA and its relatives: a decoder with rotary positions, RMS norm before each step, gated SiLU, grouped-query heads, no biases.

Mistral adds a sliding window, Qwen2 biases on q, k and v; SmolLM2 and other small models tie head and embedding.
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
    both,
    names_of,
    read_fields,
    refuse_to_write,
    take,
    write_activation,
    write_fields,
)

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

HF = ("llama", "mistral", "qwen2")
PREFIX = "model."
HEADS = ("lm_head.",)
UNUSED = ("*.rotary_emb.inv_freq",)
EXTRAS = ()
CONFIG: list[FieldRow] = [
    ("hidden_size", "d_model"),
    ("num_hidden_layers", "n_layers"),
    ("num_attention_heads", "n_heads"),
    ("head_dim", "d_head", 0),
    ("intermediate_size", "d_ff"),
    ("vocab_size", "vocab_size"),
    ("max_position_embeddings", "max_len", 2048),
    ("rms_norm_eps", "norm_eps", 1e-6),
    ("attention_dropout", "attention_dropout", 0.0),
    ("tie_word_embeddings", "tie_embeddings", False),
]
FIELDS = names_of(CONFIG) | fields(
    "num_key_value_heads hidden_act sliding_window use_sliding_window max_window_layers",
    "rope_parameters rope_scaling rope_theta",
    "attention_bias",  # the file's tensors show which projections have one
    "pretraining_tp is_llama_config max_sequence_length",  # how it was trained; old names
)
ROPE_FIELDS = fields(
    "rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings"
)


def read(theirs: Mapping[str, Any], keys: Container[str]) -> dict[str, Any]:
    kinds = FIELDS | {"layer_types"} if theirs.get("model_type") == "qwen2" else FIELDS
    refuse(
        theirs,
        kinds,
        mlp_bias=(None, False),
        is_causal=(None, True),
        rope_interleaved=(None, False),
        use_mrope=(None, False),
    )
    return read_sizes(theirs, keys)


def read_sizes(theirs: Mapping[str, Any], keys: Container[str]) -> dict[str, Any]:
    """The fields that LLaMA's descendants have in common."""
    found = read_fields(theirs, CONFIG)
    biased = [letter for letter in "qkvo" if f"layers.0.self_attn.{letter}_proj.bias" in keys]
    return dict(
        **found,
        n_kv_heads=theirs.get("num_key_value_heads") or found["n_heads"],
        feedforward=activation(theirs, "hidden_act"),
        attention_bias="".join(biased),
        window=_read_window(theirs),
        **_read_rope(theirs),
    )


def _read_window(theirs: Mapping[str, Any]) -> int:
    """The sliding window, 0 for none. Mistral has one by default; Qwen2 and Qwen3 with `use_sliding_window`, from layer
    `max_window_layers` on; LLaMA ignores the field."""
    kind, window = theirs.get("model_type"), theirs.get("sliding_window", 4096) or 0
    if kind == "mistral":
        return window
    if kind not in ("qwen2", "qwen3") or not theirs.get("use_sliding_window", False) or not window:
        return 0
    n_full, n_layers = take(theirs, "max_window_layers", 28), take(theirs, "num_hidden_layers")
    by_number = ["full_attention"] * (n_full > 0) + ["sliding_attention"] * (n_full < n_layers)
    kinds = set(theirs.get("layer_types") or by_number)
    if len(kinds) > 1 or kinds - {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"config.json's layer_types mix {sorted(kinds)}; only one kind for all layers is supported"
        )
    return 0 if kinds == {"full_attention"} else window


def _read_rope(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Base and scaling: in `rope_parameters` since transformers 5, before in `rope_theta` and `rope_scaling`.

    transformers reads `rope_scaling` if both are there.
    """
    newer: Mapping[str, Any] = theirs.get("rope_parameters") or {}
    rope: Mapping[str, Any] = theirs.get("rope_scaling") or newer
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise CheckpointError(f"config.json's rope type {kind!r} is not supported; supported: default, linear, llama3")
    refuse(rope, ROPE_FIELDS)  # such as a partial rotation, which may also be set here
    base = rope.get("rope_theta") or theirs.get("rope_theta") or 10_000.0
    if newer.get("rope_theta") not in (None, base):
        raise CheckpointError(
            f"config.json has rope_theta={newer['rope_theta']!r} in rope_parameters, and {base!r} beside rope_scaling; "
            f"delete the one that does not hold"
        )
    found: dict[str, Any] = dict(rotary_base=base)
    if kind != "default":
        found.update(rotary_scaling=kind, rotary_factor=take(rope, "factor"))
    if kind == "llama3":
        found.update(
            rotary_low=take(rope, "low_freq_factor"),
            rotary_high=take(rope, "high_freq_factor"),
            rotary_original_len=take(rope, "original_max_position_embeddings"),
        )
    return found


def write(config: Config) -> dict[str, Any]:
    biases = {"": "llama", "qkv": "qwen2", "qkvo": "llama"}
    refuse_to_write(
        *(config, "LLaMA's layout"),
        **{name: BASE[name] for name in ("shape", "positions", "norm", "norm_first", "gated", "bias")},
        **dict(
            rotary_interleaved=False,
            rotary_precision="float32",
            qk_norm=False,
            attention_scale=0.0,
            attention_bias=tuple(biases),
        ),
        **dict(embedding_scale=False, embedding_norm=False, head_bias="none", head_transform=False, head_scale=False),
    )
    kind = biases[config.attention_bias]
    if config.window and kind == "llama":
        refuse_to_write(config, "Mistral's layout", attention_bias="")
        kind = "mistral"
    if kind == "llama":
        refuse_uneven_heads(config, "LLaMA's layout")
    theirs: dict[str, Any] = dict(
        model_type=kind,
        architectures=[
            {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}[kind]
        ],
        **write_sizes(config),
    )
    if kind == "llama":
        theirs["attention_bias"] = config.attention_bias == "qkvo"
    if kind == "mistral" and config.window:
        theirs.update(sliding_window=config.window)
    if kind == "qwen2":
        theirs.update(write_window(config))
    return theirs


def refuse_uneven_heads(config: Config, target: str) -> None:
    """Some of transformers' classes require a d_model that n_heads divides, though d_head is given."""
    if config.d_model % config.n_heads:
        raise CheckpointError(
            f"{target} has no place for d_model={config.d_model} with n_heads={config.n_heads}: one must be a multiple of "
            f"the other; save with format='clearhead'"
        )


def write_sizes(config: Config) -> dict[str, Any]:
    rope: dict[str, Any] = dict(rope_theta=config.rotary_base, rope_type="default")
    if config.rotary_scaling != "none":
        rope.update(rope_type=config.rotary_scaling, factor=config.rotary_factor)
    if config.rotary_scaling == "llama3":
        rope.update(
            low_freq_factor=config.rotary_low,
            high_freq_factor=config.rotary_high,
            original_max_position_embeddings=config.rotary_original_len,
        )
    return dict(
        **write_fields(config, CONFIG),
        num_key_value_heads=config.n_kv_heads,
        hidden_act=write_activation(config),
        rope_parameters=rope,
        **dict.fromkeys(("bos_token_id", "eos_token_id")),  # without these, transformers would use 1 and 2
    )


def write_window(config: Config) -> dict[str, Any]:
    """Qwen's sliding window, in all layers."""
    if not config.window:
        return {}
    kinds = ["sliding_attention"] * config.n_layers
    return dict(use_sliding_window=True, sliding_window=config.window, max_window_layers=0, layer_types=kinds)


NAMES: list[NameRow] = [
    ("embed_tokens.weight", "tokens.weight"),
    ("layers.{i}.input_layernorm.weight", "blocks.{i}.attention_norm.weight"),
    *both("layers.{i}.self_attn.q_proj", "blocks.{i}.attention.q_proj"),
    *both("layers.{i}.self_attn.k_proj", "blocks.{i}.attention.k_proj"),
    *both("layers.{i}.self_attn.v_proj", "blocks.{i}.attention.v_proj"),
    *both("layers.{i}.self_attn.o_proj", "blocks.{i}.attention.o_proj"),
    ("layers.{i}.post_attention_layernorm.weight", "blocks.{i}.feedforward_norm.weight"),
    ("layers.{i}.mlp.gate_proj.weight", "blocks.{i}.feedforward.gate.weight"),
    ("layers.{i}.mlp.up_proj.weight", "blocks.{i}.feedforward.up.weight"),
    ("layers.{i}.mlp.down_proj.weight", "blocks.{i}.feedforward.down.weight"),
    ("norm.weight", "norm.weight"),
    ("lm_head.weight", "head.weight"),
]
