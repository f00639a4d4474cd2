"""The logit lens panel: `lens` (all layers and positions) and `cell` (one of them)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.explorer.fields import Fields
from clearhead.explorer.forward_passes import ForwardPass, ForwardPasses, Steps
from clearhead.explorer.output_panel import name_of, top_of
from clearhead.explorer.wire_format import pack
from clearhead.models import Encoder, EncoderDecoder

MAX_COLUMNS = 256  # positions in one answer
MAX_LOGITS = 2**24  # in memory at once


def lens(passes: ForwardPasses, fields: Fields) -> Steps[bytes]:
    """The likeliest token after each layer at each position, its probability, and the rank of the actual next token."""
    forward = yield from _forward_pass(passes, fields)
    total = 1 if passes.has_classes else len(forward.strip.ids)
    first = fields.integer("first", 0, total - 1, 0)
    n = fields.integer("n", 1, MAX_COLUMNS, min(total - first, MAX_COLUMNS))
    columns = slice(first, min(first + n, total))
    layers = forward.residuals
    following = _following(passes, forward, columns)
    tokens: list[list[str]] = []
    probs, ranks = list[Tensor](), list[Tensor]()
    for states in layers:
        yield
        ids, p, rank = zip(*_likeliest(passes, forward, states, columns, following), strict=True)
        tokens.append([name_of(passes, id) for id in torch.cat(ids).tolist()])
        probs.append(torch.cat(p))
        ranks.append(torch.cat(rank))
    answer = {
        "layers": len(layers),
        "T": columns.stop - first,
        "first": first,
        "total": total,
        "tokens": tokens,
        "of": [name_of(passes, id) for id in following.tolist()],
    }
    return pack(answer, p=torch.stack(probs).cpu().numpy(), rank=torch.stack(ranks).int().cpu().numpy())


def cell(passes: ForwardPasses, fields: Fields) -> Steps[bytes]:
    """The k likeliest tokens after one layer at one position."""
    forward = yield from _forward_pass(passes, fields)
    layers = forward.residuals
    layer = fields.integer("layer", 0, len(layers) - 1)
    position = fields.integer("position", 0, 0 if passes.has_classes else len(forward.strip.ids) - 1)
    columns = slice(position, position + 1)
    following = _following(passes, forward, columns)
    logits = next(_logits(passes, forward, layers[layer], columns))[1][0]
    rank = int((logits > logits[following[0]]).sum()) + 1
    top = top_of(passes, logits.softmax(-1), fields.integer("k", 1, 100, 10))
    return pack({"top": top, "rank": rank, "of": name_of(passes, int(following[0]))})


def _forward_pass(passes: ForwardPasses, fields: Fields) -> Steps[ForwardPass]:
    if passes.model.config.head == "none":
        raise InputError("this model ends in states (head='none'), which say no word; a lens needs a model with a head")
    return (yield from passes.steps(passes.parse(fields)))


def _following(passes: ForwardPasses, forward: ForwardPass, columns: slice) -> Tensor:
    """The token after each position. At the end, and in an encoder, where there is none: the model's own prediction."""
    ids = forward.strip.ids
    known = [] if isinstance(passes.model, Encoder) else ids[columns.start + 1 : columns.stop + 1]
    given = torch.tensor(known, device=forward.states.device, dtype=torch.int64)
    rest = slice(columns.start + len(known), columns.stop)
    if rest.start == rest.stop:
        return given
    return torch.cat(
        [given, *(logits.argmax(-1) for _, logits in _logits(passes, forward, forward.residuals[-1], rest))]
    )


def _logits(
    passes: ForwardPasses, forward: ForwardPass, states: Tensor, columns: slice
) -> Iterator[tuple[slice, Float[Tensor, "n V"]]]:
    """The head applied to the residual stream at these positions, in parts; with each part's place among the columns."""
    model = passes.model
    stack = model.decoder if isinstance(model, EncoderDecoder) else model
    if passes.has_classes:
        assert isinstance(model, Encoder)
        assert model.head is not None
        yield slice(0, 1), model.head(model.pooled(stack.norm(states), forward.source.real)).float()
        return
    step = max(MAX_LOGITS // model.config.vocab_size, 1)
    for start in range(columns.start, columns.stop, step):
        end = min(start + step, columns.stop)
        logits = model.project(stack.norm(states[:, start:end]))[0].float()
        yield slice(start - columns.start, end - columns.start), logits


def _likeliest(
    passes: ForwardPasses, forward: ForwardPass, states: Tensor, columns: slice, following: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each position: the likeliest token, its probability, and the rank of the following token."""
    for part, logits in _logits(passes, forward, states, columns):
        best = logits.max(-1)
        p = (best.values - logits.logsumexp(-1)).exp()
        rank = (logits > logits.gather(1, following[part, None])).sum(-1) + 1
        yield best.indices, p, rank
