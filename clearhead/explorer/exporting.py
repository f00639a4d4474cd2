"""One file that holds the page and the answers it needs for one text, at most 10 MB."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clearhead.data import Tokenizer
from clearhead.errors import ClearheadError
from clearhead.explorer.explorer import Explorer
from clearhead.inside.pages import MOST_BYTES, key_of, unpack, write_page
from clearhead.models import Model

PIECE = 256  # positions of a lens that the page asks for at once
CELLS = 1500  # of a lens, each an answer of its own
SWEPT = 64  # tokens up to which every head is taken away once
WORDS = 24  # tokens whose neighbours are told

Asked = tuple[str, dict[str, Any]]


def export_page(
    model: Model,
    tokenizer: Tokenizer | None,
    text: str = "",
    target: str | None = None,
    *,
    name: str,
    place: Path | None = None,
    most: int = MOST_BYTES,
) -> str:
    """The page as one file that needs neither server nor network; what did not fit it says itself."""
    explorer = Explorer(model, tokenizer, name=name, place=place)
    told = explorer.described()
    run = {"model": name, "text": text or told["example"], "target": target, "second": None, "changes": []}
    state = {key: value for key, value in run.items() if key in ("model", "text", "target") and value}
    gathered = Gathered(explorer, most - len(write_page({}, {"state": state}).encode()) - 1000)
    gathered.must("models", {})
    gathered.must("read", {"run": run})
    maps: list[tuple[float, Asked]] = []
    for attention in told["attentions"]:
        for layer, site in enumerate(attention["sites"]):
            asked = {"run": run, "attention": attention["name"], "layer": layer, "size": 32}
            scores, _ = unpack(gathered.must("grid", asked))
            for score in scores["scores"]:
                fields = {"run": run, "site": site, "head": score["head"], "box": None, "most": 256}
                maps.append((_worth(score), ("map", fields)))
    for asked in _others(told, run):
        gathered.add(*asked)
    for asked in _words(gathered, run):
        gathered.add(*asked)
    # The most telling first: the page opens with one of them.
    ordered = sorted(maps, key=lambda pair: -pair[0])
    left = [asked for _, asked in ordered if not gathered.add(*asked)]
    for asked in _cells(gathered, run):
        gathered.add(*asked)
    left_out = f"{len(left)} of {len(maps)} heads' maps did not fit into {most / 1e6:g} MB" if left else ""
    return write_page(gathered.answers, {"state": state, "left_out": left_out})


class Gathered:
    """Answers within a budget of bytes."""

    def __init__(self, explorer: Explorer, room: int) -> None:
        self.explorer, self.room = explorer, room
        self.answers: dict[str, bytes] = {}

    def must(self, name: str, params: dict[str, Any]) -> bytes:
        """An answer without which there is no page; what is wrong with it, the caller hears."""
        answer = self.explorer.answer(name, params)
        self._keep(key_of(name, params), answer)
        return answer

    def add(self, name: str, params: dict[str, Any]) -> bool:
        """Whether there is such an answer, and room for it."""
        try:
            answer = self.explorer.answer(name, params)
        except ClearheadError:  # the model has no such thing; the page says so when it is asked
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
    """In the file: JSON of the key with its escapes, and base64."""
    return len(key.encode("ascii", "backslashreplace")) + 2 * key.count('"') + 4 * math.ceil(len(answer) / 3) + 8


def _worth(score: dict[str, Any]) -> float:
    """The same measure by which the page opens a head."""
    known = [score[kind] or 0.0 for kind in ("alignment", "induction", "previous")]
    return max(known) - 0.05 * (score["entropy"] or 0.0)


def _others(told: dict[str, Any], run: dict[str, Any]) -> Iterator[Asked]:
    """What each panel asks when it is opened."""
    model, text = {"model": run["model"]}, run["text"]
    yield "positions", {**model, "length": 64}
    yield "geometry", model
    yield "pca", {**model, "n": 2000}
    longest = max(8192, told["max_len"])
    lengths = [2 ** (i + 4) for i in range(int(math.log2(longest)) - 3)]
    yield "cost", {**model, "changes": {}, "batch": 1, "precision": "fp32", "mode": "forward", "lengths": lengths}
    plain = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "seed": 0}
    yield "step", {**model, "text": text, "ids": [], **plain}
    yield "beam", {**model, "text": text, "beams": 3, "length_penalty": 1, "most": 16}
    for attention in told["attentions"]:
        if attention["name"] != "cross":
            yield "flow", {"run": run, "attention": attention["name"]}


def _words(gathered: Gathered, run: dict[str, Any]) -> Iterator[Asked]:
    """The neighbours of the token that the page begins with, and of the text's own."""
    flat, read = gathered.found("pca", {"model": run["model"], "n": 2000}), gathered.found("read", {"run": run})
    if flat is None or read is None:
        return
    first = [token for token in flat["tokens"] if re.fullmatch(r".?[a-z]{3,}", token, re.IGNORECASE)]
    words = dict.fromkeys([*(first or flat["tokens"])[:1], *read["source"]["tokens"]])
    for token in list(words)[:WORDS]:
        yield "neighbours", {"model": run["model"], "token": token, "k": 12}


def _cells(gathered: Gathered, run: dict[str, Any]) -> Iterator[Asked]:
    """The lens, each cell of a small one, and every head taken away once from a short text."""
    first = {"run": run, "first": 0, "n": PIECE}
    yield "lens", first
    read, lens = gathered.found("read", {"run": run}), gathered.found("lens", first)
    if lens is not None:
        for start in range(PIECE, lens["total"], PIECE):
            yield "lens", {"run": run, "first": start, "n": PIECE}
    if lens is not None and lens["layers"] * lens["total"] <= CELLS:
        for layer in range(lens["layers"]):
            for position in range(lens["total"]):
                yield "cell", {"run": run, "layer": layer, "position": position, "k": 10}
    if read is not None and len(read["source"]["ids"]) <= SWEPT:
        for attention in gathered.explorer.described()["attentions"]:
            for layer in range(len(attention["sites"])):
                yield "sweep", {"run": run, "attention": attention["name"], "layer": layer}
