"""What a model knows before it reads: `positions`, and its embedding's `geometry`, `neighbours` and `pca`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.costs.geometry import BINS, angle_density, embedding_angles, expected_coherence
from clearhead.errors import InputError
from clearhead.explorer.asking import Params
from clearhead.explorer.runs import Runs
from clearhead.inside.pages import pack
from clearhead.inside.readings import neighbours as nearest
from clearhead.layers.embedding import TokenEmbedding
from clearhead.layers.linear import Packed
from clearhead.layers.positions import Alibi, DistanceBias, Learned, Positions, RelativeBuckets, Rotary, Sinusoidal
from clearhead.models import EncoderDecoder

SPREAD = 2000  # rows of an embedding that angles are taken of

WORDS = {
    "sinusoidal": "waves of growing length are added to the embeddings; near places have near vectors",
    "learned": "one trained vector a place is added to the embeddings",
    "rotary": "queries and keys are turned by an angle that grows with the place, so that only the distance matters",
    "alibi": "each head loses a fixed amount of score for each step of distance",
    "t5": "each head has a trained bias for each bucket of distance; buckets widen with the distance",
    "none": "this model is told nothing of places",
}


def positions(runs: Runs, params: Params) -> bytes:
    """Each kind of position over the first places, the model's own with its own numbers."""
    length, config = params.whole("length", 2, 512, 64), runs.model.config
    model = runs.model
    own = model.decoder.positions if isinstance(model, EncoderDecoder) else model.positions
    d_pair = config.d_head + config.d_head % 2
    generator = torch.Generator().manual_seed(0)
    learned, buckets = Learned(d_model=config.d_model, max_len=length), RelativeBuckets(n_heads=config.n_heads)
    for weight in (learned.weight, buckets.weight):  # as they are before training
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
    made: dict[str, Positions] = {
        "sinusoidal": Sinusoidal(d_model=config.d_model + config.d_model % 2),
        "learned": learned,
        "rotary": Rotary(d_head=d_pair),
        "alibi": Alibi(n_heads=config.n_heads),
        "t5": buckets,
        config.positions: own,
    }
    kinds: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for name, kind in made.items():
        is_model = name == config.positions
        trained = "" if is_model or name not in ("learned", "t5") else "; this model has none, so these are untrained"
        kinds.append({"name": name, "is_model": is_model, "words": WORDS[name] + trained})
        for part, values in _drawn(kind, length).items():
            arrays[f"{name}.{part}"] = values.float().cpu().numpy()
    return pack({"kinds": kinds, "length": length}, **arrays)


def _drawn(kind: Positions, length: int) -> dict[str, Tensor]:
    """The numbers of each place, how alike each two places are, and the same by distance: 1 is a place with itself."""
    n = length if kind.max_len is None else min(length, kind.max_len)
    at = torch.arange(n)
    if isinstance(kind, DistanceBias):
        # By how much less a key is looked at for its distance, the mean over heads.
        distance = at[None, None, :] - at[None, :, None]
        bias = kind.dense(distance.to(_device(kind))).float().cpu()
        alike = (bias - bias[:, :, :1, :1]).exp()[0].mean(0)
        return {"similarity": alike, "bydistance": alike[:, 0]}
    if isinstance(kind, Rotary):
        turns = at[:, None].float() * kind.frequencies(torch.device("cpu"))
        table = turns.cos()
        alike = (turns[:, None] - turns[None]).cos().mean(-1)
    elif isinstance(kind, Sinusoidal | Learned):
        table = kind.table(at) if isinstance(kind, Sinusoidal) else kind.weight[:n].detach().float().cpu()
        unit = F.normalize(table.float(), dim=-1)
        alike = unit @ unit.T
    else:
        return {"similarity": torch.ones(n, n), "bydistance": torch.ones(n)}
    by = torch.stack([alike.diagonal(-d).mean() for d in range(n)])
    return {"table": table, "similarity": alike, "bydistance": by}


def _device(kind: Positions) -> torch.device:
    return next((weight.device for weight in kind.parameters()), torch.device("cpu"))


# The embedding.


def table_of(runs: Runs) -> Float[Tensor, "V D"]:
    tokens = runs.model.tokens
    if not isinstance(tokens, TokenEmbedding):
        raise InputError("this model reads pictures and has no embedding of tokens; take a model of texts")
    weight: Any = tokens.weight
    rows = weight.rows(torch.arange(weight.shape[0], device=weight.device)) if isinstance(weight, Packed) else weight
    return rows.detach().float()


def geometry(runs: Runs, params: Params) -> bytes:
    """The angles between tokens beside those of random directions, and what no set of vectors can do better."""
    found = embedding_angles(table_of(runs).cpu(), SPREAD)
    centres = (np.arange(BINS, dtype=np.float32) + 0.5) * 180 / BINS
    density = np.array(found.histogram, dtype=np.float32) / found.pairs / (180 / BINS)
    random = np.array([angle_density(found.n, float(degrees)) for degrees in centres], dtype=np.float32)

    def off(cosine: float) -> float:
        return math.degrees(math.asin(min(cosine, 1.0)))

    expected = expected_coherence(found.n, found.count)
    bounds = {"least_deg": off(found.bound), "worst_deg": off(found.coherence), "random_deg": off(expected)}
    words = (
        f"{found.count:,} tokens in {found.n} dimensions: the mean angle is {found.mean:.1f} degrees, and "
        f"{found.share_within(5):.0%} of all pairs are within 5 degrees of a right angle."
    )
    told = {"n": found.count, "d": found.n, "mean": found.mean, "words": words, "bounds": bounds}
    return pack(told, angles=centres, density=density, random=random)


def neighbours(runs: Runs, params: Params) -> bytes:
    """The tokens whose vectors point the same way."""
    table = table_of(runs)
    id = _find(runs, params.text("token"), len(table))
    near = nearest(table, [id], n=params.whole("k", 1, 100, 12))
    told = [{"token": runs.inputs.name(each), "id": each, "cosine": cosine} for each, cosine in near]
    return pack({"token": runs.inputs.name(id), "id": id, "near": told})


def _find(runs: Runs, token: str, n: int) -> int:
    """A token by its text, or as the vocabulary spells it."""
    tokenizer = runs.inputs.tokenizer
    target = isinstance(runs.model, EncoderDecoder) and bool(runs.model.config.source_vocab_size)
    ids = tokenizer.encode(token, special=False, target=target)
    if len(ids) == 1 and ids[0] < n and ids[0] != tokenizer.unk:
        return ids[0]
    if (spelled := tokenizer.vocab.get(token)) is not None and spelled < n:
        return spelled
    named = next((id for id in sorted(tokenizer.vocab.values()) if id < n and runs.inputs.name(id) == token), None)
    if named is not None:
        return named
    pieces = ", ".join(repr(runs.inputs.name(id)) for id in ids[:8])
    raise InputError(f"{token!r:.40} is not one token but {len(ids)}: {pieces or 'none'}; take one of these")


def pca(runs: Runs, params: Params) -> bytes:
    """Tokens along the two directions in which they differ most."""
    table = table_of(runs).cpu()
    rows = torch.linspace(0, len(table) - 1, min(params.whole("n", 2, 5000, 2000), len(table))).long().unique()
    x = table[rows] - table[rows].mean(0)
    values, vectors = torch.linalg.eigh(x.T @ x)
    explained = (values.flip(0)[:2] / values.sum().clamp(min=1e-30)).tolist()
    flat = x @ vectors.flip(1)[:, :2]
    return pack({"tokens": [runs.inputs.name(id) for id in rows.tolist()], "explained": explained}, xy=flat.numpy())
