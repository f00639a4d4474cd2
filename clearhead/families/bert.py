"""BERT (Devlin et al. 2018) and MiniLM: an encoder with learned positions and segments, norm after each step, gelu, a pooler.

The pooler and the next-sentence head of a masked language model are kept for saving but not computed with. So is the pooler of
a sentence embedder (a folder of sentence-transformers), which pools the states as its modules say.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from clearhead.config import Config
from clearhead.errors import CheckpointError
from clearhead.families.allowed_fields import fields, refuse
from clearhead.families.config_translation import (
    BERT_SIZES,
    FieldRow,
    NameRow,
    activation,
    both,
    labels,
    names_of,
    pooling,
    read_fields,
    refuse_to_write,
    write_activation,
    write_fields,
    write_labels,
    write_pooling,
)

BASE: dict[str, Any] = dict(
    shape="encoder",
    positions="learned",
    n_segments=2,
    embedding_norm=True,
    norm="layer",
    norm_first=False,
    norm_eps=1e-12,
    feedforward="gelu",
    pooler=True,
    vocab_size=30_522,
    max_len=512,
    init="truncated",
)

SIZES: dict[str, dict[str, Any]] = {
    "bert-base": dict(n_layers=12, d_model=768, n_heads=12),
    "bert-large": dict(n_layers=24, d_model=1024, n_heads=16),
    "minilm-l6": dict(n_layers=6, d_model=384, n_heads=12),
    "minilm-l12": dict(n_layers=12, d_model=384, n_heads=12),
}

HF: tuple[str, ...] = ("bert",)
PREFIX = "bert."
HEADS: tuple[str, ...] = ("cls.", "classifier.")
UNUSED: tuple[str, ...] = ("*embeddings.position_ids", "*embeddings.token_type_ids")
EXTRAS: tuple[str, ...] = (
    *("*pooler.dense.*", "cls.seq_relationship.*", "cls.predictions.bias"),
    *("cls.species.*", "cls.chain.*", "cls.graft.*"),  # AntiBERTy's heads beside the one for residues
)
CONFIG: list[FieldRow] = [
    *BERT_SIZES,
    ("vocab_size", "vocab_size"),
    ("max_position_embeddings", "max_len"),
    ("type_vocab_size", "n_segments", 2),
]
FIELDS = names_of(CONFIG) | fields(
    "hidden_act modules",
    # Of TensorFlow's files; no model reads them.
    "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type",
)


def read(theirs: Mapping[str, Any], keys: Container[str]) -> dict[str, Any]:
    refuse(theirs, FIELDS, position_embedding_type=(None, "absolute"), is_causal=(None, False))
    return dict(
        **read_fields(theirs, CONFIG),
        feedforward=activation(theirs, "hidden_act", "gelu"),
        **_read_head(theirs, keys),
    )


def _read_head(theirs: Mapping[str, Any], keys: Container[str]) -> dict[str, Any]:
    """The fields of head and pooler. The file's keys show which of them the model has."""
    pooler, pools = "pooler.dense.weight" in keys, pooling(theirs)
    if pools and ("cls.predictions.transform.dense.weight" in keys or "classifier.weight" in keys):
        raise CheckpointError(
            f"modules.json makes sentence embeddings, but the weights have a head (architectures={theirs.get('architectures')}), "
            f"which embeddings do not use; save the model as BertModel, or delete modules.json to load it with its head"
        )
    if "cls.predictions.transform.dense.weight" in keys:
        tied = theirs.get("tie_word_embeddings", True)
        return dict(head="tokens", head_transform=True, head_bias="learned", tie_embeddings=tied, pooler=False)
    if "classifier.weight" in keys:
        if not pooler:
            raise CheckpointError(
                f"config.json's architectures={theirs.get('architectures')} classify each token, which is not supported; "
                f"supported: BertModel, BertForMaskedLM, BertForPreTraining, BertForSequenceClassification"
            )
        return dict(head="classes", pooler=True, **labels(theirs))
    return {"pooler": pooler, **pools}


def write(config: Config) -> dict[str, Any]:
    kind = {"none": "BertModel", "tokens": "BertForMaskedLM", "classes": "BertForSequenceClassification"}[config.head]
    refuse_to_write(
        *(config, "BERT's layout"),
        **{name: BASE[name] for name in ("shape", "positions", "embedding_norm", "norm", "norm_first")},
        **dict(inputs="tokens", bias=True, attention_bias="qkvo", gated=False, qk_norm=False, window=0),
        **dict(n_kv_heads=config.n_heads, d_head=config.d_model // config.n_heads, attention_scale=0.0),
        **dict(embedding_scale=False, n_segments=config.n_segments or 1, dropped_token=-1, head_scale=False),
    )
    if config.head == "tokens":
        refuse_to_write(config, "BERT's layout", head_transform=True, head_bias="learned")
    if config.head == "classes" or config.pooler:
        refuse_to_write(config, "BERT's pooler", pooler=True, pool="first", pool_normed=False)
    return dict(
        model_type="bert",
        architectures=[kind],
        **write_fields(config, CONFIG),
        hidden_act=write_activation(config),
        tie_word_embeddings=config.tie_embeddings or config.head != "tokens",
        **write_labels(config),
        **write_pooling(config),
    )


def added(config: Config) -> dict[str, Any]:
    """The bias that the layout has beside an untied head and does not use (see `_token_head`)."""
    import torch

    unused = config.head == "tokens" and not config.tie_embeddings
    return {"cls.predictions.bias": torch.zeros(config.vocab_size)} if unused else {}


def norm(theirs: str, ours: str) -> list[NameRow]:
    """A norm's weight and bias, under their current names and under the older ones of TensorFlow."""
    return [*both(theirs, ours), (f"{theirs}.gamma", f"{ours}.weight"), (f"{theirs}.beta", f"{ours}.bias")]


def names(config: Config) -> list[NameRow]:
    layer, block = "encoder.layer.{i}", "blocks.{i}"
    return [
        ("embeddings.word_embeddings.weight", "tokens.weight"),
        ("embeddings.position_embeddings.weight", "positions.weight"),
        ("embeddings.token_type_embeddings.weight", "segments.weight"),
        *norm("embeddings.LayerNorm", "embedding_norm"),
        *both(f"{layer}.attention.self.query", f"{block}.attention.q_proj"),
        *both(f"{layer}.attention.self.key", f"{block}.attention.k_proj"),
        *both(f"{layer}.attention.self.value", f"{block}.attention.v_proj"),
        *both(f"{layer}.attention.output.dense", f"{block}.attention.o_proj"),
        *norm(f"{layer}.attention.output.LayerNorm", f"{block}.attention_norm"),
        *both(f"{layer}.intermediate.dense", f"{block}.feedforward.up"),
        *both(f"{layer}.output.dense", f"{block}.feedforward.down"),
        *norm(f"{layer}.output.LayerNorm", f"{block}.feedforward_norm"),
        *both("pooler.dense", "pool.dense"),
        *(both("classifier", "head") if config.head == "classes" else _token_head(config)),
    ]


def _token_head(config: Config) -> list[NameRow]:
    """With a tied head the bias is `cls.predictions.bias`; with an untied one `decoder.bias` is used, and the first is not."""
    return [
        *both("cls.predictions.transform.dense", "head.dense"),
        *norm("cls.predictions.transform.LayerNorm", "head.norm"),
        *([("cls.predictions.bias", "head.bias")] if config.tie_embeddings else []),
        *both("cls.predictions.decoder", "head"),
    ]


NAMES = names
