"""What a model says, and what each layer would already say: `read`, `lens`, `cell` and `sweep`."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.explorer.asking import Params
from clearhead.explorer.runs import Pass, Run, Runs
from clearhead.inside.pages import pack
from clearhead.inside.sweeps import sweep as sweep_heads
from clearhead.models import Encoder, EncoderDecoder

TOP = 20
COLUMNS = 256  # positions of a lens at once
LOGITS = 2**24  # held at once
SWEPT = 1024  # tokens, of a sweep
SCORED = 128  # of them, those whose loss is measured


def read(runs: Runs, params: Params) -> bytes:
    """The tokens, and the model's answer with and without the changes."""
    run = runs.read(params)
    made = runs.make(run)
    source = made.source
    arrays: dict[str, np.ndarray] = {}
    if source.picture is not None:
        arrays["picture"] = source.picture
    if source.spectrogram is not None:
        arrays["spectrogram"] = source.spectrogram
    told = {
        "source": source.strip.told(),
        "target": None if made.target is None else made.target.told(),
        "target_text": _target_text(runs, made),
        "truncated": False,
        "answer": answer(runs, made),
        "plain": answer(runs, runs.make(run.plain)) if run.changes else None,
        "note": _note(runs, run),
    }
    return pack(told, **arrays)


def _note(runs: Runs, run: Run) -> str | None:
    """What a patch leaves as it is."""
    if run.second is None:
        return None
    n, m = (len(runs.make(each).source.strip.ids) for each in (run.plain, replace(run.plain, text=run.second)))
    if m >= n:
        return None if m == n else f"The second text has {m} tokens, the first {n}: places are patched one to one."
    return f"The second text has {m} tokens, the first {n}: only the first {m} are patched."


def _target_text(runs: Runs, made: Pass) -> str | None:
    known = set(runs.inputs.tokenizer.vocab.values()) if made.target is not None else set[int]()
    ids = [id for id in made.target_ids[made.n_prompt :] if id in known]
    return runs.inputs.tokenizer.decode(ids) if made.target is not None else None


def answer(runs: Runs, made: Pass) -> dict[str, Any]:
    """What the model says at the end of its input, or of the whole input."""
    model, config = runs.model, runs.model.config
    if config.head == "none":
        words = f"{len(made.strip.ids)} vectors of {config.d_model} numbers: this model has no head that answers"
        return {"kind": "states", "top": [], "text": words}
    if runs.has_classes:
        assert isinstance(model, Encoder)
        assert model.head is not None
        scores = model.head(model.pooled(made.states, made.source.real))[0].float()
        if len(scores) == 1:  # no choice but a measure
            return {"kind": "classes", "top": [{"label": labels_of(runs)[0], "id": 0, "p": float(scores[0])}]}
        return {"kind": "classes", "top": top_of(runs, scores.softmax(-1), TOP)}
    at = answer_place(runs, made)
    told = {"top": top_of(runs, model.project(made.states[:, at : at + 1])[0, 0].float().softmax(-1), TOP)}
    if isinstance(model, EncoderDecoder):
        return {"kind": "translation", "text": _target_text(runs, made), **told}
    return {"kind": "mask" if isinstance(model, Encoder) else "next", "at": at, **told}


def answer_place(runs: Runs, made: Pass) -> int:
    """The place whose distribution is the answer: the first mask, else the last token that is neither special nor padding."""
    ids = made.strip.ids
    if not isinstance(runs.model, Encoder):
        real = made.source.real
        return len(ids) - 1 if real is None or made.target_ids else int(real[0].nonzero()[-1])
    mask = runs.inputs.tokenizer.mask
    if mask in ids:
        return ids.index(mask)
    plain = [at for at in range(len(ids)) if at not in made.strip.special]
    return plain[-1] if plain else len(ids) - 1


def labels_of(runs: Runs) -> list[str]:
    config = runs.model.config
    return list(config.labels) or [str(i) for i in range(config.n_classes)]


