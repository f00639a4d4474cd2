"""Causes of one logit: `attribution`, the logit as a sum over heads and layers; `patches`, the states of another text that bring
its answer over."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import InputError
from clearhead.explorer.changes import check_unsteered
from clearhead.explorer.fields import Fields
from clearhead.explorer.forward_passes import ForwardPass, ForwardPasses, Steps
from clearhead.explorer.geometry_panel import find_token
from clearhead.explorer.output_panel import answer_position, labels_of, name_of
from clearhead.explorer.wire_format import pack
from clearhead.inside.attribution import logit_attribution
from clearhead.inside.patching import PLACES, patch_grid
from clearhead.models import Decoder

MAX_TOKENS = 512  # of an attribution: it has the logits of all positions in memory
MAX_PATCHED = 64  # each position is a run of its own


def attribution(passes: ForwardPasses, fields: Fields) -> Steps[bytes]:
    """The logit of a token or class at the answer's position as a sum; with `against`, its difference to another's logit."""
    run = passes.parse(fields)
    if passes.model.config.head == "none":
        raise InputError("this model ends in states (head='none') and has no logit; take a model with a head")
    check_unsteered(run.changes, "the sum of a logit's parts")
    forward = yield from passes.steps(run)
    if len(forward.strip.ids) > MAX_TOKENS:
        raise InputError(
            f"an attribution takes up to {MAX_TOKENS} tokens; got {len(forward.strip.ids)}; shorten the text"
        )
    chosen = chosen_token(passes, forward, fields, "token")
    against = _named(passes, fields, "against")
    inputs: tuple[Tensor, ...] = (forward.source.tensor,)
    if forward.target_ids:
        inputs = (*inputs, torch.tensor([forward.target_ids], device=inputs[0].device))
    shape = (1,) if passes.has_classes else (1, len(forward.strip.ids))
    ids = [None if id is None else torch.full(shape, id, device=inputs[0].device) for id in (chosen, against)]
    with passes.changed(run):
        found = logit_attribution(passes.model, *inputs, tokens=ids[0], against=ids[1], mask=forward.source.real)
    at = (0,) if passes.has_classes else (0, answer_position(passes, forward))
    parts = [{**_part(name), "value": float(values[at])} for name, values in found.parts.items()]
    answer = {"parts": parts, "total": float(found.total[at]), "logit": float(found.logit[at]), "at": at[-1]}
    names = {"token": name_of(passes, chosen), "against": None if against is None else name_of(passes, against)}
    return pack({**answer, **names})


def _part(name: str) -> dict[str, Any]:
    """A part's name in pieces: the page puts heads of a layer in a row."""
    found = re.search(r"blocks\.(\d+)\.(attention|cross|feedforward)(?:\.(\d+|bias))?$", name)
    if found is None:
        return {"name": name, "site": None, "layer": None, "head": None}
    layer, kind, head = found.groups()
    site = name if kind == "feedforward" else name.rpartition(".")[0]
    return {"name": name, "site": site, "layer": int(layer), "head": int(head) if head and head != "bias" else None}


def chosen_token(passes: ForwardPasses, forward: ForwardPass, fields: Fields, name: str) -> int:
    """The token or class that a request names; else the model's most likely one."""
    named = _named(passes, fields, name)
    if named is not None:
        return named
    model = passes.model
    if passes.has_classes:
        return int(model.head(model.pooled(forward.states, forward.source.real))[0].argmax())  # pyright: ignore
    at = answer_position(passes, forward)
    return int(model.project(forward.states[:, at : at + 1])[0, 0].argmax())


def _named(passes: ForwardPasses, fields: Fields, name: str) -> int | None:
    if not fields.has(name):
        return None
    if passes.has_classes:
        return labels_of(passes).index(fields.choice(name, labels_of(passes)))
    return find_token(passes, fields.text(name), passes.model.config.vocab_size)


def patches(passes: ForwardPasses, fields: Fields) -> Steps[bytes]:
    """One layer of `patch_grid`: each position of the text with what the layer computed there in the `other` text."""
    run = passes.parse(fields)
    model = passes.model
    if not isinstance(model, Decoder):
        raise InputError(
            f"patching compares what a decoder writes next; got shape={model.config.shape!r}; take another"
        )
    layer = fields.integer("layer", 0, model.config.n_layers - 1)
    place = fields.choice("place", list(PLACES), "residual")
    ours, theirs = passes.inputs.read(run.text), passes.inputs.read(fields.text("other"))
    names = [passes.inputs.name(id) for id in theirs.strip.ids]
    if len(ours.strip.ids) != len(theirs.strip.ids):
        raise InputError(
            f"both texts need as many tokens; the text has {len(ours.strip.ids)}, the other {len(names)}: "
            f"{' | '.join(names)[:200]}; change words for others of as many tokens"
        )
    if len(names) > MAX_PATCHED:
        raise InputError(f"patching takes up to {MAX_PATCHED} tokens; got {len(names)}; shorten both texts")
    forward = yield from passes.steps(run)
    second = yield from passes.steps(run.with_text(fields.text("other")))
    token = chosen_token(passes, second, fields, "token")
    against = chosen_token(passes, forward, fields, "against")
    if token == against:
        raise InputError(
            f"both texts end in the same prediction, {name_of(passes, token)!r}; name two tokens to compare, or change the "
            f"other text"
        )
    with passes.changed(run):
        grid = patch_grid(
            model, ours.tensor, theirs.tensor, token=token, against=against, place=place, layers=range(layer, layer + 1)
        )
    answer = {
        "text": grid.text,
        "other": grid.other,
        "token": name_of(passes, token),
        "against": name_of(passes, against),
    }
    return pack({**answer, "names": names}, share=grid.share.cpu().numpy())
