"""All experiments in the order of the chapters. Without torch, so that the list is there at once."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from clearhead.errors import InputError, did_you_mean


@dataclass(frozen=True)
class Entry:
    name: str
    chapter: str  # as in lessons/catalogue.py
    question: str
    reads_text: bool = False  # takes a file of the user's

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")


CATALOGUE = (
    Entry("embeddings", "tokens and embeddings", "do related words come to lie close together?", reads_text=True),
    Entry("positions", "positions", "what can a model do without positions, and which kinds work on longer texts?"),
    Entry("scale", "attention", "what happens without the division by sqrt(d)?"),
    Entry("heads", "many heads", "is one head worse than eight, and what do heads specialise in?"),
    Entry("masks", "masks", "what leaks without a causal mask?"),
    Entry("residuals", "residuals and norms", "do 2, 8 and 32 layers train without residuals, or without norms?"),
    Entry("shapes", "three shapes", "encoder, decoder, encoder-decoder: the same task by each"),
    Entry("optimizers", "training", "when is warm-up needed, and is Adam better than SGD?"),
    Entry("cache", "generation and the cache", "how much time does the KV cache save?"),
    Entry("cost", "cost and complexity", "is attention or an LSTM faster, at which length?"),
    Entry("long-range", "long range", "how far back can an LSTM and a Transformer of equal size reach?"),
    Entry("geometry", "geometry", "are many directions almost orthogonal, and are a trained model's embeddings?"),
    Entry("modern", "from the paper to today", "which change since 2017 helps, each one alone?"),
)


def find_entry(name: str) -> Entry:
    """The entry of this name; InputError suggests the nearest."""
    entry = next((entry for entry in CATALOGUE if entry.name == name), None)
    if entry is None:
        raise InputError(f"there is no experiment {name!r}; {did_you_mean(name, [entry.name for entry in CATALOGUE])}")
    return entry


def load_experiment(entry: Entry) -> ModuleType:
    """The module: SIZES, `measure(size, seeds)` and `conclude(measured)`."""
    return importlib.import_module(f"clearhead.experiments.{entry.module}")
