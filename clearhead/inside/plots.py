"""Matplotlib figures (the extra `plot`) of attention, the logit lens, head scores and attribution.

    figure = plot_map(seen["blocks.1.attention.weights"][0, 3], tokens)
    figure.savefig("map.svg")                  # or .png; a notebook displays the figure

No window is opened and no global state is changed. Long labels are cut and crowded ones left out, so that none overlap. A map with
too many cells to see is max-pooled, and the figure says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError, did_you_mean
from clearhead.inside.attribution import Attribution
from clearhead.inside.figure_grid import TWO_SIDED, Grid, PlotFigure
from clearhead.inside.head_scores import HeadScore
from clearhead.inside.heatmap import elide, label, max_pool, pooling_note
from clearhead.inside.probe import Seen

WARNING = "A picture of attention is not an explanation."
MAX_CELLS = 256  # on a side


def plot_map(
    weights: Float[Tensor, "T S"], tokens: Sequence[str], columns: Sequence[str] = (), *, title: str = "Attention"
) -> PlotFigure:
    """One head's attention: one row per query, one column per key. `columns` names the keys if they are not the queries."""
    return _draw_weights(weights, tokens, columns or tokens, title, ("query", "key"))


def plot_alignment(
    weights: Float[Tensor, "T S"], target: Sequence[str], source: Sequence[str], *, title: str = "Alignment"
) -> PlotFigure:
    """Cross-attention: the weights on the source for each generated token. A dot marks each row's maximum."""
    return _draw_weights(weights, target, source, title, ("written", "source"), dots=True)


def plot_contacts(contacts: Float[Tensor, "L L"], residues: str, *, title: str = "Contacts") -> PlotFigure:
    """The probability that two residues of a protein touch, from `contact_maps`."""
    L = len(contacts)
    _check_names(residues, L, "residues", "rows")
    step = math.ceil(L / MAX_CELLS)
    names = [f"{letter}{at}" for at, letter in enumerate(residues, 1)][::step]
    note = "Probabilities by the model's contact head; nothing here was measured."
    return Grid(
        max_pool(contacts.detach().float().cpu(), step, step),
        *(names, names),
        title=title,
        note=note if step == 1 else f"{pooling_note(L, L, step, step)}. {note}",
        scale="probability of a contact",
        cell=(0.26, 0.26),
        axes=("residue", "residue"),
        highest=1.0,
    ).draw()


