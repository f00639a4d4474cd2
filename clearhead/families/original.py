"""The original Transformer (Vaswani et al. 2017): sinusoidal positions, norm after each step, relu, one shared embedding.

The paper's table 3 says 65 M and 213 M parameters. Its shared English-German vocabulary of about 37,000 gives 63.1 M and 214.2 M
with every weight, bias and norm counted; 65.0 M takes 40,745 tokens at base size, 213.0 M takes 35,784 at big.

It has no Hugging Face layout of its own; it is saved in Marian's, which families/marian.py reads. Marian has all sines before all
cosines where the paper alternates them, so the coordinates of the residual stream are saved in Marian's order, in every tensor
that reads the stream or writes to it. All numbers stay the same; only the order of summation changes. A model that Marian can
not compute is refused, and one that would need tensors it does not have: biases, or a second copy of an embedding for its head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from clearhead.config import Config
from clearhead.families import marian
from clearhead.families.config_translation import NameRow

BASE: dict[str, Any] = dict(
    shape="encoder-decoder",
    positions="sinusoidal",
    norm="layer",
    norm_first=False,
    feedforward="relu",
    embedding_scale=True,
    tie_embeddings=True,
    vocab_size=37_000,
    max_len=1024,
    init="xavier",
)

SIZES: dict[str, dict[str, Any]] = {
    "transformer-base": dict(n_layers=6, d_model=512, n_heads=8, d_ff=2048, dropout=0.1),
    "transformer-big": dict(n_layers=6, d_model=1024, n_heads=16, d_ff=4096, dropout=0.3),
}

HF: tuple[str, ...] = ()
PREFIX = marian.PREFIX
HEADS = marian.HEADS
UNUSED: tuple[str, ...] = ()
EXTRAS: tuple[str, ...] = ()

READS_STREAM = (
    "tokens.weight",
    "source.weight",
    *(f"{part}_proj.weight" for part in "qkv"),
    "up.weight",
    "head.weight",
)
WRITES_STREAM = ("o_proj.weight", "o_proj.bias", "down.weight", "down.bias", "norm.weight", "norm.bias")


def write(config: Config) -> dict[str, Any]:
    return marian.write(replace(config, sinusoid_halves=True))


def names(config: Config) -> list[NameRow]:
    """Marian's table. If the model alternates sines and cosines, each tensor's stream axis gets the layout of halves."""
    rows = marian.names(config)
    return rows if config.sinusoid_halves else [_in_halves(row) for row in rows]


def _in_halves(row: NameRow) -> NameRow:
    theirs, ours = row[:2]
    assert isinstance(ours, str)
    if ours.endswith(READS_STREAM):
        return theirs, ours, "halves_in"
    return (theirs, ours, "halves_out") if ours.endswith(WRITES_STREAM) else row


NAMES = names
