"""Metrics of a model as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PERCENT = ("accuracy", "exact", "utilisation")
METRIC_NAMES = {"bits_per_byte": "bits/byte", "bleu": "BLEU", "chrf": "chrF", "exact": "exact match"}
HIDDEN = ("step", "kind", "samples")


def spell_metrics(row: Mapping[str, Any]) -> str:
    """The numbers of a logged row, such as "loss 0.1234, accuracy 98.76%"."""
    parts: list[str] = []
    for name, value in row.items():
        if name in HIDDEN or not isinstance(value, int | float):
            continue
        if name in PERCENT:
            number = f"{value:.2%}"
        else:
            number = f"{value:.2f}" if name in ("bleu", "chrf") else f"{value:.4f}"
        parts.append(f"{METRIC_NAMES.get(name, name)} {number}")
    return ", ".join(parts)