def name_of(runs: Runs, id: int) -> str:
    """A token, or a class where the model has classes."""
    return labels_of(runs)[id] if runs.has_classes else runs.inputs.name(id)


def top_of(runs: Runs, probs: Float[Tensor, " V"], k: int) -> list[dict[str, Any]]:
    best = probs.topk(min(k, len(probs)))
    word = "label" if runs.has_classes else "token"
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{word: name_of(runs, id), "id": id, "p": p} for id, p in pairs]


# The lens.


def lens(runs: Runs, params: Params) -> Generator[None, None, bytes]:
    """Each layer's likeliest token at each position, with its probability and the rank of the token that came."""
    made = _lens_pass(runs, params)
    total = 1 if runs.has_classes else len(made.strip.ids)
    first = params.whole("first", 0, total - 1, 0)
    n = params.whole("n", 1, COLUMNS, min(total - first, COLUMNS))
    columns = slice(first, min(first + n, total))
    layers = made.residuals
    wanted = _wanted(runs, made, columns)
    tokens: list[list[str]] = []
    probs, ranks = list[Tensor](), list[Tensor]()
    for states in layers:
        yield
        ids, p, rank = zip(*_likeliest(runs, made, states, columns, wanted), strict=True)
        tokens.append([name_of(runs, id) for id in torch.cat(ids).tolist()])
        probs.append(torch.cat(p))
        ranks.append(torch.cat(rank))
    told: dict[str, Any] = {
        "layers": len(layers),
        "T": columns.stop - first,
        "first": first,
        "total": total,
        "tokens": tokens,
    }
    told["of"] = [name_of(runs, id) for id in wanted.tolist()]
    return pack(told, p=torch.stack(probs).cpu().numpy(), rank=torch.stack(ranks).int().cpu().numpy())


def cell(runs: Runs, params: Params) -> bytes:
    """One cell of the lens: what the layer would say there."""
    made = _lens_pass(runs, params)
    layers = made.residuals
    layer = params.whole("layer", 0, len(layers) - 1)
    at = params.whole("position", 0, 0 if runs.has_classes else len(made.strip.ids) - 1)
    columns = slice(at, at + 1)
    wanted = _wanted(runs, made, columns)
    logits = next(_logits(runs, made, layers[layer], columns))[1][0]
    rank = int((logits > logits[wanted[0]]).sum()) + 1
    top = top_of(runs, logits.softmax(-1), params.whole("k", 1, 100, 10))
    return pack({"top": top, "rank": rank, "of": name_of(runs, int(wanted[0]))})


def _lens_pass(runs: Runs, params: Params) -> Pass:
    if runs.model.config.head == "none":
        raise InputError("this model ends in states (head='none'), which say no word; a lens needs a model with a head")
    return runs.make(runs.read(params))


def _wanted(runs: Runs, made: Pass, columns: slice) -> Tensor:
    """The token that came after each position; where none did, or no order is written in, the model's own choice."""
    ids = made.strip.ids
    came = [] if isinstance(runs.model, Encoder) else ids[columns.start + 1 : columns.stop + 1]
    given = torch.tensor(came, device=made.states.device, dtype=torch.int64)
    first, rest = columns.start + len(came), slice(columns.start + len(came), columns.stop)
    if first == columns.stop:
        return given
    return torch.cat([given, *(logits.argmax(-1) for _, logits in _logits(runs, made, made.residuals[-1], rest))])


