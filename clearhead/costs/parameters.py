"""The number of parameters of a config, and their bytes, by part, without building the model (and without torch)."""

from __future__ import annotations

import fnmatch

from clearhead.config import Config
from clearhead.limits import QUANTIZATIONS


def count_parameters(config: Config) -> dict[str, int]:
    """Parameters by part: embedding, attention, feedforward, norm, head. Their sum is the model's."""
    c = config
    encoder, decoder = _layers(c)
    layers = encoder + decoder
    crosses = decoder if c.shape == "encoder-decoder" else 0
    return {
        "embedding": _embedding(c),
        "attention": _attentions(c),
        "feedforward": layers * _feedforward(c),
        "norm": _norms(c, layers, crosses),
        "head": _head(c),
    }


def count_matrices(config: Config) -> dict[str, int]:
    """Parameters of matrices and convolutions only, by part. A tied head counts, though its matrix is the embedding's."""
    c = config
    encoder, decoder = _layers(c)
    layers = encoder + decoder
    entry = {"tokens": 0, "patches": c.n_channels * c.patch_size**2, "frames": 3 * (c.n_mels + c.d_model)}[c.inputs]
    head = {"tokens": c.vocab_size, "classes": c.n_classes, "none": 0}[c.head]
    dense = c.head_transform if c.head == "tokens" else c.pooler and c.head == "classes"
    return {
        "embedding": entry * c.d_model,
        "attention": 2 * c.d_model * c.d_head * sum(sum(heads_at(c, place)) for place in c.attentions),
        "feedforward": layers * (3 if c.gated else 2) * c.d_model * c.d_ff,
        "head": (head + (c.d_model if dense else 0)) * c.d_model,
    }


def count_weight_bytes(config: Config, size: int, quantize: str | None = None) -> dict[str, int]:
    """Bytes of parameters and of a fixed bias at `size` bytes each, or with matrices quantized as in quantization/integer.py.

    int8: one byte for each number, and a float16 scale for each 64 of a row: 8.25 bits. int4: half a byte, and two float16 for
    each 32: 5 bits. Embedding and head are always int8, and so are rows whose length 32 does not divide.
    """
    c = config
    total = {part: n * size for part, n in count_parameters(c).items()}
    # Marian's fixed bias is held, but is no parameter: it is not trained.
    total["head"] += size * c.vocab_size if c.head == "tokens" and c.head_bias == "fixed" else 0
    if quantize is None:
        return total
    bits, _ = QUANTIZATIONS[quantize]
    encoder, decoder = _layers(c)
    layers, into = encoder + decoder, 2 if c.gated else 1
    tables = {"tokens": c.vocab_size + c.source_vocab_size, "patches": 0, "frames": c.vocab_size}[c.inputs]
    own_head = c.head == "tokens" and not c.tie_embeddings
    matrices = [  # part, how many, rows, numbers in a row, bits
        ("embedding", 1, tables, c.d_model, 8),
        ("feedforward", layers, into * c.d_ff, c.d_model, bits),
        ("feedforward", layers, c.d_model, c.d_ff, bits),
        ("head", int(own_head), c.vocab_size, c.d_model, 8),
    ]
    for heads, kv_heads in (heads_at(c, place) for place in c.attentions):
        matrices.append(("attention", 1, (heads + 2 * kv_heads) * c.d_head, c.d_model, bits))
        matrices.append(("attention", 1, c.d_model, heads * c.d_head, bits))
    for part, count, rows, width, here in matrices:
        narrow = here == 4 and width % 32 == 0
        row = width // 2 + 4 * (width // 32) if narrow else width + 2 * -(-width // 64)
        total[part] += count * rows * (row - width * size)
    return total


def _layers(c: Config) -> tuple[int, int]:
    match c.shape:
        case "encoder":
            return c.n_layers, 0
        case "decoder":
            return 0, c.n_layers
        case _:
            return c.n_layers, c.n_decoder_layers


def _embedding(c: Config) -> int:
    total = c.n_segments * c.d_model + c.source_vocab_size * c.d_model
    match c.inputs:
        case "tokens":
            total += c.vocab_size * c.d_model
        case "patches":
            total += (c.n_channels * c.patch_size**2 + 1) * c.d_model + c.d_model  # projection, class token
        case _:
            total += c.vocab_size * c.d_model + (3 * c.n_mels + 1) * c.d_model + (3 * c.d_model + 1) * c.d_model
    stacks = 2 if c.shape == "encoder-decoder" else 1
    if c.positions == "learned":
        total += (c.max_len + (c.max_source_len if stacks == 2 else 0)) * c.d_model
    if c.positions == "t5":
        total += stacks * c.t5_buckets * c.n_heads
    return total


def heads_at(c: Config, place: str) -> tuple[int, int]:
    """Heads and key/value heads of an attention after pruning. A key/value head goes when all heads of its group are pruned."""
    heads = len(c.kept_heads(place)) if c.pruned_heads else c.n_heads
    return heads, heads * c.n_kv_heads // c.n_heads


def count_heads(c: Config, pattern: str) -> tuple[int, int]:
    """The sums of heads and of key/value heads over all attentions whose names match, such as "decoder.*.cross"."""
    both = [heads_at(c, place) for place in fnmatch.filter(c.attentions, pattern)]
    return sum(heads for heads, _ in both), sum(kv_heads for _, kv_heads in both)


def _attentions(c: Config) -> int:
    """q, k, v and output projections of all attentions."""
    heads, kv_heads = count_heads(c, "*")
    biases = {"q": heads * c.d_head, "k": kv_heads * c.d_head, "v": kv_heads * c.d_head}
    biases["o"] = len(c.attentions) * c.d_model
    return 2 * c.d_model * (heads + kv_heads) * c.d_head + sum(biases[letter] for letter in c.attention_bias)


def _feedforward(c: Config) -> int:
    into = 2 if c.gated else 1
    return (into + 1) * c.d_model * c.d_ff + ((into * c.d_ff + c.d_model) if c.bias else 0)


def _norm(c: Config) -> int:
    return {"layer": c.d_model * (2 if c.bias else 1), "rms": c.d_model, "none": 0}[c.norm]


def _norms(c: Config, layers: int, crosses: int) -> int:
    stacks = 2 if c.shape == "encoder-decoder" else 1
    ends = stacks * (int(c.norm_first) + int(c.embedding_norm))
    heads = 2 * c.d_head * (layers + crosses) if c.qk_norm else 0
    return (2 * layers + crosses + ends) * _norm(c) + heads


def _head(c: Config) -> int:
    total = (c.d_model + 1) * c.d_model if c.pooler and c.shape == "encoder" else 0
    if c.head == "classes":
        total += (c.d_model + 1) * c.n_classes
    if c.head == "tokens":
        total += 0 if c.tie_embeddings else c.vocab_size * c.d_model
        total += c.vocab_size if c.head_bias == "learned" else 0
        total += (c.d_model + 1) * c.d_model + _norm(c) if c.head_transform else 0
    return total
