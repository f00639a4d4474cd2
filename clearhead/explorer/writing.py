"""How a model writes: `step`, one token with what each filter takes away, and `beam`, a search with why each branch died."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.engine.request import Request
from clearhead.errors import InputError
from clearhead.explorer.asking import Params
from clearhead.explorer.inputs import LONGEST, check_length
from clearhead.explorer.runs import Runs
from clearhead.generation.decoding import write
from clearhead.generation.traces import make_trace
from clearhead.inside.heads import still
from clearhead.inside.pages import pack
from clearhead.models import Decoder, EncoderDecoder
from clearhead.sampling.strategy import Shaper, Strategy, keep_min_p, keep_top_k, keep_top_p, sample

SHOWN = 40
OPTIONS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def step(runs: Runs, params: Params) -> bytes:
    """The next token: the model's own probabilities, what is left of them after each filter, and the one that is drawn."""
    model = _writer(runs)
    source = runs.inputs.read(params.text("text"))
    new = params.wholes("ids", 0, model.config.vocab_size - 1, LONGEST, ())
    options: dict[str, Any] = {name: params.number(name, usual) for name, usual in OPTIONS.items()}
    strategy = Strategy.of({**options, "top_k": params.whole("top_k", 0, 2**31, 0)})
    seed = params.whole("seed", -(2**53), 2**53, 0)
    prompt = runs.inputs.prompt(source) if isinstance(model, EncoderDecoder) else source.strip.ids
    history = [*prompt, *new]
    check_length(history, runs.inputs.target_limit)
    if isinstance(model, Decoder):
        read = torch.tensor([history], device=runs.inputs.device)
        with still(model):
            states = model.states(read)
    else:
        states = runs.states(source, history)
    logits = model.project(states[:, -1:])[:, 0].float()
    counts = (torch.tensor([n], device=logits.device) for n in (len(prompt), len(new), LONGEST + 1))
    shaped = Shaper(model, None, strategy)(logits, torch.tensor([history], device=logits.device), *counts)
    final, removed = filter_steps(shaped, strategy)
    seeds, steps = (torch.tensor([n], device=logits.device) for n in (seed, len(new)))
    drawn = int(final.argmax()) if strategy.temperature == 0 else int(sample(final, seeds, steps))
    raw, left = logits[0].softmax(-1), final[0].softmax(-1)
    top = [
        {
            "id": id,
            "token": runs.inputs.name(id),
            "p_raw": float(raw[id]),
            "p_final": float(left[id]),
            "removed_by": removed.get(id),
        }
        for id in raw.topk(min(SHOWN, len(raw))).indices.tolist()
    ]
    told = {"top": top, "drawn": drawn, "drawn_token": runs.inputs.name(drawn), "kept": int((left > 0).sum())}
    return pack({**told, "text": _text(runs, new), "is_end": drawn in model.generation.eos})


def filter_steps(logits: Float[Tensor, "1 V"], strategy: Strategy) -> tuple[Float[Tensor, "1 V"], dict[int, str]]:
    """The logits that a token is drawn from, and of those that were likely which filter took them; as `Strategy.choose` does."""
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


def beam(runs: Runs, params: Params) -> bytes:
    """A beam search as a tree: which branches went on, ended or died at each step, and why."""
    model = _writer(runs)
    text = params.text("text")
    source = runs.inputs.read(text)
    beams, most = params.whole("beams", 2, 8, 3), params.whole("most", 1, 64, 16)
    penalty = params.number("length_penalty", 1.0)
    if abs(penalty) > 10:
        raise InputError(f"length_penalty is a number from -10 to 10; got {penalty}; 1 is the mean, 0 the sum")
    ids = source.strip.ids
    given: dict[str, Any] = dict(beams=beams, n_best=beams, max_new_tokens=most, length_penalty=penalty, trace=True)
    is_pair = isinstance(model, EncoderDecoder)
    request = Request(source=ids, **given) if is_pair else Request(prompt=ids, **given)
    ticket = write(model, [request], 4096, "text")[0]
    if ticket.error is not None:
        raise ticket.error
    trace = make_trace(ticket, model, runs.inputs.tokenizer, text=text)
    steps: list[dict[str, Any]] = []
    for told in trace["steps"]:
        fates: dict[str, list[dict[str, Any]]] = {"kept": [], "dropped": [], "finished": []}
        for candidate in told["candidates"]:
            fields = ("id", "token", "parent", "score", "why", "wins", "beam", "normalised")
            fates[candidate["fate"]].append({name: candidate[name] for name in fields if name in candidate})
        alive = sorted(fates["kept"], key=lambda one: one["beam"])
        steps.append({"alive": alive, "died": fates["dropped"], "done": fates["finished"]})
    result = [{"text": one["text"], "score": one["score"]} for one in trace["finished"] if one["rank"] is not None]
    source_names = [runs.inputs.name(id) for id in ids]
    return pack({"steps": steps, "result": result, "source": source_names, "stopped": trace["stopped"]})


def _writer(runs: Runs) -> Decoder | EncoderDecoder:
    model = runs.model
    if not isinstance(model, Decoder | EncoderDecoder) or model.config.inputs != "tokens":
        kind = f"shape={model.config.shape!r}, inputs={model.config.inputs!r}"
        raise InputError(f"this model ({kind}) writes no text here; take a decoder, or a translator")
    return model


def _text(runs: Runs, ids: list[int]) -> str:
    known = set(runs.inputs.tokenizer.vocab.values())
    return runs.inputs.tokenizer.decode(id for id in ids if id in known)
