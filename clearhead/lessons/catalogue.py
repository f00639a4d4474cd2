"""All exercises in order: name, chapter, and what each teaches. Without torch, so that the list is there at once."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clearhead.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from clearhead.lessons.exercise import Exercise


@dataclass(frozen=True)
class Entry:
    name: str
    chapter: str
    teaches: str
    seconds: float = 30.0  # how long a student's function may take for all cases and laws


CATALOGUE = (
    Entry("bpe", "tokens and embeddings", "how a tokenizer's pieces are learnt: the most frequent pair is joined"),
    Entry("tied_embeddings", "tokens and embeddings", "one table for the first and the last layer, and its scale"),
    Entry("sinusoidal", "positions", "the paper's positions, with the right frequencies"),
    Entry("rotary", "positions", "positions as rotations: scores see distances alone"),
    Entry("softmax", "attention", "weights that sum to 1, for scores of any size"),
    Entry("attention", "attention", "the equation of the paper: scale, mask, softmax, mean of values"),
    Entry("multi_head", "many heads", "splitting into heads and merging them"),
    Entry("grouped_query", "many heads", "queries that share keys, for a smaller cache"),
    Entry("mask", "masks", "causal and padding masks, combined"),
    Entry("layer_norm", "residuals and norms", "mean 0, variance 1, and where eps stands"),
    Entry("rms_norm", "residuals and norms", "the norm of LLaMA: no mean"),
    Entry("feed_forward", "residuals and norms", "the gated feed-forward layer of LLaMA"),
    Entry("block", "residuals and norms", "the residual stream, pre-norm and post-norm"),
    Entry("decoder", "three shapes", "a whole decoder that learns, from parts of yours", seconds=120.0),
    Entry("cross_entropy", "training", "the loss of a language model on padded rows"),
    Entry("adamw", "training", "the optimizer: moments, their correction, decoupled decay"),
    Entry("warmup", "training", "the paper's learning rate"),
    Entry("kv_cache", "generation and the cache", "token by token gives what the whole text gives"),
    Entry("top_p", "generation and the cache", "nucleus sampling"),
    Entry("beam_search", "generation and the cache", "the likeliest texts, not the likeliest next token"),
    Entry("multiply_adds", "cost and complexity", "what a forward pass costs, product by product"),
    Entry("lstm_step", "long range", "the network before the Transformer, and all that it remembers"),
    Entry("angles", "geometry", "how far a table of embeddings is from orthogonal"),
    Entry("verdict", "from the paper to today", "telling an improvement from chance"),
    Entry("induction_head", "many heads", "finding the head that completes repetitions"),
    Entry("patching", "many heads", "which state of a run makes the difference"),
)


def find_entry(name: str) -> Entry:
    """The entry of this name; InputError suggests the nearest."""
    entry = next((entry for entry in CATALOGUE if entry.name == name), None)
    if entry is None:
        raise InputError(f"there is no exercise {name!r}; {did_you_mean(name, [entry.name for entry in CATALOGUE])}")
    return entry


def next_entry(name: str) -> Entry | None:
    """The one after it."""
    names = [entry.name for entry in CATALOGUE]
    after = names.index(name) + 1
    return CATALOGUE[after] if after < len(CATALOGUE) else None


def load_exercise(name: str) -> Exercise:
    return importlib.import_module(f"clearhead.lessons.exercises.{find_entry(name).name}").EXERCISE
