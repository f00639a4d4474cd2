"""Samples: pictures, sounds and texts that the page can start with, made without a download."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from clearhead.data import Tokenizer
from clearhead.data.audio import RATE
from clearhead.models import Encoder, EncoderDecoder, Model
from clearhead.training.report import read_metrics

SAMPLES = 10  # of a kind


def draw_shape(number: int, size: int, n_channels: int) -> UInt8[np.ndarray, "c h w"]:
    """A disc, a square, a triangle, stripes or a chequerboard, in two colourings: samples that need no download."""
    y, x = np.mgrid[0:size, 0:size] / max(size - 1, 1) * 2 - 1
    shapes = [
        x**2 + y**2 < 0.4,
        np.maximum(abs(x), abs(y)) < 0.55,
        (y > -0.6) & (y < 0.6) & (abs(x) < (y + 0.6) / 1.6),
        np.sin(3 * math.pi * x) > 0,
        (np.sin(2 * math.pi * x) > 0) ^ (np.sin(2 * math.pi * y) > 0),
    ]
    is_front = shapes[number % len(shapes)]
    front, back = ((222, 120, 31), (24, 44, 88)) if number < len(shapes) else ((40, 150, 110), (244, 240, 230))
    colours = np.where(is_front[None], np.array(front)[:, None, None], np.array(back)[:, None, None])
    if n_channels == 3:
        return colours.astype(np.uint8)
    return np.repeat(colours.mean(0, keepdims=True), n_channels, 0).astype(np.uint8)


def sample_sound(number: int, seconds: float = 6.0) -> Float[Tensor, " n"]:
    """Rising and falling notes with overtones, half a second each; each number starts at another pitch."""
    n, each = int(seconds * RATE), RATE // 2
    at = torch.arange(n)
    scale = torch.tensor([0, 2, 4, 5, 7, 9, 11, 12, 11, 9, 7, 4])
    pitch = 180 * 2 ** ((scale[at // each % len(scale)] + number % SAMPLES) / 12)
    turns = torch.cumsum(2 * math.pi * pitch.double() / RATE, 0)
    waves = sum(torch.sin(turns * k) / k for k in range(1, 9))
    return (0.3 * waves * torch.sin(math.pi * (at % each) / each)).float()


SENTENCES: tuple[str, ...] = (
    "The cat sat on the mat because it was tired.",
    "le 3 mars 1987",
    "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ",
)


def example_text(model: Model, tokenizer: Tokenizer | None, path: Path | None = None) -> str:
    """The text that the page starts with: a sample of the model's training run, else one that its vocabulary can spell."""
    if model.config.inputs != "tokens":
        return "sample:0"
    if tokenizer is None:
        return SENTENCES[0]
    return _run_sample(path, tokenizer) or _spellable(model, tokenizer)


def _run_sample(path: Path | None, tokenizer: Tokenizer) -> str | None:
    """A held-out example from the journal of the training run, without the tokens that a tokenizer adds."""
    journal = None if path is None else (path if path.is_dir() else path.parent) / "metrics.jsonl"
    if journal is None or not journal.is_file():
        return None
    records, _ = read_metrics(journal.read_text(encoding="utf-8", errors="replace"))
    samples = [record["samples"] for record in [*records["valid"], *records["result"]] if record.get("samples")]
    texts = [str(sample.get("input", "")) for sample in samples[-1]] if samples else []
    added = [tokenizer.token(id) for id in tokenizer.special_ids if id != tokenizer.mask]
    for text in texts:
        for token in added:
            text = text.replace(token, "")
        if text.strip():
            return text.strip()
    return None


def _spellable(model: Model, tokenizer: Tokenizer) -> str:
    mask = None if tokenizer.mask is None else tokenizer.token(tokenizer.mask)
    sentences = list(SENTENCES)
    if isinstance(model, EncoderDecoder):
        if model.config.vocab_size < 1000:  # a small vocabulary is one of letters
            sentences.insert(0, "le 3 mars 1987")
    elif isinstance(model, Encoder):
        if model.config.vocab_size < 64:  # of amino acids
            sentences.insert(0, f"MKTAYIAKQRQISFVKSHFSRQ{mask or 'L'}EERLGLIEVQ")
        elif mask and model.config.head == "tokens":
            sentences.insert(0, f"The capital of France is {mask}.")
    else:
        sentences.insert(0, "The cat sat on the mat. The dog lay on the rug. The cat")

    def is_known(text: str) -> bool:
        ids = tokenizer.encode(text, special=False)
        return bool(ids) and (tokenizer.unk is None or tokenizer.unk not in ids)

    ids = (id for id in sorted(tokenizer.vocab.values()) if id not in tokenizer.special_ids)
    words = (word for id in ids if is_known(word := tokenizer.decode([id]).strip()))
    return next(filter(is_known, sentences), None) or " ".join(islice(words, 8))
