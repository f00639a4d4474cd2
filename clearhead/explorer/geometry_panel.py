"""The geometry panel: `geometry` (angles between embeddings), `neighbours` and `pca`."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.costs.geometry import BINS, angle_density, embedding_angles, expected_coherence
from clearhead.errors import InputError
from clearhead.explorer.fields import Fields
from clearhead.explorer.forward_passes import ForwardPasses
from clearhead.explorer.wire_format import pack
from clearhead.inside.neighbours import embedding_table
from clearhead.inside.neighbours import neighbours as nearest
from clearhead.layers.embedding import TokenEmbedding
from clearhead.models import EncoderDecoder

MAX_ROWS = 2000  # of an embedding, for the angles


def _table(passes: ForwardPasses) -> Float[Tensor, "V D"]:
    if not isinstance(passes.model.tokens, TokenEmbedding):
        raise InputError("this model reads pictures and has no embedding of tokens; take a model of texts")
    return embedding_table(passes.model).detach().float()


def geometry(passes: ForwardPasses, fields: Fields) -> bytes:
    """The angles between embeddings, those of random directions, and the best that any set of vectors can reach."""
    found = embedding_angles(_table(passes).cpu(), MAX_ROWS)
    centres = (np.arange(BINS, dtype=np.float32) + 0.5) * 180 / BINS
    density = np.array(found.histogram, dtype=np.float32) / found.pairs / (180 / BINS)
    random = np.array([angle_density(found.n, float(degrees)) for degrees in centres], dtype=np.float32)

    def from_right_angle(cosine: float) -> float:
        return math.degrees(math.asin(min(cosine, 1.0)))

    expected = expected_coherence(found.n, found.count)
    cosines = {"least_deg": found.bound, "worst_deg": found.coherence, "random_deg": expected}
    bounds = {name: from_right_angle(cosine) for name, cosine in cosines.items()}
    words = (
        f"{found.count:,} tokens in {found.n} dimensions: the mean angle is {found.mean:.1f} degrees, and "
        f"{found.share_within(5):.0%} of all pairs are within 5 degrees of a right angle."
    )
    answer = {"n": found.count, "d": found.n, "mean": found.mean, "words": words, "bounds": bounds}
    return pack(answer, angles=centres, density=density, random=random)


def neighbours(passes: ForwardPasses, fields: Fields) -> bytes:
    """The k tokens whose embeddings have the largest cosine to a token's."""
    table = _table(passes)
    id = find_token(passes, fields.text("token"), len(table))
    near = nearest(table, [id], n=fields.integer("k", 1, 100, 12))
    listed = [{"token": passes.inputs.name(each), "id": each, "cosine": cosine} for each, cosine in near]
    return pack({"token": passes.inputs.name(id), "id": id, "near": listed})


def find_token(passes: ForwardPasses, token: str, n: int) -> int:
    """The id of a token, given its text, its spelling in the vocabulary, or its name on the page."""
    tokenizer = passes.inputs.tokenizer
    target = isinstance(passes.model, EncoderDecoder) and bool(passes.model.config.source_vocab_size)
    ids = tokenizer.encode(token, special=False, target=target)
    if len(ids) == 1 and ids[0] < n and ids[0] != tokenizer.unk:
        return ids[0]
    if (spelled := tokenizer.vocab.get(token)) is not None and spelled < n:
        return spelled
    named = next((id for id in sorted(tokenizer.vocab.values()) if id < n and passes.inputs.name(id) == token), None)
    if named is not None:
        return named
    pieces = ", ".join(repr(passes.inputs.name(id)) for id in ids[:8])
    raise InputError(f"{token!r:.40} is not one token but {len(ids)}: {pieces or 'none'}; take one of these")


def pca(passes: ForwardPasses, fields: Fields) -> bytes:
    """Up to `n` tokens along the first two principal components of their embeddings."""
    table = _table(passes).cpu()
    rows = torch.linspace(0, len(table) - 1, min(fields.integer("n", 2, 5000, 2000), len(table))).long().unique()
    x = table[rows] - table[rows].mean(0)
    values, vectors = torch.linalg.eigh(x.T @ x)
    explained = (values.flip(0)[:2] / values.sum().clamp(min=1e-30)).tolist()
    flat = x @ vectors.flip(1)[:, :2]
    return pack({"tokens": [passes.inputs.name(id) for id in rows.tolist()], "explained": explained}, xy=flat.numpy())
