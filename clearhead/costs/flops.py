"""How many floating-point operations a model does, part by part, in closed form (and without torch).

A multiply and an add count 2, so a product of (m, k) and (k, n) matrices is 2 m k n. Only matrix products and convolutions
count; the rest (softmax, norms, activations, looking up an embedding) is a few operations a number and counts 0. With
T tokens a row, width D, feed-forward width F and heads of total width D, a layer of a forward pass does

    projections    2 T (4 D^2)          q, k, v and the output; grouped-query heads shrink k and v
    attention      2 (2 T^2 D)          q k^T and weights v: the only part that grows with T^2
    feedforward    2 T (2 D F)          3 D F where it is gated

so for F = 4 D attention costs as much as all the rest of a layer from T = 6 D on.

Attention can be counted in two ways. Over *all* pairs it is what operators count, torch's FlopCounterMode included: the
explicit equation multiplies T x S scores and then masks. Over *allowed* pairs it is the useful work: the causal half, the
band of a window; a kernel that skips what a mask forbids comes near it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clearhead.config import Config
from clearhead.costs.parameters import count_heads, count_matrices
from clearhead.errors import ConfigError

Pairs = Literal["all", "allowed"]


@dataclass(frozen=True)
class Lengths:
    """What one call sees: `target` tokens of each row are computed, after `past` that a cache holds; `source` is read."""

    target: int
    source: int = 0
    past: int = 0


def check_lengths(config: Config, length: int | None, source_length: int | None) -> Lengths:
    """The lengths asked for, or those the config is made for. Sound's source length is what its convolutions leave."""
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
    asked = Lengths(config.max_len if length is None else length, source if config.shape == "encoder-decoder" else 0)
    if asked.target < 1 or source < 1:
        raise ConfigError(f"lengths must be at least 1; got length={length}, source_length={source_length}; raise them")
    return asked


def count_forward(config: Config, batch: int, at: Lengths, *, pairs: Pairs = "all") -> dict[str, int]:
    """Operations of one forward pass, by part. With `past`, one of generating: the source is already read."""
    c, T, S = config, at.target, at.source
    reads = S > 0 and at.past == 0
    own = count_pairs(T, at.past + T, causal=c.shape != "encoder", window=c.window, pairs=pairs)
    kinds = [("blocks.*", T, T, own)]  # attentions; tokens that ask and that are asked; pairs of them
    thinks = c.n_layers * T
    if c.shape == "encoder-decoder":
        read = S if reads else 0
        around = count_pairs(S, S, causal=False, window=c.window, pairs=pairs) if reads else 0
        kinds = [("encoder.*", read, read, around), ("decoder.*.attention", T, T, own)]
        kinds.append(("decoder.*.cross", T, read, T * S))
        thinks = c.n_layers * read + c.n_decoder_layers * T
    projected = seen = 0  # each times the heads that do it
    for pattern, asks, asked, n_pairs in kinds:
        heads, kv_heads = count_heads(c, pattern)
        projected += asks * heads + asked * kv_heads
        seen += n_pairs * heads
    return {
        "embedding": 2 * batch * sum(_entries(c, S if reads else 0)),
        "projections": 2 * batch * c.d_model * projected * 2 * c.d_head,
        "attention": 2 * batch * seen * 2 * c.d_head,
        "feedforward": 2 * batch * thinks * c.d_model * c.d_ff * (3 if c.gated else 2),
        "head": 2 * batch * count_matrices(c)["head"] * (1 if c.head == "classes" else T),
    }


def count_training(
    config: Config, batch: int, at: Lengths, *, pairs: Pairs = "all", checkpointing: bool = False
) -> dict[str, int]:
    """Operations of a forward and a backward pass, by part.

    Backward, each product is done twice, for the gradients of its two sides, but for what enters from outside: pictures and
    sound need none. With checkpointing, the blocks are computed once more, except that the last product of a block need not be
    when nothing after it is kept for the backward pass (pre-norm, no dropout).
    """
    forward = count_forward(config, batch, at, pairs=pairs)
    total = {part: 3 * n for part, n in forward.items()}
    total["embedding"] -= 2 * batch * _entries(config, at.source)[0]
    if checkpointing:
        for part in ("projections", "attention", "feedforward"):
            total[part] += forward[part]
        if (config.norm_first or config.norm == "none") and config.dropout == 0:
            total["feedforward"] -= forward["feedforward"] // (3 if config.gated else 2)
    return total


def count_pairs(T: int, S: int, *, causal: bool, window: int = 0, pairs: Pairs = "allowed") -> int:
    """How many (query, key) pairs there are, or are allowed, for the last T of S tokens; one at a time after the first T = S."""
    width = min(window, S) if window else S
    if T == 1:
        return width if causal else S
    assert T == S, "several tokens at once are counted from the first one on"
    if pairs == "all":
        return T * S
    behind = width * T - width * (width - 1) // 2  # a token sees itself and at most width - 1 before it
    if causal:
        return behind
    return 2 * behind - T if window else T * T


def _entries(c: Config, source: int) -> tuple[int, int]:
    """Multiply-adds of the convolutions that pictures or sound enter by: of the first, and of the second."""
    if c.inputs == "patches":
        return c.n_patches * c.d_model * c.n_channels * c.patch_size**2, 0
    if c.inputs == "frames":  # the second one halves the number of frames
        return 2 * source * c.d_model * 3 * c.n_mels, source * c.d_model * 3 * c.d_model
    return 0, 0
