"""The page on its own: answers packed as the page reads them, and one file that carries the page and its answers.

The packed form: a length (4 bytes, little-endian), so many bytes of JSON, then arrays, each at a multiple of 8. The JSON says
each array's kind, shape and place. The same bytes come over HTTP, and as base64 inside an exported file.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.errors import InputError
from clearhead.inside.maps import head_map, survey
from clearhead.inside.probe import Seen
from clearhead.version import __version__

FILES = Path(__file__).parent / "page"
KINDS = {"uint8": "u1", "float32": "f4", "int32": "i4"}
MOST_BYTES = 10_000_000  # of a page with its answers

# An exported page asks nobody for anything.
POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:"


def pack(told: Mapping[str, Any], **arrays: np.ndarray) -> bytes:
    """An answer's fields and arrays (uint8, float32 or int32) as one piece."""
    places: dict[str, Any] = {}
    parts: list[bytes] = []
    at = 0
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        places[name] = {"dtype": KINDS[array.dtype.name], "shape": list(array.shape), "at": at}
        padding = -len(raw) % 8
        parts += [raw, b"\0" * padding]
        at += len(raw) + padding
    text = json.dumps(_finite({**told, "arrays": places}), ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    return struct.pack("<I", len(text)) + text + b"".join(parts)


def unpack(packed: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The fields and arrays of a packed answer, as the page finds them."""
    (n,) = struct.unpack_from("<I", packed)
    told: dict[str, Any] = json.loads(packed[4 : 4 + n])
    arrays: dict[str, np.ndarray] = {}
    for name, place in told.pop("arrays").items():
        kind, count = np.dtype(f"<{place['dtype']}"), math.prod(place["shape"])
        arrays[name] = np.frombuffer(packed, kind, count, 4 + n + place["at"]).reshape(place["shape"])
    return told, arrays


def key_of(name: str, params: Mapping[str, Any]) -> str:
    """What the page calls this request: the same string as its JSON.stringify makes of the sorted fields."""
    return name + _script_json(params)


def _script_json(value: Any) -> str:
    if isinstance(value, Mapping):
        fields = (f"{_script_json(str(key))}:{_script_json(value[key])}" for key in sorted(value))
        return "{" + ",".join(fields) + "}"
    if isinstance(value, str) or not isinstance(value, Sequence | float):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, float):
        return "[" + ",".join(map(_script_json, value)) + "]"
    if not math.isfinite(value):
        return "null"
    if value.is_integer() and abs(value) < 1e21:
        return str(int(value))
    text = repr(value)
    mantissa, _, exponent = text.partition("e")
    power = int(exponent or 0)
    if -7 < power < 0:  # such as 1e-05, which a script writes out
        return f"{value:.{len(mantissa.replace('-', '').replace('.', '')) - 1 - power}f}"
    return f"{mantissa}e{power:+d}" if exponent else text


def _finite(value: Any) -> Any:
    """Without numbers that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def write_page(answers: Mapping[str, bytes], start: Mapping[str, Any]) -> str:
    """One file with the page and these answers (by `key_of`), which needs nothing else; `start` is what it begins with."""
    told = {key: base64.b64encode(answer).decode() for key, answer in answers.items()}
    modules = {file.name: _module(file.read_text(encoding="utf-8")) for file in sorted(FILES.glob("*.js"))}
    imports = {f"clearhead/{name}": _data_url(text) for name, text in modules.items()}
    page = (FILES / "index.html").read_text(encoding="utf-8")
    script = "".join(
        [
            f"<script>window.CLEARHEAD_START={_inside(start)};window.CLEARHEAD_ANSWERS={_inside(told)}</script>\n",
            f'<script type="importmap">{_inside({"imports": imports})}</script>\n',
            '<script type="module">import "clearhead/main.js"</script>',
        ]
    )
    # Functions, since a replacement's own backslashes would be read.
    page = re.sub(r'<link rel="stylesheet" href="([\w-]+\.css)">', _style, page)
    page = re.sub(r'<script type="module"[^>]*></script>', lambda _: script, page)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    return re.sub(r"<meta charset[^>]*>", lambda found: f"{found[0]}\n{policy}", page, count=1)


def _style(link: re.Match[str]) -> str:
    return f"<style>\n{(FILES / link[1]).read_text(encoding='utf-8')}</style>"


def _module(text: str) -> str:
    """A module that finds the others by name: inside a data URL nothing is beside it."""
    return re.sub(r"""((?:from|import)\s*\(?\s*)(["'])\./""", r"\1\2clearhead/", text)


def _data_url(text: str) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"


def _inside(value: Any) -> str:
    """JSON that can not end the script it stands in."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


class Frame:
    """A page that a notebook shows in a frame, and keeps when it is saved."""

    def __init__(self, page: str, height: int) -> None:
        self.page, self.height = page, height

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{self.height}px;border:0"
        return f'<iframe style="{style}" sandbox="allow-scripts" srcdoc="{html.escape(self.page)}"></iframe>'


def show_seen(
    seen: Seen, tokens: Sequence[str] = (), columns: Sequence[str] = (), *, batch: int = 0, height: int = 760
) -> Frame:
    """The heads that a probe saw, as a grid of maps. `tokens` name the queries, `columns` the keys where they are others."""
    places = [place for place in seen.looks if f"{place}.weights" in seen]
    if not places:
        raise InputError(
            "there is no attention to show; probe '*.attention.weights', and call the model inside the `with`"
        )
    groups: dict[str, list[str]] = {}
    for place in places:
        groups.setdefault(_group(place), []).append(place)
    run = {"model": "seen", "text": "", "target": None, "second": None, "changes": []}
    has_pair = any(name in groups for name in ("encoder", "decoder", "cross"))
    source, target = _names(seen, groups, tokens, columns, has_pair)
    model: dict[str, Any] = {
        "name": "seen",
        "shape": "encoder_decoder" if has_pair else "decoder",
        "inputs": "tokens",
        "head": None,
        "n_params": None,
        "max_len": len(source),
        "limit": len(source),
        "attentions": [
            {"name": name, "sites": sites, "n_heads": [len(seen.looks[site].heads) for site in sites]}
            for name, sites in groups.items()
        ],
        "can": {},
        "example": "",
        "example_target": None,
        "config": {},
    }
    read = {
        "source": _strip(source),
        "target": _strip(target) if target else None,
        "target_text": None,
        "truncated": False,
        "answer": {"kind": "states", "top": []},
        "plain": None,
    }
    answers = {
        key_of("models", {}): pack({"models": [model], "version": __version__}),
        key_of("read", {"run": run}): pack(read),
    }
    for name, sites in groups.items():
        for layer, site in enumerate(sites):
            thumbs, scores = survey(seen, f"{site}.weights", batch=batch)
            asked = {"run": run, "attention": name, "layer": layer, "size": 32}
            answers[key_of("grid", asked)] = pack({"site": site, "scores": tell_scores(scores)}, thumbs=thumbs)
    room, n_left = MOST_BYTES - 1_000_000 - sum(map(len, answers.values())) * 4 // 3, 0
    for site in places:
        for head in seen.looks[site].heads:
            found = pack_map(seen, site, head, None, batch=batch)
            room -= len(found) * 4 // 3
            n_left += room < 0
            if room >= 0:
                asked = {"run": run, "site": site, "head": head, "box": None, "most": 256}
                answers[key_of("map", asked)] = found
    left_out = f"{n_left} maps are left out, for {MOST_BYTES // 10**6} MB; probe fewer layers" if n_left else ""
    start = {"state": {"model": "seen", "panel": "heads"}, "panels": ["heads"], "left_out": left_out}
    return Frame(write_page(answers, start), height)


def tell_scores(scores: Sequence[Any]) -> list[dict[str, Any]]:
    kinds = ("head", "previous", "first", "induction", "entropy", "alignment")
    return [{kind: getattr(score, kind) for kind in kinds} for score in scores]


def pack_map(
    seen: Seen, site: str, head: int, box: tuple[int, int, int, int] | None, most: int = 256, *, batch: int = 0
) -> bytes:
    """The page's `map` of one head."""
    found = head_map(seen, f"{site}.weights", head, box, most=most, batch=batch)
    told = {"T": found.T, "S": found.S, "box": found.box, "pooled": found.pooled}
    return pack(told, map=found.weights.numpy(), rowmax=found.row_max.numpy())


def _group(place: str) -> str:
    if place.endswith(".cross"):
        return "cross"
    return place.partition(".")[0] if place.startswith(("encoder.", "decoder.")) else "attention"


def _names(
    seen: Seen, groups: Mapping[str, Sequence[str]], tokens: Sequence[str], columns: Sequence[str], has_pair: bool
) -> tuple[list[str], list[str]]:
    """The source's and the target's tokens, numbered where they have no names."""
    some = {name: seen.looks[sites[0]] for name, sites in groups.items()}

    def named(given: Sequence[str], n: int, what: str) -> list[str]:
        if given and len(given) != n:
            raise InputError(f"there are {n} {what}, but {len(given)} names for them; give one for each, or none")
        return list(given) or [str(at) for at in range(n)]

    if not has_pair:
        return named(tokens, some["attention"].k.shape[2], "tokens"), []
    cross, encoder, decoder = (some.get(name) for name in ("cross", "encoder", "decoder"))
    n_source = cross.k.shape[2] if cross is not None else encoder.k.shape[2] if encoder is not None else 0
    n_target = cross.q.shape[2] if cross is not None else decoder.q.shape[2] if decoder is not None else 0
    return named(columns, n_source, "source tokens"), named(tokens, n_target, "target tokens")


def _strip(tokens: Sequence[str]) -> dict[str, Any]:
    return {"tokens": list(tokens), "ids": list(range(len(tokens))), "kind": "tokens", "special": []}
