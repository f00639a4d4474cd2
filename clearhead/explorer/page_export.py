"""Export: one HTML file with the page and its answers for one text, at most 10 MB."""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from clearhead.data import Tokenizer
from clearhead.errors import ClearheadError
from clearhead.explorer.explorer import Explorer, Work
from clearhead.explorer.fields import Fields
from clearhead.explorer.standalone_page import MAX_BYTES, write_page
from clearhead.explorer.wire_format import key_of, pack, unpack
from clearhead.models import Model

LENS_COLUMNS = 256  # positions of a lens in one request of the page
MAX_CELLS = 1500  # of a lens whose cells are exported; each is one answer
MAX_SWEPT = 64  # tokens of a text for which the sweeps are exported
MAX_NEIGHBOURS = 24  # tokens whose neighbours are exported

PageRequest = tuple[str, dict[str, Any]]


def export_page(
    model: Model,
    tokenizer: Tokenizer | None,
    text: str = "",
    target: str | None = None,
    *,
    name: str,
    path: Path | None = None,
    most: int = MAX_BYTES,
) -> str:
    """The page as one file that needs neither server nor network. It names the maps that did not fit."""
    explorer = Explorer(model, tokenizer, name=name, path=path)
    shown = explorer.inputs.take_file(text or explorer.example)
    run = {"model": name, "text": shown, "target": target, "second": None, "changes": []}
    steps = page_steps(explorer, run, {}, most)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def export(explorer: Explorer, params: object) -> Work:
    """The page's request to save itself: its run, and its address, which the file opens with."""
    fields = Fields(params)
    explorer.passes.parse(fields)
    given = fields.nested("state").given
    state = {key: Fields(given, "the address").text(key) for key in list(given)[:100]}
    return pack({"page": (yield from page_steps(explorer, fields.nested("run").given, state, MAX_BYTES))})


def page_steps(
    explorer: Explorer, run: dict[str, Any], view: Mapping[str, str], most: int
) -> Generator[None, None, str]:
    """The file's text; between two steps others may use the model."""
    model_info = explorer.description()
    state = {**view, **{key: value for key, value in run.items() if key in ("model", "text", "target") and value}}
    collected = AnswerSet(explorer, most - len(write_page({}, {"state": state}).encode()) - 1000)
    collected.must("models", {})
    collected.must("read", {"run": run})
    maps: list[tuple[float, PageRequest]] = []
    for attention in model_info["attentions"]:
        for layer, site in enumerate(attention["sites"]):
            asked = {"run": run, "attention": attention["name"], "layer": layer, "size": 32}
            scores, _ = unpack(collected.must("grid", asked))
            for score in scores["scores"]:
                fields = {"run": run, "site": site, "head": score["head"], "box": None, "most": 256}
                maps.append((_interest(score), ("map", fields)))
            yield
    followed = _follow_requests(collected, model_info, run, view)
    for asked in chain(_panel_requests(model_info, run), followed, _neighbour_requests(collected, run)):
        collected.add(*asked)
        yield
    # The most interesting heads first: the page opens with one of them.
    ordered = sorted(maps, key=lambda pair: -pair[0])
    left: list[PageRequest] = []
    for _, asked in ordered:
        left += [] if collected.add(*asked) else [asked]
        yield
    for asked in _lens_and_sweep_requests(collected, run):
        collected.add(*asked)
        yield
    left_out = f"{len(left)} of {len(maps)} heads' maps did not fit into {most / 1e6:g} MB" if left else ""
    return write_page(collected.answers, {"state": state, "left_out": left_out})


class AnswerSet:
    """Answers within a budget of bytes."""

    def __init__(self, explorer: Explorer, room: int) -> None:
        self.explorer, self.room = explorer, room
        self.answers: dict[str, bytes] = {}

    def must(self, name: str, params: dict[str, Any]) -> bytes:
        """Add an answer that the page can not do without; an error is the caller's."""
        answer = self.explorer.answer(name, params)
        self._keep(key_of(name, params), answer)
        return answer

    def add(self, name: str, params: dict[str, Any]) -> bool:
        """Add an answer if the model has it and it fits; whether it was added."""
        try:
            answer = self.explorer.answer(name, params)
        except ClearheadError:  # the model can not answer this; the page then says so
            return False
        key = key_of(name, params)
        if _size(key, answer) > self.room:
            return False
        self._keep(key, answer)
        return True

    def found(self, name: str, params: dict[str, Any]) -> dict[str, Any] | None:
        answer = self.answers.get(key_of(name, params))
        return None if answer is None else unpack(answer)[0]

    def _keep(self, key: str, answer: bytes) -> None:
        self.answers[key] = answer
        self.room -= _size(key, answer)


