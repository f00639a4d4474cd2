"""Pictures on paper: matplotlib figures (the extra `plot`) of what the probe and the readings give.

    figure = plot_map(seen["blocks.1.attention.weights"][0, 3], tokens)
    figure.savefig("map.svg")                  # or .png; a notebook shows the figure by itself

No window is opened and no global state touched. Labels are elided and thinned out until none lies on another, and what has
more cells than can be seen is drawn in fewer, which the picture then says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError, did_you_mean
from clearhead.inside.drawing import LARGE, RISING, SMALL, TWO_SIDED, Axes, Grid, Picture, spell
from clearhead.inside.heads import HeadScore
from clearhead.inside.pictures import elide, label, pool, told
from clearhead.inside.probe import Seen
from clearhead.inside.readings import Attribution
from clearhead.layers.positions import Alibi, DistanceBias, Learned, Positions, RelativeBuckets, Rotary, Sinusoidal

WARNING = "A picture of attention is not an explanation."
CELLS = 256  # the most drawn on a side


def plot_map(
    weights: Float[Tensor, "T S"], tokens: Sequence[str], columns: Sequence[str] = (), *, title: str = "Attention"
) -> Picture:
    """One head's attention: a row a query, a column a key. `columns` names the keys where they are not the queries."""
    return _draw_weights(weights, tokens, columns or tokens, title, ("query", "key"))


def plot_alignment(
    weights: Float[Tensor, "T S"], target: Sequence[str], source: Sequence[str], *, title: str = "Alignment"
) -> Picture:
    """Cross-attention: where the source was looked at while each token was written. A dot marks each row's largest."""
    return _draw_weights(weights, target, source, title, ("written", "source"), dots=True)


def plot_seen(
    seen: Seen,
    site: str,
    *,
    head: int | None = None,
    batch: int = 0,
    tokens: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> Picture:
    """Attention at a site of a probe: one head's, or the mean of all. Tokens without names are numbered."""
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
) -> Picture:
    """What each layer would say next (`logit_lens(...)[:, 0]`), the last on top: its likeliest token, as bright as it is likely."""
    _check_names(tokens, lens.shape[1], "tokens", "places")
    likely = lens.float().softmax(-1).max(-1)
    texts = [[name(int(id)) for id in row] for row in likely.indices.flip(0)] if len(tokens) <= CELLS else None
    rows = [*(f"after block {layer}" for layer in reversed(range(len(lens) - 1))), "embedding"]
    return Grid(
        likely.values.flip(0),
        rows,
        [label(token) for token in tokens],
        title=title,
        note="Each layer's state through the last norm and the head: a reading, not what the layer computes with.",
        scale="probability of the likeliest token",
        cell=(0.62, 0.26),
        texts=texts,
        highest=1.0,
    ).draw()


def plot_heads(scores: Sequence[HeadScore], kind: str = "induction", *, title: str = "") -> Picture:
    """One score of every head that has it, a row a layer."""
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


def plot_attribution(found: Attribution, *, batch: int = 0, position: int = -1, title: str = "") -> Picture:
    """What each head and each feed-forward layer added to one logit, directly: orange against it, purple for it."""
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
) -> Picture:
    T, S = weights.shape
    _check_names(rows, T, "tokens", "rows")
    _check_names(columns, S, "columns", "columns")
    tall, wide = math.ceil(T / CELLS), math.ceil(S / CELLS)
    note = WARNING if tall == wide == 1 else f"{told(T, S, tall, wide)}. {WARNING}"
    grid = Grid(
        pool(weights.detach().float().cpu(), tall, wide),
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


# Positions.


def standard_positions(length: int = 64) -> dict[str, Positions]:
    """Each kind as it begins, untrained, for the gallery."""
    torch_state = torch.get_rng_state()
    torch.manual_seed(0)
    kinds: dict[str, Positions] = {
        "sinusoidal": Sinusoidal(d_model=64),
        "learned (untrained)": Learned(d_model=64, max_len=length),
        "rotary": Rotary(d_head=64),
        "alibi": Alibi(n_heads=8),
        "t5 (untrained)": RelativeBuckets(n_heads=8, both_ways=False),
    }
    torch.set_rng_state(torch_state)
    return kinds


@torch.no_grad()
def plot_positions(kinds: Mapping[str, Positions] | None = None, *, length: int = 64, title: str = "") -> Picture:
    """A gallery: of each kind what it gives to a model, and beside it what that makes of the distance between two tokens.

    `kinds` may hold a model's own: {"GPT-2": model.positions}.
    """
    kinds = standard_positions(length) if kinds is None else kinds
    figure = Picture(8.2, 0.45 + 1.95 * len(kinds))
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.06)
    figure.suptitle(title or "How a model knows the order of its tokens", size=LARGE, weight="bold", x=0.02, ha="left")
    grid = figure.subplots(len(kinds), 2, squeeze=False, gridspec_kw=dict(width_ratios=(1, 1.25)))
    for (name, kind), (left, right) in zip(kinds.items(), grid, strict=True):
        _draw_kind(figure, left, right, name, kind, length)
        for ax in (left, right):
            ax.tick_params(labelsize=SMALL - 1, length=2)
            ax.locator_params(nbins=5)
    return figure


