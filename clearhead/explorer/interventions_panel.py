"""The interventions panel: `sweep`, the loss without each head. Changes themselves are part of a run."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.errors import InputError
from clearhead.explorer.attribution_panel import chosen_token
from clearhead.explorer.changes import check_unsteered
from clearhead.explorer.fields import Fields
from clearhead.explorer.forward_passes import ForwardPass, ForwardPasses, Steps
from clearhead.explorer.output_panel import answer_position, name_of
from clearhead.explorer.wire_format import pack
from clearhead.inside.ablation_sweep import sweep as sweep_heads
from clearhead.models import Encoder

MAX_TOKENS = 1024  # of a text
MAX_TARGETS = 128  # tokens whose loss is measured


def sweep(passes: ForwardPasses, fields: Fields) -> Steps[bytes]:
    """The change in the text's loss without each head of an attention, a layer or the model, with the run's changes made."""
    model = passes.model
    if model.config.head == "none":
        raise InputError(
            "this model ends in states (head='none'), so that nothing tells what a head is worth; take another"
        )
    run = passes.parse(fields)
    check_unsteered(run.changes, "a sweep")
    forward = yield from passes.steps(run)
    if len(forward.strip.ids) > MAX_TOKENS or len(forward.source.strip.ids) > 2 * MAX_TOKENS:
        raise InputError(f"a sweep takes up to {MAX_TOKENS} tokens; got {len(forward.strip.ids)}; shorten the text")
    inputs: tuple[Tensor, ...] = (forward.source.tensor,)
    if forward.target_ids:
        inputs = (*inputs, torch.tensor([forward.target_ids], device=inputs[0].device))
    targets, measure = _chosen_target(passes, forward, fields) or _targets(passes, forward)
    with passes.changed(run):
        found = sweep_heads(model, *inputs, targets=targets, sites=_pattern(passes, fields), mask=forward.source.real)
    effects = [
        {"site": each.place, "head": each.head, "d_loss": each.delta["loss"], "d_logit": each.delta["logit"]}
        for each in found.effects
    ]
    return pack({"effects": effects, "measure": measure, "base": dict(found.base)})


def _pattern(passes: ForwardPasses, fields: Fields) -> str:
    """The attentions that a request names: one, all of a layer, or all."""
    if fields.has("attention"):
        sites = passes.group(fields.text("attention"))
        return sites[fields.integer("layer", 0, len(sites) - 1)]
    if fields.has("layer"):
        deepest = max(map(len, passes.groups().values())) - 1
        return f"*blocks.{fields.integer('layer', 0, deepest)}.*"
    return "*"


def _chosen_target(passes: ForwardPasses, forward: ForwardPass, fields: Fields) -> tuple[Tensor, str] | None:
    """The token or class that the request names, at the answer's position."""
    if not fields.has("token"):
        return None
    chosen = chosen_token(passes, forward, fields, "token")
    words = f"change in the loss of {name_of(passes, chosen)!r}, in nats"
    if passes.has_classes:
        return torch.tensor([chosen], device=forward.states.device), words
    targets = torch.full((1, len(forward.strip.ids)), -100, device=forward.states.device)
    targets[0, answer_position(passes, forward)] = chosen
    return targets, words


def _targets(passes: ForwardPasses, forward: ForwardPass) -> tuple[Tensor, str]:
    """The targets of the loss, and a sentence that says what is measured."""
    model, device = passes.model, forward.states.device
    if passes.has_classes:
        assert isinstance(model, Encoder)
        assert model.head is not None
        chosen = model.head(model.pooled(forward.states, forward.source.real)).argmax(-1)
        return chosen, f"change in the loss of the class it chose, {name_of(passes, int(chosen[0]))!r}, in nats"
    ids = forward.strip.ids
    targets = torch.full((1, len(ids)), -100, device=device)
    if isinstance(model, Encoder):
        at = answer_position(passes, forward)
        targets[0, at] = model.project(forward.states[:, at : at + 1])[0, 0].argmax()
        return targets, f"change in the loss of its answer at place {at}, in nats"
    targets[0, :-1] = torch.tensor(ids[1:], device=device, dtype=torch.int64)
    targets[0, : max(forward.n_prompt - 1, 0)] = -100
    if forward.n_prompt >= len(ids) or len(ids) == 1:  # no generated text: the token that would come first
        targets[0, -1] = model.project(forward.states[:, -1:])[0, 0].argmax()
        return targets, "change in the loss of the token it would write, in nats"
    if forward.source.real is not None and not forward.target_ids:
        targets[~forward.source.real] = -100
    counted = (targets[0] != -100).nonzero()[:, 0]
    if len(counted) > MAX_TARGETS:  # each costs a product with the vocabulary, for each head
        targets[0, counted[:-MAX_TARGETS]] = -100
        return targets, f"mean change in the loss of the last {MAX_TARGETS} tokens, in nats"
    return targets, "mean change in the loss of each token after those before it, in nats"
