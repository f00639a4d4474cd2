"""What a run changes in a model, as interventions: heads, attentions, feed-forward layers, neurons, steering vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from clearhead.errors import InputError
from clearhead.explorer.fields import Fields
from clearhead.inside.ablation_sweep import attentions_of, n_heads_of
from clearhead.inside.interventions import Intervention, add, mean, patch, scale, zero
from clearhead.inside.sites import blocks_of
from clearhead.models import Model

HOWS = ("zero", "mean", "patch", "scale")
STEER = "steer"


@dataclass(frozen=True)
class Change:
    """An output that is replaced: by zeros, its mean over the text, that on the second text, or itself times `by`.

    `site` is an attention and `part` one of its heads, or a feed-forward layer and one of its neurons; None is all of it.
    With how="steer" `site` is a residual stream, to which the vector from one text to another is added `by` times.
    """

    site: str
    part: int | None
    how: str
    by: float = 1.0

    @property
    def place(self) -> str:
        """The site of `intervene` that is changed."""
        if self.how == STEER:
            return self.site
        return f"{self.site}.{'hidden' if self.site.endswith('.feedforward') else 'out'}"


def read_change(model: Model, given: Fields) -> Change:
    """A change as the page sends it."""
    attentions, blocks = attentions_of(model), blocks_of(model)
    if given.text("how", "") == STEER:
        site = given.choice("site", [f"{name}.residual" for name in blocks])
        return Change(site, None, STEER, given.number("by", 1.0))
    feedforwards = {f"{name}.feedforward": block.feedforward for name, block in blocks.items()}
    site = given.choice("site", [*attentions, *feedforwards])
    n = n_heads_of(attentions[site]) if site in attentions else feedforwards[site].down.in_features
    part = given.integer("head", 0, n - 1) if given.has("head") else None
    how = given.choice("how", HOWS)
    return Change(site, part, how, given.number("by", 1.0) if how == "scale" else 1.0)


def check_unsteered(changes: Sequence[Change], what: str) -> None:
    """Refuse a run with a steering vector where an answer would leave it out."""
    steered = [f"{change.site} by {change.by:g}" for change in changes if change.how == STEER]
    if steered:
        raise InputError(f"{what} knows no steering vectors; got {', '.join(steered)}; undo the steering first")


def grouped(changes: Sequence[Change]) -> list[tuple[Change, list[int] | None]]:
    """The changes that one intervention makes, with their heads or neurons; None: all of the site.

    They keep their order: of two at one place the later one acts on the result of the earlier.
    """
    groups: dict[Change, list[int] | None] = {}
    for change in changes:
        key = change if change.part is None else replace(change, part=-1)
        numbers = groups.setdefault(key, None if change.part is None else [])
        if numbers is not None and change.part is not None:
            numbers.append(change.part)
    return list(groups.items())


def made(group: tuple[Change, list[int] | None], values: Mapping[str, Mapping[str, Tensor]]) -> Intervention:
    """The intervention. `values`, by `how` and site: outputs of the text ("mean") and of the second one, and steering vectors."""
    change, parts = group
    place = change.place
    head, unit = (None, parts) if place.endswith(".hidden") else (parts, None)
    if change.how == "zero":
        return zero(place, head=head, unit=unit)
    if change.how == "scale":
        return scale(place, change.by, head=head, unit=unit)
    value = values[change.how][place]
    if change.how == STEER:
        return add(place, change.by * value)
    if change.how == "mean":
        return mean(place, of=value, head=head, unit=unit)
    # Position by position, as far as the second text goes. A single token would broadcast to all positions.
    only = [0] if value.shape[-2] == 1 else None
    return patch(place, value, head=head, unit=unit, positions=only)
