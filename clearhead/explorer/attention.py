"""Where heads look: `grid`, `map`, `row` and `flow`."""

from __future__ import annotations

import math
from collections.abc import Generator

from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.explorer.asking import Params
from clearhead.explorer.runs import Pass, Runs
from clearhead.inside.heads import mean_of_heads, roll
from clearhead.inside.maps import survey
from clearhead.inside.pages import pack, pack_map, tell_scores
from clearhead.inside.pictures import pool
from clearhead.inside.sweeps import n_heads_of

MOST = 1024  # cells of a map on a side


def grid(runs: Runs, params: Params) -> bytes:
    """Every head of a layer as a small picture, and what each did."""
    run, name = runs.read(params), params.text("attention", "attention" if "attention" in runs.groups() else "encoder")
    sites = runs.group(name)
    layer, size = params.whole("layer", 0, len(sites) - 1), params.whole("size", 4, 128, 32)
    site = sites[layer]
    seen = runs.first_layer(run) if layer == 0 else None
    if seen is not None:
        source = runs.inputs.read(run.text)
        ids, aligned, real = source.tensor if source.strip.kind == "tokens" else None, None, source.real
    else:
        made = runs.make(run)
        seen, (ids, aligned) = made.seen, runs.scored_by(made, site)
        real = made.source.real if not site.startswith("decoder.") else None
    thumbs, scores = survey(seen, f"{site}.weights", size=size, ids=ids, aligned=aligned, real=real)
    return pack({"site": site, "scores": tell_scores(scores)}, thumbs=thumbs)


def head_map(runs: Runs, params: Params) -> bytes:
    """One head's weights, the largest of each cell."""
    made, site, head = _head(runs, params)
    look = made.seen.looks[site]
    T, S = look.q.shape[2], look.k.shape[2]
    box: tuple[int, int, int, int] | None = None
    if params.has("box"):
        given = params.wholes("box", 0, max(T, S), 4)
        if len(given) != 4 or not (0 <= given[0] < given[1] <= T and 0 <= given[2] < given[3] <= S):
            raise InputError(
                f"box is [row, end, column, end] within {T} rows and {S} columns; got {given}; null is all"
            )
        box = (given[0], given[1], given[2], given[3])
    return pack_map(made.seen, site, head, box, params.whole("most", 8, MOST, 256))


def row(runs: Runs, params: Params) -> bytes:
    """One row of one head, exact."""
    made, site, head = _head(runs, params)
    T = made.seen.looks[site].q.shape[2]
    weights = made.seen.rows(f"{site}.weights", params.whole("row", 0, T - 1), head=head)
    return pack({"site": site, "head": head}, weights=weights[0, 0, 0].float().cpu().numpy())


def flow(runs: Runs, params: Params) -> Generator[None, None, bytes]:
    """Attention rollout of a stack: a way to sum attention up, not an explanation."""
    run = runs.read(params)
    names = [name for name in runs.groups() if name != "cross"]
    name = params.one_of("attention", names, names[0])
    made = runs.make(run)
    found: Tensor | None = None
    for site in runs.group(name):
        yield
        found = roll(found, mean_of_heads(made.seen, f"{site}.weights").float())
    assert found is not None
    drawn, by = _small(found[0].cpu())
    words = "How much of each input may have reached each final state, if attention were all there is. It is not an explanation."
    return pack({"T": found.shape[1], "pooled": [by, by], "words": words}, rollout=drawn.numpy())


def _small(values: Float[Tensor, "T T"], most: int = 256) -> tuple[Float[Tensor, "t t"], int]:
    by = math.ceil(len(values) / most)
    return pool(values, by, by), by


def _head(runs: Runs, params: Params) -> tuple[Pass, str, int]:
    run, site = runs.read(params), params.one_of("site", list(runs.attentions))
    head = params.whole("head", 0, n_heads_of(runs.attentions[site]) - 1)
    return runs.make(run), site, head
