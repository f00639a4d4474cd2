"""Neurons of a feed-forward layer, `neurons`: where in the text they are largest, and which tokens they make likelier."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.explorer.fields import Fields
from clearhead.explorer.forward_passes import ForwardPasses, Steps
from clearhead.explorer.output_panel import answer_position, name_of
from clearhead.explorer.wire_format import pack
from clearhead.inside.attribution import is_linear
from clearhead.inside.logit_lens import head_stack
from clearhead.inside.probe import probe
from clearhead.inside.sites import blocks_of
from clearhead.quantization.model_weights import example_weight

SHOWN = 12  # neurons
TOKENS = 4  # of the text, and of the vocabulary


def neurons(passes: ForwardPasses, fields: Fields) -> Steps[bytes]:
    """The neurons of one layer with the largest values (of either sign) at the answer's position.

    For each its value there, the tokens of the text with its largest values, and the tokens whose logits it raises most there:
    what it writes, through the final norm and the head. No layer in between is counted.
    """
    blocks = blocks_of(passes.model)
    name = fields.choice("block", list(blocks))
    run = passes.parse(fields)
    forward = yield from passes.steps(run)
    with passes.changed(run), probe(passes.model, f"{name}.feedforward.hidden") as seen:
        passes.states(forward.source, forward.target_ids)
    hidden = seen[f"{name}.feedforward.hidden"][0].float()
    in_encoder = name.startswith("encoder.")
    strip = forward.source.strip if in_encoder else forward.strip
    at = len(strip.ids) - 1 if in_encoder or passes.has_classes else answer_position(passes, forward)
    largest = hidden[at].abs().topk(min(SHOWN, hidden.shape[1])).indices
    raised = None if in_encoder else _raised(passes, blocks[name].feedforward.down, hidden[at], largest)
    found: list[dict[str, Any]] = []
    for i, number in enumerate(largest.tolist()):
        values = hidden[:, number]
        # Where it is as it is here: large with this sign.
        best = (values * values[at].sign()).topk(min(TOKENS, len(values))).indices.tolist()
        strongest = [{"token": strip.tokens[t], "at": t, "value": float(values[t])} for t in best]
        named = [] if raised is None else [name_of(passes, id) for id in raised[i].topk(TOKENS).indices.tolist()]
        found.append({"neuron": number, "value": float(values[at]), "strongest": strongest, "raises": named})
    return pack({"neurons": found, "at": at, "token": strip.tokens[at], "of": hidden.shape[1]})


def _raised(
    passes: ForwardPasses, down: nn.Module, values: Float[Tensor, " F"], chosen: Tensor
) -> Float[Tensor, "k V"] | None:
    """By how much each neuron raises the logits, up to one factor for each; None where logits are no sum of what layers write."""
    model, dtype = passes.model, example_weight(passes.model).dtype
    if model.config.head != "tokens" or not is_linear(model.config):
        return None
    one_hot = torch.zeros(len(chosen) + 1, len(values), device=values.device)
    one_hot[torch.arange(len(chosen)), chosen] = values[chosen]
    written = down(one_hot.to(dtype))
    written = written[:-1] - written[-1]  # without the bias
    norm = head_stack(model)[0].norm
    states = torch.cat([norm(written), norm(torch.zeros_like(written[:1]))])
    logits = model.project(states[None])[0].float()
    return logits[:-1] - logits[-1]