def _size(key: str, answer: bytes) -> int:
    """Bytes in the file: the key as JSON with its escapes, and the answer as base64."""
    return len(key.encode("ascii", "backslashreplace")) + 2 * key.count('"') + 4 * math.ceil(len(answer) / 3) + 8


def _interest(score: dict[str, Any]) -> float:
    """The measure by which the page chooses the head to open."""
    known = [score[kind] or 0.0 for kind in ("alignment", "induction", "previous")]
    return max(known) - 0.05 * (score["entropy"] or 0.0)


def opening_requests(model_info: dict[str, Any], model: dict[str, str]) -> Iterator[PageRequest]:
    """The requests of the panels that look at the model and at no text."""
    yield "diagram", model
    yield "positions", {**model, "length": 64}
    yield "geometry", model
    yield "pca", {**model, "n": 2000}
    longest = max(8192, model_info["max_len"])
    lengths = [2 ** (i + 4) for i in range(int(math.log2(longest)) - 3)]
    yield "cost", {**model, "changes": {}, "batch": 1, "precision": "fp32", "mode": "forward", "lengths": lengths}


def _panel_requests(model_info: dict[str, Any], run: dict[str, Any]) -> Iterator[PageRequest]:
    """The requests of each panel when it is opened."""
    yield from opening_requests(model_info, {"model": run["model"]})
    plain = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "seed": 0}
    yield "attribution", {"run": run}
    yield "step", {"run": run, "ids": [], **plain}
    yield "beam", {"run": run, "beams": 3, "length_penalty": 1, "most": 16}
    for attention in model_info["attentions"]:
        if attention["name"] != "cross":
            yield "flow", {"run": run, "attention": attention["name"]}


def _follow_requests(
    collected: AnswerSet, model_info: dict[str, Any], run: dict[str, Any], view: Mapping[str, str]
) -> Iterator[PageRequest]:
    """The head and token that *Follow a token* opens with, and those that the address names (`place` in page/follow.js)."""
    read = collected.found("read", {"run": run})
    if read is None:
        return
    named = [each for each in model_info["attentions"] if each["name"] == view.get("attention", "cross")]
    attention = (named or model_info["attentions"])[0]
    side = read["source"] if attention["name"] in ("attention", "encoder") else read["target"] or read["source"]
    last, sites = len(side["ids"]) - 1, attention["sites"]
    usual = read["answer"].get("at")
    position = min(last if usual is None else usual, last)
    yield "follow", {"run": run, "site": sites[0], "head": 0, "position": position}
    layer = sites.index(view["site"]) if view.get("site") in sites else 0
    head = min(_whole(view.get("head"), 0), attention["n_heads"][layer] - 1)
    seen = min(_whole(view.get("follow.at"), position), last)
    yield "follow", {"run": run, "site": sites[layer], "head": head, "position": seen}


def _whole(text: str | None, otherwise: int) -> int:
    return int(text) if text and re.fullmatch(r"[0-9]{1,6}", text) else otherwise


def _neighbour_requests(collected: AnswerSet, run: dict[str, Any]) -> Iterator[PageRequest]:
    """The neighbours of the token that the page starts with, and of the text's tokens."""
    flat, read = collected.found("pca", {"model": run["model"], "n": 2000}), collected.found("read", {"run": run})
    if flat is None or read is None:
        return
    first = [token for token in flat["tokens"] if re.fullmatch(r".?[a-z]{3,}", token, re.IGNORECASE)]
    words = dict.fromkeys([*(first or flat["tokens"])[:1], *read["source"]["tokens"]])
    for token in list(words)[:MAX_NEIGHBOURS]:
        yield "neighbours", {"model": run["model"], "token": token, "k": 12}


def _lens_and_sweep_requests(collected: AnswerSet, run: dict[str, Any]) -> Iterator[PageRequest]:
    """The lens; each of its cells if it is small; and the sweeps if the text is short."""
    first = {"run": run, "first": 0, "n": LENS_COLUMNS}
    yield "lens", first
    read, lens = collected.found("read", {"run": run}), collected.found("lens", first)
    if lens is not None:
        for start in range(LENS_COLUMNS, lens["total"], LENS_COLUMNS):
            yield "lens", {"run": run, "first": start, "n": LENS_COLUMNS}
    if lens is not None and lens["layers"] * lens["total"] <= MAX_CELLS:
        for layer in range(lens["layers"]):
            for position in range(lens["total"]):
                yield "cell", {"run": run, "layer": layer, "position": position, "k": 10}
    if read is not None and len(read["source"]["ids"]) <= MAX_SWEPT:
        for attention in collected.explorer.description()["attentions"]:
            for layer in range(len(attention["sites"])):
                yield "sweep", {"run": run, "attention": attention["name"], "layer": layer}
