"""`patch_grid`: which states of another text, put into a text, bring over its answer (activation patching, Wang et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import InputError, did_you_mean
from clearhead.inside.evaluation_mode import eval_mode
from clearhead.inside.interventions import intervene, patch
from clearhead.inside.probe import probe
from clearhead.models import Decoder

PLACES = {"residual": "residual", "attention": "attention.out", "feedforward": "feedforward.hidden"}
ROWS = 4096  # tokens of one call, all rows together


@dataclass(frozen=True)
class PatchGrid:
    """logit(token) - logit(against) at the text's end: in both texts, and after each patch."""

    patched: Float[Tensor, "n T"]  # by layer and position
    text: float
    other: float

    @property
    def share(self) -> Float[Tensor, "n T"]:
        """How much of the other text's difference a patch brings over: 0 none, 1 all of it."""
        return (self.patched - self.text) / (self.other - self.text)


@torch.no_grad()
def patch_grid(
    model: Decoder,
    tokens: Int[Tensor, "B T"],
    other: Int[Tensor, "_ S"],
    *,
    token: int,
    against: int,
    place: str = "residual",
    layers: range | None = None,
) -> PatchGrid:
    """Run `tokens`, one row, each time with what one layer computed at one position in `other`; `place` is one of PLACES.

    Both texts have the same length, so that a position means the same in both. By default, all layers.
    """
    _check(model, tokens, other, token, against, place)
    T, layers = tokens.shape[1], layers or range(len(model.blocks))
    names = {layer: f"blocks.{layer}.{PLACES[place]}" for layer in layers}
    with eval_mode(model), probe(model, *names.values()) as seen:
        theirs = _difference(model, other, token, against)[0]
    ours = _difference(model, tokens, token, against)[0]
    rows = max(ROWS // T, 1)
    found: list[Tensor] = []
    for name in names.values():
        parts: list[Tensor] = []
        for only in torch.eye(T, dtype=torch.bool, device=tokens.device).split(rows):  # one position a row
            with intervene(model, patch(name, seen[name], positions=only)):
                parts.append(_difference(model, tokens.expand(len(only), T), token, against))
        found.append(torch.cat(parts))
    return PatchGrid(torch.stack(found), float(ours), float(theirs))


def _difference(model: Decoder, tokens: Tensor, token: int, against: int) -> Float[Tensor, " B"]:
    with eval_mode(model):
        logits = model.project(model.states(tokens)[:, -1:])[:, 0].float()
    return logits[:, token] - logits[:, against]


def _check(model: object, tokens: Tensor, other: Tensor, token: int, against: int, place: str) -> None:
    if not isinstance(model, Decoder):
        raise InputError(
            f"patch_grid takes a decoder; got {type(model).__name__}; `patch` in `intervene` takes any model"
        )
    if place not in PLACES:
        raise InputError(f"there is no place={place!r:.40}; {did_you_mean(place, PLACES)}")
    if tokens.shape != other.shape or len(tokens) != 1:
        raise InputError(
            f"both texts are one row of as many tokens; got {tuple(tokens.shape)} and {tuple(other.shape)}; "
            f"change words for others of as many tokens"
        )
    top = model.config.vocab_size - 1
    if not (0 <= token <= top and 0 <= against <= top) or token == against:
        raise InputError(f"token and against are two ids from 0 to {top}; got {token} and {against}; take two others")
