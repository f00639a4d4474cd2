"""`Explorer`: a model that can be asked what the page asks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from clearhead.config import Config
from clearhead.data import Tokenizer
from clearhead.errors import InputError, did_you_mean
from clearhead.explorer import attention, figures, readings, tables, writing
from clearhead.explorer.asking import Params
from clearhead.explorer.inputs import SAMPLES, Inputs, examples, shape_name
from clearhead.explorer.runs import Runs
from clearhead.inside.pages import pack
from clearhead.inside.sweeps import n_heads_of
from clearhead.layers.embedding import TokenEmbedding
from clearhead.models import Decoder, EncoderDecoder, Model
from clearhead.version import __version__

Work = Generator[None, None, bytes]  # what takes long, in pieces: the answer is what it returns
Answer = Callable[[Runs, Params], bytes | Work]

ANSWERS: dict[str, Answer] = {
    "read": readings.read,
    "grid": attention.grid,
    "map": attention.head_map,
    "row": attention.row,
    "flow": attention.flow,
    "lens": readings.lens,
    "cell": readings.cell,
    "sweep": readings.sweep,
    "positions": tables.positions,
    "geometry": tables.geometry,
    "neighbours": tables.neighbours,
    "pca": tables.pca,
    "cost": figures.forecast,
    "measure": figures.measure,
    "step": writing.step,
    "beam": writing.beam,
}


class Explorer:
    """One model, and what the page may ask of it. One question at a time: who calls it from several threads takes turns."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None, *, name: str, place: Path | None = None) -> None:
        self.model, self.name = model, name
        self.inputs = Inputs(model, tokenizer, place)
        self.runs = Runs(self.inputs)
        self.example = examples(model, tokenizer, place)

    def answer(self, name: str, params: object) -> bytes:
        """The packed answer to a request; whatever is wrong with it is an error that says so."""
        work = self.work(name, params)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value

    def work(self, name: str, params: object) -> Work:
        """The same in pieces, so that others may use the model in between."""
        if name == "models":
            return describe([self])
        if name not in ANSWERS:
            raise InputError(f"the page's requests have no {name!r:.40}; {did_you_mean(name[:40], ANSWERS)}")
        with torch.no_grad():
            found = ANSWERS[name](self.runs, Params(params))
        while not isinstance(found, bytes):
            with torch.no_grad():  # of each piece: between them the thread is others'
                try:
                    next(found)
                except StopIteration as end:
                    return end.value
            yield
        return found

    def take(self, kind: str, data: bytes) -> bytes:
        """Keep an uploaded picture or sound; the answer says how a run names it."""
        return pack({"text": self.inputs.take_picture(data) if kind == "picture" else self.inputs.take_sound(data)})

    def described(self) -> dict[str, Any]:
        model, config = self.model, self.model.config
        has_head, has_words = config.head != "none", isinstance(model.tokens, TokenEmbedding)
        writes = isinstance(model, Decoder | EncoderDecoder) and config.inputs == "tokens"
        return {
            "name": self.name,
            "shape": shape_name(config),
            "inputs": config.inputs,
            "head": None if config.head == "none" else config.head,
            "n_params": sum(p.numel() for p in model.parameters()),
            "max_len": config.max_len,
            "limit": self.inputs.limit,
            "attentions": [
                {"name": name, "sites": sites, "n_heads": [n_heads_of(self.runs.attentions[site]) for site in sites]}
                for name, sites in self.runs.groups().items()
            ],
            "can": {
                "lens": has_head,
                "flow": True,
                "sweep": has_head,
                "intervene": True,
                "generate": writes,
                "beam": writes,
                "translate": isinstance(model, EncoderDecoder),
                "geometry": has_words,
                "positions": True,
                "cost": True,
            },
            "samples": {"tokens": 0, "patches": SAMPLES, "frames": SAMPLES}[config.inputs],
            "example": self.example,
            "example_target": None,
            "config": whatif(config),
        }


def whatif(config: Config) -> dict[str, Any]:
    """The config's sizes and kinds."""
    told: dict[str, Any] = {each.name: getattr(config, each.name) for each in fields(config)}
    return {name: value for name, value in told.items() if name not in ("labels", "pruned_heads")}


def describe(explorers: list[Explorer]) -> bytes:
    """The answer to `models`."""
    return pack({"models": [each.described() for each in explorers], "version": __version__})


def model_of(params: Mapping[str, Any]) -> str:
    """The model that a request names, by itself or in its run."""
    run = params.get("run")
    named: Any = params.get("model") if not isinstance(run, dict) else run.get("model")
    if not isinstance(named, str):
        raise InputError(f"a request names its model; got {named!r:.60}; see `models`")
    return named