def _draw_kind(figure: Picture, left: Axes, right: Axes, name: str, kind: Positions, length: int) -> None:
    if kind.max_len is not None:
        length = min(length, kind.max_len)
    at = torch.arange(length)
    if isinstance(kind, Sinusoidal | Learned):
        table = kind.enter(torch.zeros(1, length, _width(kind)), at)[0].float()
        picture, what, across = table.T, "added to the embedding", "dimension"
        unit = table / table.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        lines, unit_name = _by_distance(unit @ unit.T)[None], "mean cosine of two places"
    elif isinstance(kind, Rotary):
        turned = at.float()[:, None] * kind.frequencies(torch.device("cpu"))
        picture, what, across = turned.cos().T, "cosine of the turn of q and k", "pair"
        # A query and a key that are alike, all pairs of the same length: their score is the mean cosine of the turns.
        lines, unit_name = turned.cos().mean(-1)[None], "relative score of q = k"
    elif isinstance(kind, DistanceBias):
        lines = kind.dense(-at[None, None]).float()[0, :, 0]
        picture, what, across, unit_name = lines, "added to the scores", "head", "added to the score"
    else:
        raise InputError(
            f"{name!r} are positions of kind {type(kind).__name__}, which gives nothing to draw; leave it out"
        )
    by_distance = isinstance(kind, DistanceBias)
    two_sided = float(picture.min()) < 0 < float(picture.max())
    most = float(picture.abs().max())
    image = left.imshow(
        picture.numpy(),
        aspect="auto",
        cmap=TWO_SIDED if two_sided else RISING,
        vmin=-most if two_sided else None,
        vmax=most if two_sided else None,
        interpolation="nearest",
    )
    figure.colorbar(image, ax=left, pad=0.02).ax.tick_params(labelsize=SMALL - 1, length=2)
    left.set_title(f"{spell(name)}: {what}", size=SMALL, loc="left", parse_math=False)
    left.set_xlabel("distance" if by_distance else "position", size=SMALL)
    left.set_ylabel(across, size=SMALL)
    for head, line in enumerate(lines):
        # The scale's light end does not show on white.
        shade = image.cmap(0.85 * head / max(len(lines) - 1, 1)) if by_distance and not two_sided else None
        right.plot(
            line.numpy(), color=shade or ("C0" if len(lines) == 1 else str(0.65 * head / (len(lines) - 1))), lw=1.2
        )
    right.axhline(0, color="0.8", lw=0.8, zorder=0)
    right.set_title("by distance" + (", a line a head" if len(lines) > 1 else ""), size=SMALL, loc="left")
    right.set_xlabel("distance", size=SMALL)
    right.set_ylabel(unit_name, size=SMALL)
    right.spines[["top", "right"]].set_visible(False)


def _width(kind: Sinusoidal | Learned) -> int:
    return kind.d_model if isinstance(kind, Sinusoidal) else kind.weight.shape[1]


def _by_distance(similar: Float[Tensor, "T T"]) -> Float[Tensor, " T"]:
    """The mean over all pairs that are equally far apart."""
    return torch.stack([similar.diagonal(distance).mean() for distance in range(len(similar))])
