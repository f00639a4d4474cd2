"""`Explorer`: answers the page's requests about one model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import torch

from clearhead.config import Config
from clearhead.costs import draw
from clearhead.costs.diagram import draw_model
from clearhead.data import Tokenizer
from clearhead.errors import InputError, did_you_mean
from clearhead.explorer import (
    attribution_panel,
    cost_panel,
    flow_panel,
    follow_panel,
    generation_panel,
    geometry_panel,
    heads_panel,
    interventions_panel,
    lens_panel,
    neurons_panel,
    output_panel,
    positions_panel,
)
from clearhead.explorer.fields import Fields
from clearhead.explorer.forward_passes import ForwardPasses
from clearhead.explorer.model_inputs import Inputs
from clearhead.explorer.samples import SAMPLES, example_text
from clearhead.explorer.wire_format import pack
from clearhead.inside.ablation_sweep import n_heads_of
from clearhead.inside.attribution import is_linear
from clearhead.layers.embedding import TokenEmbedding
from clearhead.models import Decoder, EncoderDecoder, Model
from clearhead.quantization.model_weights import count_weights
from clearhead.version import __version__

NAMES = (" Mary", " John")  # the lesson on patching needs each as one token

Work = Generator[None, None, bytes]  # a long computation in steps; it returns the answer
Answer = Callable[[ForwardPasses, Fields], bytes | Work]


def diagram(passes: ForwardPasses, fields: Fields) -> bytes:
    """The drawing of the model, and its parts."""
    drawing = draw(passes.model)
    shown = [
        {"stack": part.stack, "name": part.name, "words": part.words, "params": part.params, "flops": part.flops}
        for part in drawing.parts
    ]
    drawn = {"svg": draw_model(drawing, style=False), "file": drawing.svg}
    return pack({**drawn, "parts": shown, "total": sum(part.params for part in drawing.parts)})


ANSWERS: dict[str, Answer] = {
    "diagram": diagram,
    "read": output_panel.read,
    "grid": heads_panel.grid,
    "map": heads_panel.head_map,
    "row": heads_panel.row,
    "flow": flow_panel.flow,
    "follow": follow_panel.follow,
    "lens": lens_panel.lens,
    "cell": lens_panel.cell,
    "sweep": interventions_panel.sweep,
    "neurons": neurons_panel.neurons,
    "attribution": attribution_panel.attribution,
    "patches": attribution_panel.patches,
    "positions": positions_panel.positions,
    "geometry": geometry_panel.geometry,
    "neighbours": geometry_panel.neighbours,
    "pca": geometry_panel.pca,
    "cost": cost_panel.forecast,
    "measure": cost_panel.measure,
    "step": generation_panel.step,
    "beam": generation_panel.beam,
}


class Explorer:
    """One model, and the answers to the page's requests. Not thread-safe: callers take turns."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None, *, name: str, path: Path | None = None) -> None:
        self.model, self.name = model, name
        self.inputs = Inputs(model, tokenizer, path)
        self.passes = ForwardPasses(self.inputs)
        self.example = example_text(model, tokenizer, path)

    def apart(self) -> Explorer:
        """The same weights in modules of their own, for another thread: no probe of this explorer sees the other's passes."""
        held = [*self.model.parameters(), *self.model.buffers()]
        model = copy.deepcopy(self.model, {id(each): each for each in held})
        return Explorer(model, self.inputs.maybe_tokenizer, name=self.name, path=self.inputs.path)

    def answer(self, name: str, params: object) -> bytes:
        """The packed answer to a request; a wrong request raises an InputError."""
        work = self.work(name, params)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value

    def work(self, name: str, params: object) -> Work:
        """The same in steps, so that others can use the model between two of them."""
        if name == "models":
            return describe([self])
        if name not in ANSWERS:
            raise InputError(f"the page's requests have no {name!r:.40}; {did_you_mean(name[:40], ANSWERS)}")
        with torch.no_grad():
            found = ANSWERS[name](self.passes, Fields(params))
        while not isinstance(found, bytes):
            with torch.no_grad():  # entered for each step: between steps the thread does other work
                try:
                    next(found)
                except StopIteration as end:
                    return end.value
            yield
        return found

    def take(self, kind: str, data: bytes) -> bytes:
        """Store an uploaded picture or sound; the answer holds its name in a run."""
        return pack({"text": self.inputs.take_picture(data) if kind == "picture" else self.inputs.take_sound(data)})

    def _is_token(self, *words: str) -> bool:
        """Whether the vocabulary has each of these words as one token."""
        tokenizer = self.inputs.maybe_tokenizer
        return tokenizer is not None and all(
            len(ids := tokenizer.encode(word, special=False)) == 1 and ids[0] != tokenizer.unk for word in words
        )

    def description(self) -> dict[str, Any]:
        """What the page needs to know of the model: sizes, attentions, and which panels it has."""
        model, config = self.model, self.model.config
        has_head, has_words = config.head != "none", isinstance(model.tokens, TokenEmbedding)
        generates = isinstance(model, Decoder | EncoderDecoder) and config.inputs == "tokens"
        return {
            "name": self.name,
            "shape": config.shape.replace("-", "_"),
            "inputs": config.inputs,
            "head": None if config.head == "none" else config.head,
            "n_params": count_weights(model),
            "max_len": config.max_len,
            "limit": self.inputs.limit,
            "attentions": [
                {"name": name, "sites": sites, "n_heads": [n_heads_of(self.passes.attentions[site]) for site in sites]}
                for name, sites in self.passes.groups().items()
            ],
            "can": {
                "lens": has_head,
                "flow": True,
                "sweep": has_head,
                "attribution": has_head and is_linear(config),
                "patches": isinstance(model, Decoder),
                "names": has_words and self._is_token(*NAMES),
                "intervene": True,
                "neurons": True,
                "steer": config.inputs == "tokens",
                "generate": generates,
                "beam": generates,
                "translate": isinstance(model, EncoderDecoder),
                "geometry": has_words,
                "positions": True,
                "cost": True,
            },
            "samples": {"tokens": 0, "patches": SAMPLES, "frames": SAMPLES}[config.inputs],
            "example": self.example,
            "example_target": None,
            "config": _sizes(config),
        }


def _sizes(config: Config) -> dict[str, Any]:
    """The config's fields, without those whose length grows with the model."""
    given: dict[str, Any] = {each.name: getattr(config, each.name) for each in fields_of(config)}
    return {name: value for name, value in given.items() if name not in ("labels", "pruned_heads")}


def describe(explorers: list[Explorer]) -> bytes:
    """The answer to `models`."""
    return pack({"models": [each.description() for each in explorers], "version": __version__})


def model_of(params: Mapping[str, Any]) -> str:
    """The name of the model that a request is about."""
    run = params.get("run")
    named: Any = params.get("model") if not isinstance(run, dict) else run.get("model")
    if not isinstance(named, str):
        raise InputError(f"a request names its model; got {named!r:.60}; see `models`")
    return named
