"""`Seen.show`: the heads that a probe saw, as the explorer's page in a notebook. The front door connects the two."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from clearhead.errors import InputError
from clearhead.explorer.heads_panel import pack_grid, pack_map
from clearhead.explorer.standalone_page import MAX_BYTES, write_page
from clearhead.explorer.wire_format import key_of, pack
from clearhead.inside.probe import Seen
from clearhead.version import __version__

RUN = {"model": "seen", "text": "", "target": None, "second": None, "changes": []}  # what the page asks about

# The attentions seen, by the page's names for them: attention, or encoder, decoder, cross.
Groups = dict[str, list[str]]


class Frame:
    """A page as an iframe in a notebook's output; it is saved with the notebook."""

    def __init__(self, page: str, height: int) -> None:
        self.page, self.height = page, height

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{self.height}px;border:0"
        return f'<iframe style="{style}" sandbox="allow-scripts" srcdoc="{html.escape(self.page)}"></iframe>'


def show_seen(
    seen: Seen, tokens: Sequence[str] = (), columns: Sequence[str] = (), *, batch: int = 0, height: int = 760
) -> Frame:
    """The heads that a probe saw, as a grid of maps. `tokens` name the queries, `columns` the keys where they are others."""
    groups: Groups = {}
    for site in seen.attention:
        if f"{site}.weights" in seen:
            groups.setdefault(_group(site), []).append(site)
    if not groups:
        raise InputError(
            "there is no attention to show; probe '*.attention.weights', and call the model inside the `with`"
        )
    source, target = _token_names(seen, groups, tokens, columns)
    answers = {
        key_of("models", {}): pack({"models": [_model(seen, groups, len(source))], "version": __version__}),
        key_of("read", {"run": RUN}): pack(_read(source, target)),
    }
    for name, sites in groups.items():
        for layer, site in enumerate(sites):
            request = {"run": RUN, "attention": name, "layer": layer, "size": 32}
            answers[key_of("grid", request)] = pack_grid(seen, site, batch=batch)
    n_left = _add_maps(answers, seen, groups, batch)
    left_out = f"{n_left} maps are left out, for {MAX_BYTES // 10**6} MB; probe fewer layers" if n_left else ""
    start = {"state": {"model": "seen", "panel": "heads"}, "panels": ["heads"], "left_out": left_out}
    return Frame(write_page(answers, start), height)


def _add_maps(answers: dict[str, bytes], seen: Seen, groups: Groups, batch: int) -> int:
    """Add the maps of all heads while there is room in the file; the number left out."""
    room, n_left = MAX_BYTES - 1_000_000 - sum(map(len, answers.values())) * 4 // 3, 0
    for site in (site for site in seen.attention if any(site in sites for sites in groups.values())):
        for head in seen.attention[site].heads:
            packed = pack_map(seen, site, head, batch=batch)
            room -= len(packed) * 4 // 3  # base64
            n_left += room < 0
            if room >= 0:
                request = {"run": RUN, "site": site, "head": head, "box": None, "most": 256}
                answers[key_of("map", request)] = packed
    return n_left


def _model(seen: Seen, groups: Groups, n_source: int) -> dict[str, Any]:
    """What the page needs to know of the model: its attentions, and that it can answer nothing else."""
    return {
        "name": "seen",
        "shape": "encoder_decoder" if _has_pair(groups) else "decoder",
        "inputs": "tokens",
        "head": None,
        "n_params": None,
        "max_len": n_source,
        "limit": n_source,
        "attentions": [
            {"name": name, "sites": sites, "n_heads": [len(seen.attention[site].heads) for site in sites]}
            for name, sites in groups.items()
        ],
        "can": {},
        "example": "",
        "example_target": None,
        "config": {},
    }


def _read(source: list[str], target: list[str]) -> dict[str, Any]:
    """The answer to `read`: the tokens, and no output of the model."""
    return {
        "source": _strip(source),
        "target": _strip(target) if target else None,
        "target_text": None,
        "truncated": False,
        "answer": {"kind": "seen", "top": []},
        "plain": None,
    }


def _strip(tokens: Sequence[str]) -> dict[str, Any]:
    return {"tokens": list(tokens), "ids": list(range(len(tokens))), "kind": "tokens", "special": []}


def _group(site: str) -> str:
    if site.endswith(".cross"):
        return "cross"
    return site.partition(".")[0] if site.startswith(("encoder.", "decoder.")) else "attention"


def _has_pair(groups: Mapping[str, Sequence[str]]) -> bool:
    return any(name in groups for name in ("encoder", "decoder", "cross"))


def _token_names(
    seen: Seen, groups: Groups, tokens: Sequence[str], columns: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The source's and the target's tokens; numbers where no names were given."""
    first = {name: seen.attention[sites[0]] for name, sites in groups.items()}

    def named(given: Sequence[str], n: int, what: str) -> list[str]:
        if given and len(given) != n:
            raise InputError(f"there are {n} {what}, but {len(given)} names for them; give one for each, or none")
        return list(given) or [str(position) for position in range(n)]

    if not _has_pair(groups):
        return named(tokens, first["attention"].k.shape[2], "tokens"), []
    cross, encoder, decoder = (first.get(name) for name in ("cross", "encoder", "decoder"))
    n_source = cross.k.shape[2] if cross is not None else encoder.k.shape[2] if encoder is not None else 0
    n_target = cross.q.shape[2] if cross is not None else decoder.q.shape[2] if decoder is not None else 0
    return named(columns, n_source, "source tokens"), named(tokens, n_target, "target tokens")
