"""Matplotlib figures (the extra `plot`) of how a model is told the positions of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.inside.figure_grid import LARGE, RISING, SMALL, TWO_SIDED, Axes, PlotFigure, spell
from clearhead.layers.positions import DistanceBias, Learned, Positions, Rotary, Sinusoidal
from clearhead.layers.relative_positions import Alibi, RelativeBuckets


def standard_positions(length: int = 64) -> dict[str, Positions]:
    """One example of each kind of positions, untrained."""
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
def plot_positions(kinds: Mapping[str, Positions] | None = None, *, length: int = 64, title: str = "") -> PlotFigure:
    """One row per kind: on the left what it gives to a model, on the right its effect by distance between two tokens.

    `kinds` may hold those of a model: {"GPT-2": model.positions}.
    """
    kinds = standard_positions(length) if kinds is None else kinds
    figure = PlotFigure(8.2, 0.45 + 1.95 * len(kinds))
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.06)
    figure.suptitle(title or "How a model knows the order of its tokens", size=LARGE, weight="bold", x=0.02, ha="left")
    grid = figure.subplots(len(kinds), 2, squeeze=False, gridspec_kw=dict(width_ratios=(1, 1.25)))
    for (name, kind), (left, right) in zip(kinds.items(), grid, strict=True):
        _draw_kind(figure, left, right, name, _drawing_of(kind, name, length))
        for ax in (left, right):
            ax.tick_params(labelsize=SMALL - 1, length=2)
            ax.locator_params(nbins=5)
    return figure


@dataclass(frozen=True)
class _Drawing:
    """What is drawn of one kind: an image on the left, lines over the distance on the right, with their names."""

    image: Float[Tensor, "rows columns"]
    title: str
    y_name: str
    lines: Float[Tensor, "n length"]
    line_name: str
    is_bias: bool = False  # by distance and head, not by position


def _drawing_of(kind: Positions, name: str, length: int) -> _Drawing:
    length = length if kind.max_len is None else min(length, kind.max_len)
    at = torch.arange(length)
    if isinstance(kind, Sinusoidal | Learned):
        table = kind.enter(torch.zeros(1, length, _width(kind)), at)[0].float()
        unit = table / table.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        lines = _by_distance(unit @ unit.T)[None]
        return _Drawing(table.T, "added to the embedding", "dimension", lines, "mean cosine of two places")
    if isinstance(kind, Rotary):
        cosines = (at.float()[:, None] * kind.frequencies(torch.device("cpu"))).cos()
        # For q = k with all pairs of the same length, the score is the mean cosine of the rotations.
        lines = cosines.mean(-1)[None]
        return _Drawing(cosines.T, "cosine of the turn of q and k", "pair", lines, "relative score of q = k")
    if isinstance(kind, DistanceBias):
        bias = kind.dense(-at[None, None]).float()[0, :, 0]
        return _Drawing(bias, "added to the scores", "head", bias, "added to the score", is_bias=True)
    raise InputError(f"{name!r} are positions of kind {type(kind).__name__}, which gives nothing to draw; leave it out")


def _draw_kind(figure: PlotFigure, left: Axes, right: Axes, name: str, drawing: _Drawing) -> None:
    two_sided = float(drawing.image.min()) < 0 < float(drawing.image.max())
    most = float(drawing.image.abs().max())
    image = left.imshow(
        drawing.image.numpy(),
        aspect="auto",
        cmap=TWO_SIDED if two_sided else RISING,
        vmin=-most if two_sided else None,
        vmax=most if two_sided else None,
        interpolation="nearest",
    )
    figure.colorbar(image, ax=left, pad=0.02).ax.tick_params(labelsize=SMALL - 1, length=2)
    left.set_title(f"{spell(name)}: {drawing.title}", size=SMALL, loc="left", parse_math=False)
    left.set_xlabel("distance" if drawing.is_bias else "position", size=SMALL)
    left.set_ylabel(drawing.y_name, size=SMALL)
    n = len(drawing.lines)
    for head, line in enumerate(drawing.lines):
        # The colour map's light end would be invisible on white.
        shade = image.cmap(1 - 0.7 * head / max(n - 1, 1)) if drawing.is_bias and not two_sided else None
        right.plot(line.numpy(), color=shade or ("C0" if n == 1 else str(0.65 * head / (n - 1))), lw=1.2)
    right.axhline(0, color="0.8", lw=0.8, zorder=0)
    right.set_title("by distance" + (", a line a head" if n > 1 else ""), size=SMALL, loc="left")
    right.set_xlabel("distance", size=SMALL)
    right.set_ylabel(drawing.line_name, size=SMALL)
    right.spines[["top", "right"]].set_visible(False)


def _width(kind: Sinusoidal | Learned) -> int:
    return kind.d_model if isinstance(kind, Sinusoidal) else kind.weight.shape[1]


def _by_distance(similar: Float[Tensor, "T T"]) -> Float[Tensor, " T"]:
    """The mean over all pairs at each distance."""
    return torch.stack([similar.diagonal(distance).mean() for distance in range(len(similar))])
