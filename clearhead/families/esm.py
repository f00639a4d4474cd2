"""ESM-2 (Lin et al. 2023): an encoder over amino acids with rotary positions, norm before each step, gelu.

It was trained with token dropout (`dropped_token`) and with rotary frequencies in float16 (`rotary_precision`), and its output is
right only with both. Its contact head reads attention maps of all layers: the weights are kept beside the model (`extras`), and
inside/contacts.py computes with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clearhead.config import Config
from clearhead.errors import CheckpointError
from clearhead.families.allowed_fields import fields, refuse
from clearhead.families.bert import norm
from clearhead.families.config_translation import (
    BERT_SIZES,
    FieldRow,
    Keys,
    NameRow,
    both,
    labels,
    names_of,
    read_fields,
    refuse_to_write,
    take,
    write_fields,
    write_labels,
)

BASE: dict[str, Any] = dict(
    shape="encoder",
    positions="rotary",
    norm="layer",
    norm_first=True,
    feedforward="gelu",
    n_heads=20,
    vocab_size=33,
    dropped_token=32,
    max_len=1026,
    init="normal",
)

SIZES: dict[str, dict[str, Any]] = {
    "esm2-8m": dict(n_layers=6, d_model=320),
    "esm2-35m": dict(n_layers=12, d_model=480),
    "esm2-150m": dict(n_layers=30, d_model=640),
    "esm2-650m": dict(n_layers=33, d_model=1280),
}

HF: tuple[str, ...] = ("esm",)
PREFIX = "esm."
HEADS: tuple[str, ...] = ("lm_head.", "classifier.")
# Older files also have a table of positions, though the model uses rotary ones.
UNUSED: tuple[str, ...] = (
    "*embeddings.position_ids",
    "*embeddings.position_embeddings.weight",
    "*rotary_embeddings.inv_freq",  # computed from `rotary_base` and `rotary_precision`
)
EXTRAS: tuple[str, ...] = ("*contact_head.*",)
CONFIG: list[FieldRow] = [
    *BERT_SIZES,
    ("vocab_size", "vocab_size"),
    ("max_position_embeddings", "max_len", 1026),
    ("rope_theta", "rotary_base", 10_000.0),
    ("emb_layer_norm_before", "embedding_norm", False),
]
FIELDS = names_of(CONFIG) | fields("token_dropout mask_token_id vocab_list")


def read(theirs: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    refuse(
        *(theirs, FIELDS),
        position_embedding_type=("rotary",),
        is_folding_model=(None, False),
        hidden_act=(None, "gelu"),
        is_causal=(None, False),
    )
    take(theirs, "position_embedding_type")  # without the field, positions are absolute: ESM-1b
    found = read_fields(theirs, CONFIG)
    d_head = found["d_model"] // found["n_heads"]
    return dict(
        **found,
        dropped_token=take(theirs, "mask_token_id") if theirs.get("token_dropout") else -1,
        rotary_precision=_read_precision(keys, d_head=d_head, base=found["rotary_base"]),
        **_read_head(theirs, keys),
    )


def _read_precision(keys: Keys, *, d_head: int, base: float) -> str:
    """The type to which the stored frequencies are rounded. transformers computes with the stored ones, so must we."""
    import torch

    from clearhead.layers.positions import Rotary

    stored = [keys.tensor(key).float() for key in keys if key.endswith("rotary_embeddings.inv_freq")]
    if not stored:
        return "float32"
    if all(tuple(one.shape) == (d_head // 2,) for one in stored):
        for precision in ("float32", "float16", "bfloat16"):
            wanted = Rotary(d_head=d_head, base=base, precision=precision).frequencies(torch.device("cpu"))
            if all(torch.allclose(one, wanted, rtol=1e-6, atol=0) for one in stored):
                return precision
    raise CheckpointError(
        f"the file's rotary frequencies (inv_freq) are not those of rope_theta={base} and a head of {d_head}, nor those in "
        f"float16 or bfloat16; do config and weights belong together?"
    )


def _read_head(theirs: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """The fields of head and pooler. The file's keys show which of them the model has."""
    if "lm_head.dense.weight" in keys:
        tied = theirs.get("tie_word_embeddings", True)
        return dict(head="tokens", head_transform=True, head_bias="learned", tie_embeddings=tied)
    if "classifier.dense.weight" in keys:
        return dict(head="classes", pooler=True, **labels(theirs))
    return dict(pooler="pooler.dense.weight" in keys)


