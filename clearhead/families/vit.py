"""Vision Transformers (Dosovitskiy et al. 2020) and DeiT (class token only): an encoder over patches, norm before each step."""

from __future__ import annotations

from typing import Any

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

HF: tuple[str, ...] = ()
PREFIX = ""
HEADS: tuple[str, ...] = ()
UNUSED: tuple[str, ...] = ()
EXTRAS: tuple[str, ...] = ()
