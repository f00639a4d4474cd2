"""llama2.c's .bin files: seven int32 of sizes, then all tensors as float32, in a fixed order without names."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from clearhead.checkpoint.checkpoint import Checkpoint, make_config
from clearhead.checkpoint.tensor_names import expand
from clearhead.checkpoint.weight_files import FileRange, MappedWeights
from clearhead.config import Generation
from clearhead.errors import CheckpointError
from clearhead.families import llama
from clearhead.families.config_translation import NameRow

HEADER = struct.Struct("<7i")
NEWER = b"24ka"  # the first bytes of the format's later versions

NAMES: list[NameRow] = [
    ("token_embedding_table", "tokens.weight"),
    ("rms_att_weight.{i}", "blocks.{i}.attention_norm.weight"),
    ("wq.{i}", "blocks.{i}.attention.q_proj.weight", "interleaved"),
    ("wk.{i}", "blocks.{i}.attention.k_proj.weight", "interleaved"),
    ("wv.{i}", "blocks.{i}.attention.v_proj.weight"),
    ("wo.{i}", "blocks.{i}.attention.o_proj.weight"),
    ("rms_ffn_weight.{i}", "blocks.{i}.feedforward_norm.weight"),
    ("w1.{i}", "blocks.{i}.feedforward.gate.weight"),
    ("w2.{i}", "blocks.{i}.feedforward.down.weight"),
    ("w3.{i}", "blocks.{i}.feedforward.up.weight"),
    ("rms_final_weight", "norm.weight"),
    ("wcls", "head.weight"),
]
# Cosines and sines of every position: computed from the sizes; llama2.c skips them too.
UNUSED = ("freq_cis_real", "freq_cis_imag")


def open_checkpoint(path: Path) -> Checkpoint:
    with path.open("rb") as stream:
        start = stream.read(HEADER.size)
    if start.startswith(NEWER):
        raise CheckpointError(f"{path} is a later version of llama2.c's format; export it with --version 0")
    if len(start) < HEADER.size:
        raise CheckpointError(f"{path} has only {len(start)} bytes, too few for llama2.c's header; fetch it again")
    d_model, d_ff, n_layers, n_heads, n_kv_heads, vocab_size, max_len = sizes = HEADER.unpack(start)
    tied = vocab_size > 0  # a negative size means that the head is stored too
    if min(*sizes[:5], abs(vocab_size), max_len) < 1 or d_model % n_heads or n_heads % n_kv_heads:
        raise CheckpointError(f"{path} starts with the sizes {sizes}, which no model has; is it llama2.c's .bin?")
    fields = dict(d_model=d_model, d_ff=d_ff, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads)
    fields.update(vocab_size=abs(vocab_size), max_len=max_len, tie_embeddings=tied)
    layout = _layout(*sizes)
    needed, size = HEADER.size + 4 * sum(map(math.prod, layout.values())), path.stat().st_size
    if needed != size:
        raise CheckpointError(
            f"{path} has {size:,} bytes, but with the sizes it starts with, {sizes}, it would have {needed:,}; "
            f"is it llama2.c's .bin, and whole?"
        )
    weights = _map(path, layout)
    config = make_config(path, {"family": "llama", **llama.BASE, **fields}, weights)
    # llama2.c ends a text where the next one starts, at bos.
    generation = Generation(bos=1, eos=(2, 1))
    keys = {name: name for name in weights.shapes}
    return Checkpoint(config, weights, expand(NAMES, config), keys, generation, unused=UNUSED)


def _layout(
    d_model: int, d_ff: int, n_layers: int, n_heads: int, n_kv_heads: int, vocab_size: int, max_len: int
) -> dict[str, tuple[int, ...]]:
    """The tensors in the order of the file: name -> how many of them, and the shape of each."""
    d_kv = d_model // n_heads * n_kv_heads
    return {
        "token_embedding_table": (1, abs(vocab_size), d_model),
        "rms_att_weight.{i}": (n_layers, d_model),
        "wq.{i}": (n_layers, d_model, d_model),
        "wk.{i}": (n_layers, d_kv, d_model),
        "wv.{i}": (n_layers, d_kv, d_model),
        "wo.{i}": (n_layers, d_model, d_model),
        "rms_ffn_weight.{i}": (n_layers, d_model),
        "w1.{i}": (n_layers, d_ff, d_model),
        "w2.{i}": (n_layers, d_model, d_ff),
        "w3.{i}": (n_layers, d_ff, d_model),
        "rms_final_weight": (1, d_model),
        "freq_cis_real": (1, max_len, d_model // n_heads // 2),
        "freq_cis_imag": (1, max_len, d_model // n_heads // 2),
        **({} if vocab_size > 0 else {"wcls": (1, abs(vocab_size), d_model)}),
    }


def _map(path: Path, layout: Mapping[str, tuple[int, ...]]) -> MappedWeights:
    weights = MappedWeights()
    weights.map(path)
    at = HEADER.size
    for name, (count, *shape) in layout.items():
        for i in range(count):
            key = name.replace("{i}", str(i))
            weights.shapes[key], weights.dtypes[key] = tuple(shape), torch.float32
            weights.ranges[key] = FileRange(path, at, 4 * math.prod(shape))
            at += 4 * math.prod(shape)
    return weights
