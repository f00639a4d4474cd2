"""Qwen3 and Apertus: LLaMA with an RMS norm on the queries and keys of each head. Apertus and Arcee: the feed-forward is not gated.

Models of our own recipes are saved in this layout: decoders, and with `is_causal=false` masked language models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clearhead.config import Config
from clearhead.errors import CheckpointError
from clearhead.families import llama
from clearhead.families.allowed_fields import refuse
from clearhead.families.config_translation import Keys, NameRow, refuse_to_write, take

BASE: dict[str, Any] = {**llama.BASE, "qk_norm": True}

QWEN: dict[str, Any] = dict(
    d_head=128, n_kv_heads=8, vocab_size=151_936, max_len=40_960, rotary_base=1e6, norm_eps=1e-6
)

SIZES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": dict(n_layers=28, d_model=1024, n_heads=16, d_ff=3072, tie_embeddings=True, **QWEN),
    "qwen3-1.7b": dict(n_layers=28, d_model=2048, n_heads=16, d_ff=6144, tie_embeddings=True, **QWEN),
    "qwen3-4b": dict(n_layers=36, d_model=2560, n_heads=32, d_ff=9728, tie_embeddings=True, **QWEN),
    "qwen3-8b": dict(n_layers=36, d_model=4096, n_heads=32, d_ff=12_288, **QWEN),
}

# The model_type by its two differences: a norm on queries and keys, a gated feed-forward.
KINDS = {(True, True): "qwen3", (True, False): "apertus", (False, False): "arcee"}

HF = tuple(KINDS.values())
PREFIX = llama.PREFIX
HEADS = llama.HEADS
UNUSED = llama.UNUSED
EXTRAS = ()


def read(theirs: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    kind, two_way = theirs["model_type"], theirs.get("is_causal") is False
    known = llama.FIELDS | {"is_causal"} | ({"layer_types"} if kind == "qwen3" else set())
    refuse(theirs, known, mlp_bias=(None, False), rope_interleaved=(None, False), use_mrope=(None, False))
    if kind != "qwen3":  # where these fields are missing, transformers has other numbers than for LLaMA
        take(theirs, "rms_norm_eps")
    if kind == "apertus":
        rope = theirs.get("rope_scaling") or take(theirs, "rope_parameters")
        take({**theirs, **rope}, "rope_theta")
    qk_norm, gated = next(differences for differences, name in KINDS.items() if name == kind)
    found = dict(llama.read_sizes(theirs, keys), qk_norm=qk_norm, gated=gated)
    if not two_way:
        return found
    if "lm_head.weight" not in keys and not (
        found["tie_embeddings"] and keys["embed_tokens.weight"].startswith(PREFIX)
    ):
        raise CheckpointError(
            f"config.json's is_causal=false makes this {kind} an encoder, and the file has no head; supported are masked language "
            f"models; save the model with its head"
        )
    if found["window"]:
        raise CheckpointError(
            f"config.json has is_causal=false and sliding_window={found['window']}; one of them is supported; set the other to null"
        )
    return dict(found, shape="encoder", head="tokens")


def write(config: Config) -> dict[str, Any]:
    kind = KINDS.get((config.qk_norm, config.gated), "qwen3")
    two_way = config.shape == "encoder"
    refuse_to_write(
        *(config, f"{kind.title()}'s layout"),
        **dict(shape=("decoder", "encoder"), inputs="tokens", head="tokens", positions="rotary", norm="rms"),
        **dict(norm_first=True, bias=False, attention_bias=("", "qkvo"), attention_scale=0.0),
        **dict(rotary_interleaved=False, rotary_precision="float32", embedding_scale=False, embedding_norm=False),
        **dict(head_bias="none", head_transform=False, head_scale=False, n_segments=0, dropped_token=-1),
        **(dict(window=0) if two_way or kind != "qwen3" else {}),
        **(dict(qk_norm=True) if kind == "qwen3" else {}),
    )
    if kind == "arcee":
        llama.refuse_uneven_heads(config, "Arcee's layout")
    return dict(
        model_type=kind,
        architectures=[f"{kind.title()}ForCausalLM"],
        **llama.write_sizes(config),
        attention_bias=config.attention_bias == "qkvo",
        pad_token_id=None,  # without it, Apertus would use 3
        **(llama.write_window(config) if kind == "qwen3" else {}),
        **(dict(is_causal=False) if two_way else {}),
    )


def names(config: Config) -> list[NameRow]:
    norms: list[NameRow] = [
        ("layers.{i}.self_attn.q_norm.weight", "blocks.{i}.attention.q_norm.weight"),
        ("layers.{i}.self_attn.k_norm.weight", "blocks.{i}.attention.k_norm.weight"),
    ]
    if KINDS[config.qk_norm, config.gated] == "apertus":
        norms += [
            ("layers.{i}.attention_layernorm.weight", "blocks.{i}.attention_norm.weight"),
            ("layers.{i}.feedforward_layernorm.weight", "blocks.{i}.feedforward_norm.weight"),
        ]
    return [*norms, *llama.NAMES]


NAMES = names
