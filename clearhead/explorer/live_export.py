"""Export of a page that computes by itself: model and tokenizer in one HTML file, run by page/live/*.js without a server.

The forward pass there is written anew in JavaScript. So the file also carries what Python computed on some texts, and the page
computes that first: where a browser finds other numbers, it says so and shows nothing.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.config import Config, Generation
from clearhead.data import Tokenizer
from clearhead.errors import InputError
from clearhead.explorer.explorer import Explorer
from clearhead.explorer.forward_passes import ForwardPasses, Run
from clearhead.explorer.live_tokenizer import TEXTS, live_tokenizer
from clearhead.explorer.page_export import AnswerSet, opening_requests
from clearhead.explorer.standalone_page import MAX_BYTES, write_page
from clearhead.explorer.wire_format import key_of, pack
from clearhead.layers.positions import DistanceBias, Rotary
from clearhead.models import Encoder, EncoderDecoder, Model, build
from clearhead.quantization.model_weights import example_weight
from clearhead.version import __version__

PLAIN_BYTES = 5_000_000  # of weights that are kept in 32 bits
MOST_BYTES = 5_000_000  # of weights in 8 bits; base64 makes 7 MB of them
MAX_TOKENS = 512  # of a text: the page computes on the reader's machine, in one thread

# Fields of a config that page/live/forward.js does not compute, and the values at which they do nothing.
REFUSED: dict[str, Any] = {
    "inputs": "tokens",
    "pruned_heads": (),
    "dropped_token": -1,
    "sparsity": "",
}
REFUSED_RULES: dict[str, Any] = {"forced_bos": None, "forced_start": (), "forced_eos": None, "begin_suppress": ()}

# Panels and parts of them that page/live/answers.js does not answer, by their names in `Explorer.description`.
SERVER_ONLY = {
    "beam": "beam search",
    "attribution": "attribution of a logit",
    "patches": "patching between texts",
    "neurons": "neurons",
    "steer": "steering",
}


def export_live_page(
    model: Model,
    tokenizer: Tokenizer | None,
    text: str = "",
    target: str | None = None,
    *,
    name: str,
    path: Path | None = None,
) -> str:
    """The page as one file that computes any text by itself; refused if page/live/ can not, or the model is too large."""
    check_live(model.config, model.generation)
    if tokenizer is None:
        raise InputError("a live page needs the model's tokenizer; got none; put tokenizer.json beside the model")
    words = live_tokenizer(tokenizer)
    held = Weights(model)
    explorer = Explorer(held.model, tokenizer, name=name, path=path)
    told = explorer.description()
    text = text or told["example"]
    given = {"model": name, "text": text, "target": target}
    live: dict[str, Any] = {
        "name": name,
        "config": {key: value for key, value in asdict(model.config).items() if key not in REFUSED},
        "generation": asdict(model.generation),
        "tokenizer": words,
        "limit": min(told["limit"], MAX_TOKENS),
        "target_limit": min(explorer.inputs.target_limit, MAX_TOKENS),
        "precision": held.precision,
        "texts": [(each, tokenizer.encode(each)) for each in (*TEXTS, text)],
        "check": _check(explorer.passes, text),
        "tensors": held.index,
        "weights": base64.b64encode(held.blob).decode(),
    }
    collected = AnswerSet(explorer, MAX_BYTES)
    for asked in opening_requests(told, {"model": name}):
        collected.add(*asked)
    left_out = {key: words for key, words in SERVER_ONLY.items() if told["can"].get(key)}
    shown = {**told, "can": {**told["can"], **dict.fromkeys(left_out, False)}}
    answers = {key_of("models", {}): pack({"models": [shown], "version": __version__}), **collected.answers}
    start = {"state": {key: value for key, value in given.items() if value}, "live": _words(held, left_out.values())}
    page = write_page(answers, start, live)
    if len(page) > MAX_BYTES:
        raise InputError(
            f"the page would have {len(page) / 1e6:.1f} MB, more than {MAX_BYTES / 1e6:g} MB, most of it not weights "
            f"({len(held.blob) / 1e6:.1f} MB); take a tokenizer of fewer tokens, or leave out --live"
        )
    return page


def check_live(config: Config, rules: Generation) -> None:
    """Refuse a model that page/live/forward.js does not compute, naming the fields."""
    found = [
        f"{name}={getattr(config, name)!r:.60}" for name, usual in REFUSED.items() if getattr(config, name) != usual
    ]
    found += [f"generation.{name}" for name, usual in REFUSED_RULES.items() if getattr(rules, name) != usual]
    if found:
        raise InputError(
            f"a live page does not compute {', '.join(found)}; leave out --live for a page with the answers for one text, "
            "or share a server (clearhead serve)"
        )


class Weights:
    """A model's tensors as one run of bytes: in 32 bits if that is little, else 8 bits and a scale for each row of a matrix.

    `model` computes with what the bytes hold.
    """

    def __init__(self, model: Model) -> None:
        state = {name: tensor.detach().cpu().float() for name, tensor in model.state_dict().items()}
        missing = build(model.config, device="meta").state_dict().keys() - state.keys()
        if missing:
            raise InputError(
                f"a live page rounds weights itself, and these are packed: {', '.join(sorted(missing)[:3])}; "
                "load the model without quantization"
            )
        self.n = sum(tensor.numel() for tensor in state.values())
        self.precision = "float32" if 4 * self.n <= PLAIN_BYTES else "int8"
        if self.precision == "int8" and self.n > MOST_BYTES:
            raise InputError(
                f"a live page holds up to {MOST_BYTES / 1e6:g} MB of weights; {self.n:,} of them take {self.n / 1e6:.1f} MB "
                "even in 8 bits; leave out --live for a page with the answers for one text, or share a server (clearhead serve)"
            )
        self.index: list[dict[str, Any]] = []
        self.blob = bytearray()
        for name, tensor in {**state, **_tables(model)}.items():
            state[name] = self._add(
                name, tensor, rounds=self.precision == "int8" and tensor.ndim == 2 and name in state
            )
        self.model = model
        if self.precision == "int8" or any(weight.dtype != torch.float32 for weight in model.parameters()):
            self.model = copy.deepcopy(model).float().cpu()
            self.model.load_state_dict({name: state[name] for name in model.state_dict()})

    def _add(self, name: str, tensor: Tensor, *, rounds: bool) -> Tensor:
        """Append a tensor; returns what the bytes hold."""
        entry = {"name": name, "shape": list(tensor.shape), "at": len(self.blob), "dtype": "i1" if rounds else "f4"}
        self.index.append(entry)
        if rounds:
            scale = (tensor.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
            whole = (tensor / scale).round()
            self.blob += scale.numpy().tobytes() + whole.to(torch.int8).numpy().tobytes()
            tensor = whole * scale
        else:
            self.blob += np.ascontiguousarray(tensor.numpy()).tobytes()
        self.blob += bytes(-len(self.blob) % 4)
        return tensor


def _tables(model: Model) -> dict[str, Tensor]:
    """What positions compute from the config, so that the page need not: rotary frequencies, the bias at each distance."""
    stacks = (
        {"encoder.": model.encoder, "decoder.": model.decoder} if isinstance(model, EncoderDecoder) else {"": model}
    )
    tables: dict[str, Tensor] = {}
    for prefix, stack in stacks.items():
        positions = stack.positions
        if isinstance(positions, Rotary):
            tables["frequencies"] = positions.frequencies(torch.device("cpu"))
        elif isinstance(positions, DistanceBias):
            distances = torch.arange(1 - MAX_TOKENS, MAX_TOKENS, device=example_weight(model).device)
            tables[f"{prefix}bias"] = positions.dense(distances[None, None])[0, :, 0].detach().cpu().float()
    return tables


@torch.no_grad()
def _check(passes: ForwardPasses, text: str) -> dict[str, Any]:
    """A text, its tokens, what the model writes, and its last logits (states, if it has no head)."""
    forward = passes.run(Run(text))
    if passes.has_classes:
        assert isinstance(passes.model, Encoder)
        assert passes.model.head is not None
        last = passes.model.head(passes.model.pooled(forward.states))[0]
    elif passes.model.config.head == "none":
        last = forward.states[0, -1]
    else:
        last = passes.model.project(forward.states[:, -1:])[0, 0]
    return {"text": text, "target": list(forward.target_ids), "logits": [round(x, 6) for x in last.float().tolist()]}


def _words(held: Weights, left_out: Iterable[str]) -> str:
    how = "as they are, in 32 bits" if held.precision == "float32" else "rounded to 8 bits with a scale for each row"
    return (
        f"This page computes by itself, in your browser: it holds the model's {held.n:,} weights ({how}, "
        f"{len(held.blob) / 1e6:.1f} MB). Not in it: {', '.join([*left_out, 'measurements'])}; run clearhead explore for these."
    )
