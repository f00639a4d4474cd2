"""One vector for each text, for search and comparison.

If attention can take packed texts (on a CPU, and on a CUDA GPU in 16 bits), they are packed into one row, and nothing is
spent on padding. Else texts of about the same length are padded and computed together. In float32 a vector of
length 1 differs by less than 1e-6 from the one that its text has alone: products of many rows add up in an order that depends on
their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from clearhead.data import Tokenizer
from clearhead.errors import InputError
from clearhead.kernels.onednn import laid_out
from clearhead.layers.packing import packed
from clearhead.models import Encoder
from clearhead.models.encoder import Pooling
from clearhead.quantization.model_weights import example_weight
from clearhead.sampling.token_ids import pad

PoolingKind = Literal["model", "mean", "first"]
Follow = Callable[[list[list[int]], str, int], Iterable[list[int]]]  # iterates over a list and shows the progress

ON_GPU, ELSEWHERE = 2**16, 2**12  # tokens computed at once; a CPU's caches hold no more than the second

WORTH_A_LAYOUT = 2**12  # with so many tokens, copying weights to the layout of the CPU's products pays


def embed(
    model: Encoder,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    max_len: int | None = None,
    pool: PoolingKind = "model",
    truncate: bool = False,
    tokens: int = 0,
    follow: Follow = lambda parts, what, n: parts,
) -> Float[np.ndarray, "n D"]:
    """A row for each text. `pool`: the model's own pooling, or the mean or the first of the states, scaled to length 1.

    At most `tokens` are computed at once. A text of more than `max_len` tokens is an error, or is cut with `truncate`.
    """
    max_len = min(max_len or model.config.max_len, model.config.max_len)
    ids = read(tokenizer, texts, max_len, truncate=truncate)
    return embed_ids(model, ids, pool=pool, tokens=tokens, follow=follow)


@torch.no_grad()
def embed_ids(
    model: Encoder,
    ids: Sequence[list[int]],
    *,
    pool: PoolingKind = "model",
    tokens: int = 0,
    follow: Follow = lambda parts, what, n: parts,
) -> Float[np.ndarray, "n D"]:
    """`embed` for texts that are already ids: each has at least one, and at most the model's max_len."""
    is_packed = packs(model)
    on_gpu = is_packed and example_weight(model).is_cuda
    # Sorted by length, except for the GPU's kernel, which takes any order.
    order = list(range(len(ids))) if on_gpu else sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    parts = list(share(order, [len(row) for row in ids], tokens or (ON_GPU if on_gpu else ELSEWHERE)))
    run = run_packed if is_packed else run_padded
    pooling = model.pool if pool == "model" else Pooling(d_model=model.config.d_model, kind=pool, normed=True)
    vectors = np.zeros((len(ids), model.config.d_model), np.float32)
    found: list[tuple[list[int], Tensor]] = []
    with laid_out() if sum(map(len, ids)) >= WORTH_A_LAYOUT else nullcontext():
        for part in follow(parts, "embedding", len(parts)):
            found.append((part, run(model, [ids[i] for i in part], pooling)))
    for part, rows in found:  # copied last: until here the CPU never waits for a GPU
        vectors[part] = rows.float().cpu().numpy()
    return vectors


def packs(model: Encoder) -> bool:
    """Whether packing texts into one row pays. Token dropout counts over a row, so there it can not be done."""
    return model.config.dropped_token < 0 and model.packs(packed([1])[0], example_weight(model))


def read(tokenizer: Tokenizer, texts: Sequence[str], max_len: int, *, truncate: bool) -> list[list[int]]:
    """Each text's ids; InputError with the line number for a text with no ids, or too many."""
    rows = tokenizer.encode_all(texts, max_len=max_len if truncate else None, truncate="right" if truncate else None)
    for number, row in enumerate(rows, 1):
        if not row:
            raise InputError(
                f"line {number} holds no token; got {texts[number - 1]!r:.40}; remove it, or write something there"
            )
        if len(row) > max_len:
            raise InputError(
                f"line {number} has {len(row)} tokens, and the model takes {max_len}; shorten it, or cut such lines with --truncate"
            )
    return rows


def share(order: list[int], lengths: list[int], tokens: int) -> Iterator[list[int]]:
    """The indices in `order`, split into parts of at most so many tokens."""
    part: list[int] = []
    size = 0
    for i in order:
        if part and size + lengths[i] > tokens:
            yield part
            part, size = [], 0
        part.append(i)
        size += lengths[i]
    if part:
        yield part


def run_packed(model: Encoder, rows: list[list[int]], pool: Pooling) -> Float[Tensor, "B D"]:
    lengths = [len(row) for row in rows]
    device = example_weight(model).device
    mask, positions = packed(lengths, device)
    flat: NDArray[np.int64] = np.fromiter(chain.from_iterable(rows), np.int64, sum(lengths))
    states = model.states(torch.from_numpy(flat)[None].to(device, non_blocking=True), mask, positions=positions)
    assert mask.spans is not None
    return pool.packed(states[0], mask.spans.starts)


def run_padded(model: Encoder, rows: list[list[int]], pool: Pooling) -> Float[Tensor, "B D"]:
    device = example_weight(model).device
    tokens, real = pad(rows)
    mask = torch.from_numpy(real).to(device)
    states = model.states(torch.from_numpy(tokens).to(device), None if real.all() else mask)
    return pool(states, mask)