def plot_seen(
    seen: Seen,
    site: str,
    *,
    head: int | None = None,
    batch: int = 0,
    tokens: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> PlotFigure:
    """Attention at a probed site: one head, or the mean of all. Tokens without names are numbered."""
    if not site.endswith(".weights"):
        raise InputError(f"{site!r} holds no attention to draw; choose a site that ends in '.weights'")
    if head is None:
        weights, which = seen.rows(site)[batch].mean(0), "mean of all heads"
    else:
        weights, which = seen.rows(site, head=head)[batch, 0], f"head {head}"
    T, S = weights.shape
    tokens = tokens or [str(at) for at in range(S - T, S)]
    place, title = site.removesuffix(".weights"), f"{site.removesuffix('.weights')}, {which}"
    if place.endswith(".cross"):
        return plot_alignment(weights, tokens, columns or [str(at) for at in range(S)], title=title)
    return plot_map(weights, tokens, columns or (tokens if T == S else [str(at) for at in range(S)]), title=title)


def plot_lens(
    lens: Float[Tensor, "layers T V"],
    tokens: Sequence[str],
    name: Callable[[int], str] = str,
    *,
    title: str = "Logit lens",
) -> PlotFigure:
    """The likeliest token after each layer (of `logit_lens(...)[:, 0]`), the first layer on top; a darker cell is likelier."""
    _check_names(tokens, lens.shape[1], "tokens", "places")
    likely = lens.float().softmax(-1).max(-1)
    texts = [[name(int(id)) for id in row] for row in likely.indices] if len(tokens) <= MAX_CELLS else None
    rows = ["embedding", *(f"after block {layer}" for layer in range(len(lens) - 1))]
    return Grid(
        likely.values,
        rows,
        [label(token) for token in tokens],
        title=title,
        note="Each layer's state through the last norm and the head: a reading, not what the layer computes with.",
        scale="probability of the likeliest token",
        cell=(0.62, 0.26),
        texts=texts,
        highest=1.0,
    ).draw()


def plot_heads(scores: Sequence[HeadScore], kind: str = "induction", *, title: str = "") -> PlotFigure:
    """One score of every head that has it, one row per layer."""
    kinds = [name for name in HeadScore.__annotations__ if name not in ("site", "head", "distance")]
    if kind not in kinds:
        raise InputError(f"heads have no score {kind!r}; {did_you_mean(kind, kinds)}")
    found = {(score.site, score.head): getattr(score, kind) for score in scores if getattr(score, kind) is not None}
    if not found:
        raise InputError(f"none of the {len(scores)} heads has a score for {kind!r}; {_why_none(kind)}")
    rows = list(dict.fromkeys(site for site, _ in found))
    n_heads = max(head for _, head in found) + 1
    values = torch.tensor([[found.get((site, head), math.nan) for head in range(n_heads)] for site in rows])
    return Grid(
        values,
        [elide(site.removesuffix(".weights"), 32) for site in rows],
        [str(head) for head in range(n_heads)],
        title=title or f"Heads by {kind}",
        note="What a head did on this input. A score is not what the head is for.",
        scale="nats" if kind == "entropy" else "mean over queries",
        cell=(0.42, 0.26),
        texts=[["" if math.isnan(value) else f"{value:.2f}" for value in row] for row in values.tolist()],
        axes=("", "head"),
        highest=None if kind == "entropy" else 1.0,
    ).draw()


def plot_attribution(found: Attribution, *, batch: int = 0, position: int = -1, title: str = "") -> PlotFigure:
    """What each head and each feed-forward layer added directly to one logit: orange lowers it, blue raises it."""
    values = {
        name: float(part[batch, position] if part.ndim == 2 else part[batch]) for name, part in found.parts.items()
    }
    rows: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        place, _, part = name.rpartition(".")
        if part == "feedforward":
            rows.setdefault(f"{place}.attention", {})["feed-forward"] = value
        elif part.isdigit():
            rows.setdefault(place, {})[part] = value
    columns = [str(head) for head in range(max(sum(key.isdigit() for key in row) for row in rows.values()))]
    columns.append("feed-forward")
    grid = torch.tensor([[row.get(column, math.nan) for column in columns] for row in rows.values()])
    rest = sum(values.values()) - float(grid.nansum())
    logit = float(found.logit[batch, position] if found.logit.ndim == 2 else found.logit[batch])
    most = float(grid[~grid.isnan()].abs().max())
    return Grid(
        grid,
        list(rows),
        columns,
        title=title or "What the logit is the sum of",
        note=f"These sum to {float(grid.nansum()):.2f}; with embedding and biases, {rest:.2f}, to the logit, {logit:.2f}. "
        f"What a layer does through later layers is counted as theirs.",
        scale="added to the logit",
        cell=(0.46, 0.26),
        texts=[["" if math.isnan(value) else f"{round(value, 1) + 0.0:.1f}" for value in row] for row in grid.tolist()],
        axes=("", "head"),
        lowest=-most,
        highest=most,
        colours=TWO_SIDED,
    ).draw()


def plot_effects(
    effects: Float[Tensor, "layers T"],
    layers: Sequence[str],
    tokens: Sequence[str],
    *,
    title: str = "Effects of patching",
) -> PlotFigure:
    """What a state brings back, as a share: one row per layer, one column per token. 1 is all, below 0 makes it worse."""
    _check_names(layers, effects.shape[0], "layers", "rows")
    _check_names(tokens, effects.shape[1], "tokens", "columns")
    values = effects.detach().float().cpu()
    most = max(1.0, float(values.abs().max()))
    return Grid(
        values,
        layers,
        [label(token) for token in tokens],
        title=title,
        note="Each state alone, in one run: what two of them bring back together may be more or less than their sum.",
        scale="share brought back",
        cell=(0.42, 0.26),
        texts=[[f"{value + 0.0:.2f}" if abs(value) >= 0.005 else "" for value in row] for row in values.tolist()],
        lowest=-most,
        highest=most,
        colours=TWO_SIDED,
    ).draw()


def _why_none(kind: str) -> str:
    if kind == "induction":
        return "it needs tokens that come again: use repeated_tokens"
    return (
        "it is cross-attention's, with head_scores(aligned=...)" if kind == "alignment" else "give more than one token"
    )


def _draw_weights(
    weights: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    axes: tuple[str, str],
    *,
    dots: bool = False,
) -> PlotFigure:
    T, S = weights.shape
    _check_names(rows, T, "tokens", "rows")
    _check_names(columns, S, "columns", "columns")
    tall, wide = math.ceil(T / MAX_CELLS), math.ceil(S / MAX_CELLS)
    note = WARNING if tall == wide == 1 else f"{pooling_note(T, S, tall, wide)}. {WARNING}"
    grid = Grid(
        max_pool(weights.detach().float().cpu(), tall, wide),
        [label(name) for name in rows[::tall]],
        [label(name) for name in columns[::wide]],
        title=title,
        note=note,
        scale="weight",
        cell=(0.26, 0.26),
        axes=axes,
        dots=dots,
    )
    return grid.draw()


def _check_names(names: Sequence[str], n: int, what: str, which: str) -> None:
    if len(names) != n:
        raise InputError(f"{len(names)} {what} were given to name {n} {which}; give one for each")
