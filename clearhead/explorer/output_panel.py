"""What is above every panel, `read`: the tokens, and the model's output."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.explorer.fields import Fields
from clearhead.explorer.forward_passes import Begun, ForwardPass, ForwardPasses, Run, Steps
from clearhead.explorer.wire_format import pack
from clearhead.inside.sites import blocks_of
from clearhead.models import Encoder, EncoderDecoder

TOP = 20


def read(passes: ForwardPasses, fields: Fields) -> Steps[bytes]:
    """The tokens, and the model's output with and without the run's changes.

    With `within` (milliseconds), a pass that takes longer is left for the next request, and only the tokens are answered: in
    between, others see what the first layers have computed.
    """
    run = passes.parse(fields)
    end = time.monotonic() + fields.integer("within", 0, 60_000) / 1000 if fields.has("within") else math.inf
    for each in (run.plain, run) if run.changes else (run,):
        for _ in passes.steps(each):
            if time.monotonic() >= end and each in passes.begun:
                return _unfinished(passes, each)
            yield
    forward = passes.run(run)
    answer = {
        "answer": output_of(passes, forward),
        "plain": output_of(passes, passes.run(run.plain)) if run.changes else None,
        "moved": _moved(passes, forward) if run.changes and passes.model.config.head == "none" else None,
        "note": _length_note(passes, run),
    }
    tokens, arrays = _given(passes, forward)
    return pack({**tokens, **answer}, **arrays)


def _unfinished(passes: ForwardPasses, run: Run) -> bytes:
    begun, done = passes.progress(run)
    tokens, arrays = _given(passes, begun)
    return pack({**tokens, "layers": {"done": done, "of": len(blocks_of(passes.model))}}, **arrays)


def _given(passes: ForwardPasses, begun: Begun) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The tokens, and the picture or the sound."""
    source, arrays = begun.source, dict[str, np.ndarray]()
    if source.picture is not None:
        arrays["picture"] = source.picture
    if source.spectrogram is not None:
        arrays["spectrogram"] = source.spectrogram
    tokens = {
        "source": source.strip.to_json(),
        "target": None if begun.target is None else begun.target.to_json(),
        "target_text": _target_text(passes, begun),
        "truncated": False,
    }
    return tokens, arrays


def _moved(passes: ForwardPasses, forward: ForwardPass) -> dict[str, Any]:
    """How far the run's changes turned the states of a model without a head: cosines with the states before them."""
    before, after = passes.run(forward.run.plain).states[0].cpu().double(), forward.states[0].cpu().double()
    if before.shape != after.shape:  # a translator that was left to generate wrote another text
        return {"mean": None, "tokens": []}
    mean = F.cosine_similarity(before.mean(0), after.mean(0), dim=0)
    return {"mean": float(mean), "tokens": F.cosine_similarity(before, after).tolist()}


def _length_note(passes: ForwardPasses, run: Run) -> str | None:
    """What is not patched, if the second text has another length than the first."""
    if run.second is None or not any(change.how == "patch" for change in run.changes):
        return None
    n, m = (len(passes.run(each).source.strip.ids) for each in (run.plain, replace(run.plain, text=run.second)))
    if m >= n:
        return None if m == n else f"The second text has {m} tokens, the first {n}: positions are patched one to one."
    return f"The second text has {m} tokens, the first {n}: only the first {m} are patched."


def _target_text(passes: ForwardPasses, forward: Begun) -> str | None:
    if forward.target is None:
        return None
    known = set(passes.inputs.tokenizer.vocab.values())
    return passes.inputs.tokenizer.decode([id for id in forward.target_ids[forward.n_prompt :] if id in known])


def output_of(passes: ForwardPasses, forward: ForwardPass) -> dict[str, Any]:
    """The most likely tokens at the answer's position, or classes of the whole input."""
    model, config = passes.model, passes.model.config
    if config.head == "none":
        words = f"{len(forward.strip.ids)} vectors of {config.d_model} numbers: this model has no head that predicts."
        return {"kind": "states", "top": [], "words": words}
    if passes.has_classes:
        assert isinstance(model, Encoder)
        assert model.head is not None
        scores = model.head(model.pooled(forward.states, forward.source.real))[0].float()
        if config.problem == "single_label":
            scores = scores.softmax(-1)
        elif config.problem == "multi_label":  # each class by itself
            scores = scores.sigmoid()
        return {"kind": "classes", "top": top_of(passes, scores, TOP)}  # of a regression numbers, no probabilities
    at = answer_position(passes, forward)
    logits = model.project(forward.states[:, at : at + 1])[0, 0].float()
    top = {"top": top_of(passes, logits.softmax(-1), TOP)}
    if isinstance(model, EncoderDecoder):
        return {"kind": "translation", "text": _target_text(passes, forward), **top}
    if not isinstance(model, Encoder):
        return {"kind": "next", "at": at, **top}
    return {"kind": "mask" if forward.strip.ids[at] == passes.inputs.tokenizer.mask else "token", "at": at, **top}


def answer_position(passes: ForwardPasses, forward: ForwardPass) -> int:
    """The position whose distribution is shown: the first mask token, else the last token that is not special nor padding."""
    ids = forward.strip.ids
    if not isinstance(passes.model, Encoder):
        real = forward.source.real
        return len(ids) - 1 if real is None or forward.target_ids else int(real[0].nonzero()[-1])
    mask = passes.inputs.tokenizer.mask
    if mask in ids:
        return ids.index(mask)
    plain = [at for at in range(len(ids)) if at not in forward.strip.special]
    return plain[-1] if plain else len(ids) - 1


def labels_of(passes: ForwardPasses) -> list[str]:
    config = passes.model.config
    return list(config.labels) or [str(i) for i in range(config.n_classes)]


def name_of(passes: ForwardPasses, id: int) -> str:
    """The name of a token, or of a class if the model has classes."""
    return labels_of(passes)[id] if passes.has_classes else passes.inputs.name(id)


def top_of(passes: ForwardPasses, probs: Float[Tensor, " V"], k: int) -> list[dict[str, Any]]:
    """The k most likely tokens or classes."""
    best = probs.topk(min(k, len(probs)))
    kind = "label" if passes.has_classes else "token"
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{kind: name_of(passes, id), "id": id, "p": p} for id, p in pairs]
