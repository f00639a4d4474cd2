"""Temporary tensors of a call without gradients: the bytes at its widest moment, in closed form (and without torch).

Of one stack with T tokens, width D, feed-forward width F, queries of total width Q, keys of total width K, in numbers for a token:

    attention      3 D + 2 Q + 2 K    the stream, its norm, q k v, the heads' output, its projection; rotary or qk-norm Q + K more
    cross          4 D + 2 Q          and, for each source token, D + 2 K: the encoder's output, its keys and values
    feedforward    3 D + 2 F          the block's input, the stream, its norm; before and after the activation; gated 4 F
    head           D + V              the states and their logits

On a CPU in float32 one kernel (oneDNN) does a product and its activation: 4 D + F. A bias on the scores (ALiBi, T5), a window or a
sparse pattern is written out once for all layers, in H T S numbers or T S bytes, and needs more while it is made; a long one is
made strip by strip. Not counted are the copies of the keys that 128 queries of a long sparse text look at.
T5's encoder has a bias with the heads last, which the CPU's kernel copies in each layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from clearhead.config import Config
from clearhead.costs.activations import Setting
from clearhead.costs.flops import Lengths
from clearhead.costs.parameters import heads_at
from clearhead.limits import ONEDNN_ROWS, ONEDNN_WEIGHT, WRITTEN_OUT, is_skipped

Parts = Mapping[str, int]
FUSED_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


def widest(c: Config, batch: int, at: Lengths, setting: Setting) -> Parts:
    """The largest set of temporary tensors of a call without gradients, by part. With `past` it is a decode step."""
    size, encoded = setting.size * batch, at.source if at.past == 0 else 0
    alone = c.shape == "encoder"
    # Held throughout: the encoder's output by a decoder that reads it, the embeddings by an encoder alone.
    throughout = size * c.d_model * (at.target if alone else encoded)
    moments: list[Parts] = [*_stack(c, batch, at.target, at.target + at.past, at.source, setting, causal=not alone)]
    moments = [{**moment, "norm": moment["norm"] + throughout} for moment in moments]
    if encoded:
        moments += _stack(c, batch, encoded, encoded, 0, setting, causal=False)
    if c.head == "tokens":
        logits = size * at.target * (c.d_model + c.vocab_size)
        moments.append({"norm": 0 if alone else throughout, "head": logits})
    return max(moments, key=lambda moment: sum(moment.values()))


def _stack(c: Config, batch: int, T: int, S: int, source: int, setting: Setting, *, causal: bool) -> Iterator[Parts]:
    """The moments of one stack: while its bias or mask is made, in attention, in cross-attention and in the feed-forward."""
    tokens = setting.size * batch * T
    d_q, d_kv = (n * c.d_head for n in max(heads_at(c, place) for place in c.attentions))
    made, held, used = _pairs(c, batch, T, S, setting, causal=causal)
    # A norm before the step holds its own output beside the stream.
    normed = int(c.norm_first and c.norm != "none")
    turned = d_q + d_kv if c.positions == "rotary" or c.qk_norm else 0
    yield {"norm": tokens * c.d_model, "attention": made}
    yield {
        "norm": (1 + normed) * c.d_model * tokens,
        "projections": (c.d_model + 2 * d_q + 2 * d_kv + turned) * tokens,
        "attention": held,
    }
    out = 0 if c.kernel == "explicit" else d_q  # comes only after the weights
    yield {
        "norm": (1 + normed) * c.d_model * tokens,
        "projections": (d_q + 2 * d_kv + out + turned) * tokens,
        "attention": held + used,
    }
    if source:
        keys = 2 * d_kv * setting.size * batch * source if T == S else 0  # in a decode step they are in the cache
        yield {
            "norm": (2 + normed) * c.d_model * tokens,
            "projections": (c.d_model + 2 * d_q) * tokens + keys,
            "attention": held,
        }
    streams, wide = 2 + normed, 4 if c.gated else 2
    if _has_fused_activation(c, batch * T, setting):
        streams, wide = streams + 1, 1
    yield {"norm": streams * c.d_model * tokens, "feedforward": wide * c.d_ff * tokens, "attention": held}


def _has_fused_activation(c: Config, rows: int, setting: Setting) -> bool:
    """Whether one kernel computes a product and its activation (kernels/onednn.py)."""
    plain = not (c.gated or setting.cuda or setting.half) and c.feedforward in FUSED_ACTIVATIONS
    return plain and rows >= ONEDNN_ROWS and c.d_model * c.d_ff <= ONEDNN_WEIGHT


def _pairs(c: Config, batch: int, T: int, S: int, setting: Setting, *, causal: bool) -> tuple[int, int, int]:
    """Bytes for pairs of a query and a key: while a mask or bias is made, while blocks run, and more while one attends."""
    biased, windowed = c.positions in ("alibi", "t5"), 0 < c.window < S or bool(c.sparsity)
    masked = windowed or (causal and T > 1)
    if c.kernel == "explicit":  # all in float32: scores, what is left of them, their softmax
        return 0, 0, 4 * batch * c.n_heads * T * S * (3 if masked else 2)
    if is_skipped(c.window, c.sparsity, S, cuda=setting.cuda) or not (biased or windowed):
        return 0, 0, 0
    heads = c.n_heads if biased else 1
    in_strips = heads * T * S > WRITTEN_OUT
    rows = min(T, max(64, WRITTEN_OUT // (2 * heads * S))) if in_strips else T
    pairs = rows * S
    if not biased:  # a distance, its size, and two comparisons; the kernel turns booleans into numbers
        made, held, used = 18 * pairs, pairs, setting.size * pairs
    else:
        wide = heads * (setting.size if c.positions == "t5" else 4)
        copied = setting.size * heads if c.positions == "alibi" and setting.half else 0
        copied = wide if c.positions == "t5" and not masked and not setting.cuda else copied
        made = pairs * max(_making(c, wide, causal=causal), 2 * wide + 2 if masked else 0)
        held, used = pairs * wide, pairs * copied
    return (0, 0, max(made, held + used)) if in_strips else (made, held, used)


def _making(c: Config, wide: int, *, causal: bool) -> int:
    """Bytes a pair while a bias is made: distances and what comes of them in 64 bits, then a number for each head."""
    if c.positions == "alibi":
        return 20 + wide
    return max(44 if causal else 52, 16 + wide)
