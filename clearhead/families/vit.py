"""Vision Transformers (Dosovitskiy et al. 2020) and DeiT (class token only): an encoder over patches, norm before each step.

`load(path, image_size=384)` makes one for larger images than it was trained on: its positions are interpolated.
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
    read_fields,
    refuse_to_write,
    take,
    write_activation,
    write_fields,
    write_labels,
)

BASE: dict[str, Any] = dict(
    shape="encoder",
    inputs="patches",
    positions="learned",
    norm="layer",
    norm_first=True,
    norm_eps=1e-12,
    feedforward="gelu",
    image_size=224,
    patch_size=16,
    head="classes",
    n_classes=1000,
    init="truncated",
)

SIZES: dict[str, dict[str, Any]] = {
    "vit-b-16": dict(n_layers=12, d_model=768, n_heads=12),
    "vit-b-32": dict(n_layers=12, d_model=768, n_heads=12, patch_size=32),
    "vit-l-16": dict(n_layers=24, d_model=1024, n_heads=16),
    "vit-h-14": dict(n_layers=32, d_model=1280, n_heads=16, patch_size=14),
    "deit-ti-16": dict(n_layers=12, d_model=192, n_heads=3),
    "deit-s-16": dict(n_layers=12, d_model=384, n_heads=6),
}

HF: tuple[str, ...] = ("vit", "deit")
PREFIX = "vit."
HEADS: tuple[str, ...] = ("classifier.",)
UNUSED: tuple[str, ...] = ()
EXTRAS: tuple[str, ...] = ("*embeddings.mask_token",)
CONFIG: list[FieldRow] = [*BERT_SIZES, ("num_channels", "n_channels", 3)]
FIELDS = names_of(CONFIG) | fields(
    "head_dim image_size patch_size qkv_bias hidden_act",
    "encoder_stride vocab_size max_position_embeddings",  # of masked images, and of models over text
)


def read(theirs: Mapping[str, Any], keys: Container[str]) -> dict[str, Any]:
    if theirs.get("model_type") == "deit":
        raise CheckpointError(
            "config.json's model_type='deit' has a distillation token beside the class token, which is not supported; a DeiT "
            "without one is stored as model_type='vit': take that, such as facebook/deit-base-patch16-224"
        )
    found = read_fields(theirs, CONFIG)
    refuse(
        *(theirs, FIELDS),
        pooler_act=(None, "tanh"),
        pooler_output_size=(None, found["d_model"]),
        is_causal=(None, False),
    )
    head = "classes" if "classifier.weight" in keys else "none"
    return dict(
        **found,
        d_head=theirs.get("head_dim") or 0,
        image_size=_side(theirs, "image_size", 224),
        patch_size=_side(theirs, "patch_size", 16),
        attention_bias="qkvo" if theirs.get("qkv_bias", True) else "o",
        feedforward=activation(theirs, "hidden_act", "gelu"),
        pooler="pooler.dense.weight" in keys,
        **{"head": head, "n_classes": 0, **(labels(theirs) if head == "classes" else {})},
    )


def _side(theirs: Mapping[str, Any], field: str, default: int) -> int:
    """The side of a square; the field is a number or a pair of them."""
    value = take(theirs, field, default)
    sides = value if isinstance(value, list) else [value]
    if any(side != sides[0] for side in sides[1:]) or not sides:
        raise CheckpointError(
            f"config.json's {field}={value!r} is not square; supported are squares, such as {default}"
        )
    return sides[0]


def write(config: Config) -> dict[str, Any]:
    classes = config.head == "classes"
    refuse_to_write(
        *(config, "ViT's layout"),
        **{name: BASE[name] for name in ("shape", "inputs", "positions", "norm", "norm_first")},
        **dict(bias=True, attention_bias=("qkvo", "o"), gated=False, qk_norm=False, window=0, attention_scale=0.0),
        **dict(n_kv_heads=config.n_heads, n_segments=0, embedding_norm=False, head=("none", "classes")),
        **dict(pool="first", pool_normed=False, pooler=False if classes else (True, False)),
    )
    return dict(
        model_type="vit",
        architectures=["ViTForImageClassification" if classes else "ViTModel"],
        **write_fields(config, CONFIG),
        **(dict(head_dim=config.d_head) if config.d_head * config.n_heads != config.d_model else {}),
        image_size=config.image_size,
        patch_size=config.patch_size,
        qkv_bias=config.attention_bias == "qkvo",
        hidden_act=write_activation(config),
        **write_labels(config),
    )


NAMES: list[NameRow] = [
    ("embeddings.cls_token", "tokens.class_token", "rows"),
    ("embeddings.position_embeddings", "positions.weight", "row"),
    *both("embeddings.patch_embeddings.projection", "tokens.projection"),
    *both("encoder.layer.{i}.layernorm_before", "blocks.{i}.attention_norm"),
    *both("encoder.layer.{i}.attention.attention.query", "blocks.{i}.attention.q_proj"),
    *both("encoder.layer.{i}.attention.attention.key", "blocks.{i}.attention.k_proj"),
    *both("encoder.layer.{i}.attention.attention.value", "blocks.{i}.attention.v_proj"),
    *both("encoder.layer.{i}.attention.output.dense", "blocks.{i}.attention.o_proj"),
    *both("encoder.layer.{i}.layernorm_after", "blocks.{i}.feedforward_norm"),
    *both("encoder.layer.{i}.intermediate.dense", "blocks.{i}.feedforward.up"),
    *both("encoder.layer.{i}.output.dense", "blocks.{i}.feedforward.down"),
    *both("layernorm", "norm"),
    *both("pooler.dense", "pool.dense"),
    *both("classifier", "head"),
    # The names that transformers 5 uses in memory, and in files with save_original_format=False.
    *both("layers.{i}.layernorm_before", "blocks.{i}.attention_norm"),
    *both("layers.{i}.attention.q_proj", "blocks.{i}.attention.q_proj"),
    *both("layers.{i}.attention.k_proj", "blocks.{i}.attention.k_proj"),
    *both("layers.{i}.attention.v_proj", "blocks.{i}.attention.v_proj"),
    *both("layers.{i}.attention.o_proj", "blocks.{i}.attention.o_proj"),
    *both("layers.{i}.layernorm_after", "blocks.{i}.feedforward_norm"),
    *both("layers.{i}.mlp.fc1", "blocks.{i}.feedforward.up"),
    *both("layers.{i}.mlp.fc2", "blocks.{i}.feedforward.down"),
]
