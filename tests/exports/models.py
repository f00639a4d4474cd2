"""Tiny models to export, with weights that hide nothing, and a tokenizer that fits them."""

from __future__ import annotations

import functools
from typing import Any

import torch

import clearhead as ch
from clearhead.data import Tokenizer
from clearhead.models import Model
from tests.models.tiny import tiny

TEXT = "the cat sat on the mat and one two three dogs ran\nfour five six 1998\n" * 9
# Widths that Q8_0 and Q4_0 hold: whole blocks of 32.
FIELDS: dict[str, Any] = dict(d_model=64, d_head=16, n_heads=4, d_ff=96, vocab_size=304, max_len=64)
OWN: dict[str, dict[str, Any]] = {
    "llama": dict(n_kv_heads=2),
    "qwen2": dict(n_kv_heads=2),
    "llama-3.1": dict(n_kv_heads=2),
    "vit": dict(vocab_size=0, max_len=0),
}


@functools.cache
def tokenizer() -> Tokenizer:
    return ch.train_tokenizer(texts=[TEXT], kind="bpe", vocab_size=300)


def sound(name: str, **fields: Any) -> Model:
    model = tiny(name, dtype=torch.float32, **FIELDS | OWN.get(name, {}) | fields)
    words = tokenizer()
    model.generation = ch.Generation(bos=words.bos, eos=(words.eos or 0,), decoder_start=words.bos, pad=words.pad)
    return model
