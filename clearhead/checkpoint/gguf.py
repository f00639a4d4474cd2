"""llama.cpp's .gguf files: the architectures LLaMA and Qwen2, in any quantisation that the `gguf` package can dequantise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clearhead.checkpoint.checkpoint import Checkpoint, make_config
from clearhead.checkpoint.gguf_file import GgufWeights
from clearhead.checkpoint.tensor_names import expand
from clearhead.config import Generation
from clearhead.errors import CheckpointError, did_you_mean
from clearhead.families import llama
from clearhead.families.config_translation import NameRow, both
from clearhead.layers.positions import Rotary

# The order of the rows of q and k: for LLaMA, llama.cpp keeps rotary pairs as neighbours.
ARCHITECTURES = {"llama": "interleaved", "qwen2": ""}

# Metadata keys after "<architecture>.": those that are read, and others with the values that change nothing.
READ = {
    *("context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),
    *("vocab_size", "tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (1.0,),
    "logit_scale": (1.0,),
}


def names(layout: str) -> list[NameRow]:
    """The table of names; `layout` is the order of the rows of q and k."""
    q_and_k: list[NameRow] = [
        (f"blk.{{i}}.attn_{letter}.{kind}", f"blocks.{{i}}.attention.{letter}_proj.{kind}", layout)
        for letter in "qk"
        for kind in ("weight", "bias")
    ]
    return [
        ("token_embd.weight", "tokens.weight"),
        ("blk.{i}.attn_norm.weight", "blocks.{i}.attention_norm.weight"),
        *q_and_k,
        *both("blk.{i}.attn_v", "blocks.{i}.attention.v_proj"),
        *both("blk.{i}.attn_output", "blocks.{i}.attention.o_proj"),
        ("blk.{i}.ffn_norm.weight", "blocks.{i}.feedforward_norm.weight"),
        ("blk.{i}.ffn_gate.weight", "blocks.{i}.feedforward.gate.weight"),
        ("blk.{i}.ffn_up.weight", "blocks.{i}.feedforward.up.weight"),
        ("blk.{i}.ffn_down.weight", "blocks.{i}.feedforward.down.weight"),
        ("output_norm.weight", "norm.weight"),
        ("output.weight", "head.weight"),
    ]


def open_checkpoint(path: Path) -> Checkpoint:
    weights = GgufWeights(path)
    meta = weights.metadata
    kind = meta.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{path} holds the architecture {kind!r}, which is not read; {did_you_mean(str(kind), ARCHITECTURES)}"
        )
    own = {key.removeprefix(f"{kind}."): value for key, value in meta.items() if key.startswith(f"{kind}.")}
    _refuse(path, meta, own)
    shapes = weights.shapes
    d_model, n_heads, d_head, n_kv_heads = _heads(path, own, shapes)
    biased = [
        x for x, name in zip("qkvo", ("q", "k", "v", "output"), strict=True) if f"blk.0.attn_{name}.bias" in shapes
    ]
    fields = dict(
        d_model=d_model,
        n_layers=_whole(path, own, "block_count"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_ff=_whole(path, own, "feed_forward_length"),
        vocab_size=shapes["token_embd.weight"][0],
        max_len=_whole(path, own, "context_length"),
        norm_eps=_number(path, own, "attention.layer_norm_rms_epsilon", 1e-5),
        attention_bias="".join(biased),
        tie_embeddings="output.weight" not in shapes,
        **_rope(path, own, weights, d_head),
    )
    config = make_config(path, {"family": "llama", **llama.BASE, **fields}, weights)
    return Checkpoint(
        config,
        weights,
        expand(names(ARCHITECTURES[kind]), config),
        {name: name for name in shapes},
        _generation(meta),
        unused=("rope_freqs.weight",),  # read by _rope
    )


def _refuse(path: Path, meta: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if meta.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {meta['split.count']} pieces of a model; join them first: llama-gguf-split --merge"
        )
    for key, value in own.items():
        if key not in READ and value not in NEUTRAL.get(key, ()):
            raise CheckpointError(
                f"{path} sets {key!r} to {value!r}, which may change what the model computes and is not supported; "
                f"supported: {', '.join(map(repr, NEUTRAL.get(key, ()))) or 'none'}"
            )


def _whole(path: Path, own: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = own.get(key, default)
    if type(value) is not int or not 0 < value < 2**31:
        raise CheckpointError(f"{path} has {value!r} as its {key!r}, which must be one number above 0; fetch it again")
    return value


def _number(path: Path, own: Mapping[str, Any], key: str, default: float) -> float:
    value = own.get(key, default)
    if isinstance(value, str) or not 0 < value < math.inf:
        raise CheckpointError(f"{path} has {value!r} as its {key!r}, which must be a number above 0; fetch it again")
    return float(value)


def _heads(path: Path, own: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int, int]:
    """d_model, n_heads, d_head and n_kv_heads, checked against the tensors before anything is built from them."""
    d_model, n_heads = _whole(path, own, "embedding_length"), _whole(path, own, "attention.head_count")
    n_kv_heads = _whole(path, own, "attention.head_count_kv", n_heads)
    d_head = _whole(path, own, "attention.key_length", d_model // n_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _whole(path, own, key, d_head) != d_head:
            raise CheckpointError(
                f"{path} sets {key!r} to {own[key]}, but its heads are {d_head} wide; only equal widths are supported"
            )
    expected = {
        "token_embd.weight": (shapes.get("token_embd.weight", (0,))[0], d_model),
        "blk.0.attn_q.weight": (n_heads * d_head, d_model),
        "blk.0.attn_k.weight": (n_kv_heads * d_head, d_model),
    }
    for name, shape in expected.items():
        if shapes.get(name) != shape:
            raise CheckpointError(
                f"{path} has {name!r} of shape {shapes.get(name)}, but by its metadata it must be {shape}; fetch it again"
            )
    return d_model, n_heads, d_head, n_kv_heads


def _rope(path: Path, own: Mapping[str, Any], weights: GgufWeights, d_head: int) -> dict[str, Any]:
    base = _number(path, own, "rope.freq_base", 10_000.0)
    fields: dict[str, Any] = dict(rotary_base=base)
    kind = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own else "none")
    if kind not in ("none", "linear"):
        raise CheckpointError(f"{path} has the rope scaling {kind!r}, which is not supported; supported: none, linear")
    if kind == "linear":
        key = "rope.scaling.factor" if "rope.scaling.factor" in own else "rope.scale_linear"
        fields.update(rotary_scaling="linear", rotary_factor=_number(path, own, key, 1.0))
    if weights.shapes.get("rope_freqs.weight") == (d_head // 2,):
        # LLaMA 3's scaling is stored as a divisor for each frequency. Between releases only its factor differs.
        divisors = weights.read("rope_freqs.weight").float()
        scaling: dict[str, Any] = dict(
            scaling="llama3", factor=float(divisors.max()), low=1.0, high=4.0, original_len=8192
        )
        plain = Rotary(d_head=d_head, base=base).frequencies(divisors.device)
        ours = Rotary(d_head=d_head, base=base, **scaling).frequencies(divisors.device)
        # The file's numbers were computed in float32, in another order.
        if kind == "none" and torch.allclose(plain / ours, divisors, rtol=1e-4):
            return {**fields, **{f"rotary_{name}": value for name, value in scaling.items()}}
    if "rope_freqs.weight" in weights.shapes:
        raise CheckpointError(
            f"{path} scales its rotary frequencies by a table that is not LLaMA 3's, which is not supported; "
            f"load the model it was made from instead"
        )
    return fields


def _generation(meta: Mapping[str, Any]) -> Generation:
    def token(role: str) -> int | None:
        value = meta.get(f"tokenizer.ggml.{role}_token_id")
        return value if type(value) is int and value < 2**31 else None  # unsigned: some files write -1

    ends = dict.fromkeys(token(role) for role in ("eos", "eot", "eom"))
    return Generation(bos=token("bos"), eos=tuple(end for end in ends if end is not None), pad=token("padding"))