def write(config: Config) -> dict[str, Any]:
    kind = {"none": "EsmModel", "tokens": "EsmForMaskedLM", "classes": "EsmForSequenceClassification"}[config.head]
    refuse_to_write(
        *(config, "ESM's layout"),
        **{name: BASE[name] for name in ("shape", "positions", "norm", "norm_first", "feedforward")},
        **dict(inputs="tokens", bias=True, attention_bias="qkvo", gated=False, qk_norm=False, window=0),
        **dict(n_kv_heads=config.n_heads, d_head=config.d_model // config.n_heads, attention_scale=0.0),
        **dict(embedding_scale=False, n_segments=0, rotary_interleaved=False, rotary_scaling="none"),
        **dict(head_scale=False, pool="first", pool_normed=False),
    )
    if config.head == "tokens":
        refuse_to_write(config, "ESM's layout", head_transform=True, head_bias="learned", pooler=False)
    if config.head == "classes":
        refuse_to_write(config, "ESM's layout", pooler=True)
    return dict(
        model_type="esm",
        architectures=[kind],
        **write_fields(config, CONFIG),
        position_embedding_type="rotary",
        token_dropout=config.dropped_token >= 0,
        mask_token_id=config.dropped_token if config.dropped_token >= 0 else None,
        pad_token_id=1,  # transformers needs one; the checkpoint's own id replaces it
        tie_word_embeddings=config.tie_embeddings or config.head != "tokens",
        **write_labels(config),
    )


def added(config: Config) -> dict[str, Any]:
    """The rotary frequencies, which the layout stores in each layer, and a contact head of zeros."""
    import torch

    from clearhead.layers.positions import Rotary

    rotary = Rotary(d_head=config.d_head, base=config.rotary_base, precision=config.rotary_precision)
    return {
        **{
            f"encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq": rotary.frequencies(torch.device("cpu"))
            for i in range(config.n_layers)
        },
        "contact_head.regression.weight": torch.zeros(1, config.n_layers * config.n_heads),
        "contact_head.regression.bias": torch.zeros(1),
    }


CLASS_HEAD = [*both("classifier.dense", "pool.dense"), *both("classifier.out_proj", "head")]
TOKEN_HEAD: list[NameRow] = [
    *both("pooler.dense", "pool.dense"),
    *both("lm_head.dense", "head.dense"),
    *both("lm_head.layer_norm", "head.norm"),
    ("lm_head.decoder.weight", "head.weight"),
    ("lm_head.bias", "head.bias"),
]


def names(config: Config) -> list[NameRow]:
    layer, block = "encoder.layer.{i}", "blocks.{i}"
    return [
        ("embeddings.word_embeddings.weight", "tokens.weight"),
        *both("embeddings.layer_norm", "embedding_norm"),
        *norm(f"{layer}.attention.LayerNorm", f"{block}.attention_norm"),
        *both(f"{layer}.attention.self.query", f"{block}.attention.q_proj"),
        *both(f"{layer}.attention.self.key", f"{block}.attention.k_proj"),
        *both(f"{layer}.attention.self.value", f"{block}.attention.v_proj"),
        *both(f"{layer}.attention.output.dense", f"{block}.attention.o_proj"),
        *norm(f"{layer}.LayerNorm", f"{block}.feedforward_norm"),
        *both(f"{layer}.intermediate.dense", f"{block}.feedforward.up"),
        *both(f"{layer}.output.dense", f"{block}.feedforward.down"),
        *both("encoder.emb_layer_norm_after", "norm"),
        *(CLASS_HEAD if config.head == "classes" else TOKEN_HEAD),
    ]


NAMES = names
