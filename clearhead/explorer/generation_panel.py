"""The generation panel: `step`, the next token and what each filter removes; `beam`, a beam search as a tree."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.engine.request import Request
from clearhead.errors import InputError
from clearhead.explorer.fields import Fields
from clearhead.explorer.forward_passes import ForwardPasses
from clearhead.explorer.model_inputs import MAX_TOKENS, check_length
from clearhead.explorer.wire_format import pack
from clearhead.generation.decoding import run_requests
from clearhead.generation.traces import make_trace
from clearhead.inside.evaluation_mode import eval_mode
from clearhead.models import Decoder, EncoderDecoder
from clearhead.sampling.logits_processors import LogitsProcessor
from clearhead.sampling.strategy import Strategy, keep_min_p, keep_top_k, keep_top_p, sample

SHOWN = 40
OPTIONS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def step(passes: ForwardPasses, fields: Fields) -> bytes:
    """The next token: the model's probabilities, those left after each filter, and the token that is sampled."""
    model, run = _generating_model(passes), passes.parse(fields)
    source = passes.inputs.read(run.text)
    new = fields.integers("ids", 0, model.config.vocab_size - 1, MAX_TOKENS, ())
    options: dict[str, Any] = {name: fields.number(name, usual) for name, usual in OPTIONS.items()}
    strategy = Strategy.of({**options, "top_k": fields.integer("top_k", 0, 2**31, 0)})
    seed = fields.integer("seed", -(2**53), 2**53, 0)
    prompt = passes.inputs.prompt(source) if isinstance(model, EncoderDecoder) else source.strip.ids
    history = [*prompt, *new]
    check_length(history, passes.inputs.target_limit)
    with passes.changed(run):
        if isinstance(model, Decoder):
            read = torch.tensor([history], device=passes.inputs.device)
            with eval_mode(model):
                states = model.states(read)
        else:
            states = passes.states(source, history)
    logits = model.project(states[:, -1:])[:, 0].float()
    counts = (torch.tensor([n], device=logits.device) for n in (len(prompt), len(new), MAX_TOKENS + 1))
    shaped = LogitsProcessor(model, None, strategy)(logits, torch.tensor([history], device=logits.device), *counts)
    final, removed = filter_steps(shaped, strategy)
    seeds, steps = (torch.tensor([n], device=logits.device) for n in (seed, len(new)))
    drawn = int(final.argmax()) if strategy.temperature == 0 else int(sample(final, seeds, steps))
    raw, left = logits[0].softmax(-1), final[0].softmax(-1)
    top = [
        {
            "id": id,
            "token": passes.inputs.name(id),
            "p_raw": float(raw[id]),
            "p_final": float(left[id]),
            "removed_by": removed.get(id),
        }
        for id in raw.topk(min(SHOWN, len(raw))).indices.tolist()
    ]
    answer = {"top": top, "drawn": drawn, "drawn_token": passes.inputs.name(drawn), "kept": int((left > 0).sum())}
    return pack({**answer, "text": _text(passes, new), "is_end": drawn in model.generation.eos})


def filter_steps(logits: Float[Tensor, "1 V"], strategy: Strategy) -> tuple[Float[Tensor, "1 V"], dict[int, str]]:
    """The filtered logits, and for each likely token that was removed, the filter that did it; as `Strategy.choose` filters."""
    if strategy.temperature == 0:
        only = torch.full_like(logits, -math.inf)
        only[0, logits[0].argmax()] = 0.0
        return only, {}
    logits = logits / strategy.temperature
    likely = logits[0].topk(min(4 * SHOWN, logits.shape[1])).indices.tolist()
    filters: dict[str, tuple[bool, Any]] = {
        "top_k": (strategy.top_k > 0, lambda x: keep_top_k(x, strategy.top_k)),
        "top_p": (strategy.top_p < 1, lambda x: keep_top_p(x, strategy.top_p)),
        "min_p": (strategy.min_p > 0, lambda x: keep_min_p(x, strategy.min_p)),
    }
    removed: dict[int, str] = {}
    for name, (is_on, keep) in filters.items():
        if is_on:
            kept = keep(logits)
            removed |= {id: name for id in likely if kept[0, id] == -math.inf and logits[0, id] > -math.inf}
            logits = kept
    return logits, removed


def beam(passes: ForwardPasses, fields: Fields) -> bytes:
    """A beam search as a tree: which branches were kept, finished or dropped at each step, and why."""
    model, run = _generating_model(passes), passes.parse(fields)
    source = passes.inputs.read(run.text)
    beams, most = fields.integer("beams", 2, 8, 3), fields.integer("most", 1, 64, 16)
    penalty = fields.number("length_penalty", 1.0)
    if abs(penalty) > 10:
        raise InputError(f"length_penalty is a number from -10 to 10; got {penalty}; 1 is the mean, 0 the sum")
    ids = source.strip.ids
    given: dict[str, Any] = dict(beams=beams, n_best=beams, max_new_tokens=most, length_penalty=penalty, trace=True)
    is_pair = isinstance(model, EncoderDecoder)
    request = Request(source=ids, **given) if is_pair else Request(prompt=ids, **given)
    with passes.changed(run):
        ticket = run_requests(model, [request], 4096, "text")[0]
    if ticket.error is not None:
        raise ticket.error
    trace = make_trace(ticket, model, passes.inputs.tokenizer, text=run.text)
    steps: list[dict[str, Any]] = []
    for traced in trace["steps"]:
        fates: dict[str, list[dict[str, Any]]] = {"kept": [], "dropped": [], "finished": []}
        for candidate in traced["candidates"]:
            kept = ("id", "token", "parent", "score", "why", "wins", "beam", "normalised")
            fates[candidate["fate"]].append({name: candidate[name] for name in kept if name in candidate})
        alive = sorted(fates["kept"], key=lambda one: one["beam"])
        steps.append({"alive": alive, "died": fates["dropped"], "done": fates["finished"]})
    result = [{"text": one["text"], "score": one["score"]} for one in trace["finished"] if one["rank"] is not None]
    source_names = [passes.inputs.name(id) for id in ids]
    return pack({"steps": steps, "result": result, "source": source_names, "stopped": trace["stopped"]})


def _generating_model(passes: ForwardPasses) -> Decoder | EncoderDecoder:
    model = passes.model
    if not isinstance(model, Decoder | EncoderDecoder) or model.config.inputs != "tokens":
        kind = f"shape={model.config.shape!r}, inputs={model.config.inputs!r}"
        raise InputError(f"this model ({kind}) writes no text here; take a decoder, or a translator")
    return model


def _text(passes: ForwardPasses, ids: list[int]) -> str:
    known = set(passes.inputs.tokenizer.vocab.values())
    return passes.inputs.tokenizer.decode(id for id in ids if id in known)