def _logits(runs: Runs, made: Pass, states: Tensor, columns: slice) -> Iterator[tuple[slice, Float[Tensor, "n V"]]]:
    """The head over these positions of a stream, some at a time; and which of the columns they are."""
    model = runs.model
    stack = model.decoder if isinstance(model, EncoderDecoder) else model
    if runs.has_classes:
        assert isinstance(model, Encoder)
        assert model.head is not None
        yield slice(0, 1), model.head(model.pooled(stack.norm(states), made.source.real)).float()
        return
    step = max(LOGITS // model.config.vocab_size, 1)
    for start in range(columns.start, columns.stop, step):
        end = min(start + step, columns.stop)
        said = model.project(stack.norm(states[:, start:end]))[0].float()
        yield slice(start - columns.start, end - columns.start), said


def _likeliest(
    runs: Runs, made: Pass, states: Tensor, columns: slice, wanted: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for some, logits in _logits(runs, made, states, columns):
        best = logits.max(-1)
        p = (best.values - logits.logsumexp(-1)).exp()
        rank = (logits > logits.gather(1, wanted[some, None])).sum(-1) + 1
        yield best.indices, p, rank


# Without each head.


def sweep(runs: Runs, params: Params) -> bytes:
    """What the text would cost without each head of the model, the run's changes made."""
    model = runs.model
    if model.config.head == "none":
        raise InputError(
            "this model ends in states (head='none'), so that nothing tells what a head is worth; take another"
        )
    run = runs.read(params)
    made = runs.make(run)
    if len(made.strip.ids) > SWEPT or len(made.source.strip.ids) > 2 * SWEPT:
        raise InputError(f"a sweep takes up to {SWEPT} tokens; got {len(made.strip.ids)}; shorten the text")
    pattern = "*"
    if params.has("attention"):
        sites = runs.group(params.text("attention"))
        pattern = sites[params.whole("layer", 0, len(sites) - 1)]
    elif params.has("layer"):
        deepest = max(map(len, runs.groups().values())) - 1
        pattern = f"*blocks.{params.whole('layer', 0, deepest)}.*"
    inputs: tuple[Tensor, ...] = (made.source.tensor,)
    if made.target_ids:
        inputs = (*inputs, torch.tensor([made.target_ids], device=inputs[0].device))
    targets, measure = _targets(runs, made)
    with runs.changed(run):
        found = sweep_heads(model, *inputs, targets=targets, sites=pattern, mask=made.source.real)
    effects = [
        {"site": each.place, "head": each.head, "d_loss": each.delta["loss"], "d_logit": each.delta["logit"]}
        for each in found.effects
    ]
    return pack({"effects": effects, "measure": measure, "base": dict(found.base)})


def _targets(runs: Runs, made: Pass) -> tuple[Tensor, str]:
    """What the model should say, and how that is told."""
    device = made.states.device
    if runs.has_classes:
        assert isinstance(runs.model, Encoder)
        assert runs.model.head is not None
        chosen = runs.model.head(runs.model.pooled(made.states, made.source.real)).argmax(-1)
        return chosen, f"change in the loss of the class it chose, {name_of(runs, int(chosen[0]))!r}, in nats"
    ids = made.strip.ids
    targets = torch.full((1, len(ids)), -100, device=device)
    if isinstance(runs.model, Encoder):
        at = answer_place(runs, made)
        targets[0, at] = runs.model.project(made.states[:, at : at + 1])[0, 0].argmax()
        return targets, f"change in the loss of its answer at place {at}, in nats"
    targets[0, :-1] = torch.tensor(ids[1:], device=device, dtype=torch.int64)
    targets[0, : max(made.n_prompt - 1, 0)] = -100
    if made.n_prompt >= len(ids) or len(ids) == 1:  # nothing was written: what it would write first
        targets[0, -1] = runs.model.project(made.states[:, -1:])[0, 0].argmax()
        return targets, "change in the loss of the token it would write, in nats"
    if made.source.real is not None and not made.target_ids:
        targets[~made.source.real] = -100
    counted = (targets[0] != -100).nonzero()[:, 0]
    if len(counted) > SCORED:  # a vocabulary's product for each of them and each head
        targets[0, counted[:-SCORED]] = -100
        return targets, f"mean change in the loss of the last {SCORED} tokens, in nats"
    return targets, "mean change in the loss of each token after those before it, in nats"
