"""The floating-point operations of a model, by part, in closed form (and without torch).

A multiply and an add count 2, so a product of (m, k) and (k, n) matrices is 2 m k n. Only matrix products and convolutions
count; the rest (softmax, norms, activations, embedding lookup) takes a few operations per number and counts 0. With T tokens
in a row, width D, feed-forward width F and heads of total width D, a layer takes in the forward pass

    projections    2 T (4 D^2)          q, k, v and the output; grouped-query heads shrink k and v
    attention      2 (2 T^2 D)          q k^T and weights v: the only part that grows with T^2
    feedforward    2 T (2 D F)          3 D F if it is gated

so for F = 4 D attention costs as much as all the rest of a layer from T = 6 D on.

Attention is counted in two ways. *All* pairs is what operators count, torch's FlopCounterMode included: the plain equation
computes T x S scores and then masks. *Allowed* pairs is the useful work: the causal half, the band of a window, what a sparse
pattern keeps; a kernel that skips masked pairs comes near it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from clearhead.config import Config
from clearhead.costs.parameters import count_heads, count_matrices
from clearhead.errors import ConfigError
from clearhead.sparsity import Pattern

Pairs = Literal["all", "allowed"]


@dataclass(frozen=True)
class Lengths:
    """The lengths of one call: `target` tokens are computed in each row, after `past` in the cache; `source` is the encoder's."""

    target: int
    source: int = 0
    past: int = 0


def check_lengths(config: Config, length: int | None, source_length: int | None) -> Lengths:
    """The given lengths, or the longest of the config. For sound the source length counts positions after the convolutions."""
    if config.inputs == "patches" and length not in (None, config.max_len):
        raise ConfigError(
            f"a picture of {config.n_patches} patches and a class token has length {config.max_len}; got length={length}; "
            f"leave it out, or change image_size"
        )
    if source_length is not None and config.shape != "encoder-decoder":
        raise ConfigError(
            f"source_length={source_length} is for encoder-decoders; got shape={config.shape!r}; use length alone"
        )
    source = config.max_source_len if source_length is None else source_length
    lengths = Lengths(config.max_len if length is None else length, source if config.shape == "encoder-decoder" else 0)
    if lengths.target < 1 or source < 1:
        raise ConfigError(f"lengths must be at least 1; got length={length}, source_length={source_length}; raise them")
    return lengths


def count_forward(config: Config, batch: int, at: Lengths, *, pairs: Pairs = "all") -> dict[str, int]:
    """FLOPs of one forward pass, by part. With `past` it is a decode step: the source is already encoded."""
    total = {"embedding": 0, "projections": 0, "attention": 0, "feedforward": 0, "head": 0}
    for (_, _, part), n in count_steps(config, batch, at, pairs=pairs).items():
        total[part] += n
    return total


def count_steps(config: Config, batch: int, at: Lengths, *, pairs: Pairs = "all") -> dict[tuple[str, str, str], int]:
    """FLOPs of one forward pass by stack ("encoder" or "decoder"), step of a block ("cross" is cross-attention) and part."""
    c, T, S = config, at.target, at.source
    encoded = S if at.past == 0 else 0
    count = partial(count_pairs, window=c.window, patterns=c.patterns, pairs=pairs)
    own = count(T, at.past + T, causal=c.shape != "encoder")
    first, last = ("encoder", "decoder") if c.shape == "encoder-decoder" else (c.shape, c.shape)
    attentions = [(last, "attention", "blocks.*", T, T, own)]  # names, queries, keys, pairs
    tokens = [(last, c.n_layers * T)]  # of all feed-forwards
    if c.shape == "encoder-decoder":
        both = count(S, S, causal=False) if encoded else 0
        attentions = [(first, "attention", "encoder.*", encoded, encoded, both)]
        attentions.append((last, "attention", "decoder.*.attention", T, T, own))
        attentions.append((last, "cross", "decoder.*.cross", T, encoded, T * S))
        tokens = [(first, c.n_layers * encoded), (last, c.n_decoder_layers * T)]
    found = {(first, "embedding", "embedding"): 2 * batch * sum(_convolutions(c, encoded))}
    for stack, step, pattern, queries, keys, n_pairs in attentions:
        heads, kv_heads = count_heads(c, pattern)
        projected = queries * heads + keys * kv_heads
        found[stack, step, "projections"] = 2 * batch * c.d_model * projected * 2 * c.d_head
        found[stack, step, "attention"] = 2 * batch * n_pairs * heads * 2 * c.d_head
    for stack, n in tokens:
        found[stack, "feedforward", "feedforward"] = 2 * batch * n * c.d_model * c.d_ff * (3 if c.gated else 2)
    found[last, "head", "head"] = 2 * batch * count_matrices(c)["head"] * (1 if c.head == "classes" else T)
    return found


def count_training(
    config: Config, batch: int, at: Lengths, *, pairs: Pairs = "all", checkpointing: bool = False
) -> dict[str, int]:
    """FLOPs of a forward and a backward pass, by part.

    In the backward pass each product is computed twice, for the gradients of its two operands; pictures and sound need no
    gradient. With checkpointing the blocks are computed once more, without the last product of a block if nothing after it is
    kept for the backward pass (pre-norm, no dropout).
    """
    forward = count_forward(config, batch, at, pairs=pairs)
    total = {part: 3 * n for part, n in forward.items()}
    total["embedding"] -= 2 * batch * _convolutions(config, at.source)[0]
    if checkpointing:
        for part in ("projections", "attention", "feedforward"):
            total[part] += forward[part]
        if (config.norm_first or config.norm == "none") and config.dropout == 0:
            total["feedforward"] -= forward["feedforward"] // (3 if config.gated else 2)
    return total


def count_pairs(
    T: int, S: int, *, causal: bool, window: int = 0, patterns: tuple[Pattern, ...] = (), pairs: Pairs = "allowed"
) -> int:
    """The number of (query, key) pairs, all or allowed: of T = S tokens at once, or of one token (T = 1) after S - 1."""
    if patterns and pairs == "allowed":
        (pattern,) = patterns
        return pattern.count_pairs(T, S, causal=causal)
    width = min(window, S) if window else S
    if T == 1:
        return width if causal else S
    assert T == S, "several tokens after a cache are not counted"
    if pairs == "all":
        return T * S
    behind = width * T - width * (width - 1) // 2  # a token attends to itself and at most width - 1 before it
    if causal:
        return behind
    return 2 * behind - T if window else T * T


def _convolutions(c: Config, source: int) -> tuple[int, int]:
    """Multiply-adds of the first and second convolution over pictures or sound."""
    if c.inputs == "patches":
        return c.n_patches * c.d_model * c.n_channels * c.patch_size**2, 0
    if c.inputs == "frames":  # the second one halves the number of frames
        return 2 * source * c.d_model * 3 * c.n_mels, source * c.d_model * 3 * c.d_model
    return 0, 0
