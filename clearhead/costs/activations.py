"""Activations: what training keeps between the forward and the backward pass, in bytes, in closed form (and without torch).

As autograd saves it, layer by layer, with eager layers and fused attention. Bytes per token, with c bytes for each computed
number (2 under bfloat16 autocast, else 4), width D, feed-forward width F, H heads of total width Q and key/value width K:

    norm           4 (D + 2)                    its input, mean and deviation; rms on a CPU also its output
    attention      c (D + Q + 2K) + c Q + 4H    its input, q k v, its output, and the log-sum-exp of each row
    feedforward    c (D + 2F)                   its input, before and after the activation; relu F, gated 4F
    dropout        c D, on CUDA 1 D             which numbers were dropped
    head           c D + 4V                     its input, and log-probabilities unless the loss is computed in chunks

The residual stream is float32. Under autocast the bfloat16 copies of the weights are kept too. Queries and keys with rotary
positions or a norm are kept before and after it. A mask other than a causal one is a tensor in each layer, a bias on the scores one
for all. Without a fused kernel for it (on a CPU a trained bias or attention dropout; on CUDA a trained bias with shared key heads)
the weights, T x S for each head, are kept in float32. CUDA's rms norm of queries and keys keeps its input and one number a row.
Masks of padded or packed rows are not counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from clearhead.config import Config
from clearhead.costs.flops import Lengths
from clearhead.costs.parameters import count_matrices, heads_at
from clearhead.limits import WRITTEN_OUT, is_narrow, is_skipped


@dataclass(frozen=True)
class Setting:
    """How the model runs: under bfloat16 autocast or not, on a CPU or on CUDA. `size`: bytes of a computed number."""

    half: bool
    cuda: bool

    @property
    def size(self) -> int:
        return 2 if self.half else 4


def count_saved(
    config: Config, batch: int, at: Lengths, setting: Setting, *, logits: int, checkpointing: bool = False
) -> dict[str, int]:
    """Bytes kept for the backward pass, by part. `logits`: the number of positions whose log-probabilities are kept.

    "projections" is what is linear in the length, "attention" what grows with its square, "norm" the inputs of norms, that is
    the residual stream. With checkpointing each block keeps only its input, counted as "norm". Autocast's copies of weights
    are counted with their parts.
    """
    c, T, S = config, at.target, at.source
    total = {"embedding": _entry(c, batch, at, setting), "projections": 0, "attention": 0, "feedforward": 0, "norm": 0}
    total["head"] = _head(c, batch, T, S, setting, logits)
    if checkpointing:
        tokens = c.n_layers * (S or T) + c.n_decoder_layers * T + S  # the decoder's blocks share the encoder's output
        total["norm"] = 4 * batch * tokens * c.d_model
    else:
        for layers, block in count_blocks(c, batch, at, setting):
            for part, n in block.items():
                total[part] += layers * n
        if S and not setting.half:  # all layers share the encoder's output; under autocast each has a copy
            total["projections"] -= (c.n_decoder_layers - 1) * 4 * batch * S * c.d_model
        total["attention"] -= _shared_bias(c, at, setting)
    for part, n in count_copies(c, setting).items():
        total[part] += 0 if checkpointing and part in ("projections", "feedforward") else n
    return total


def count_copies(config: Config, setting: Setting) -> dict[str, int]:
    """Bytes of the bfloat16 copies of weights that autocast keeps."""
    names = {"attention": "projections"}
    return {names.get(part, part): 2 * n for part, n in count_matrices(config).items()} if setting.half else {}


def count_blocks(config: Config, batch: int, at: Lengths, setting: Setting) -> list[tuple[int, dict[str, int]]]:
    """For each kind of block: how many there are, and the bytes of one. A stack has several kinds only if heads are pruned."""
    c, T, S = config, at.target, at.source
    kinds = Counter[tuple[str, tuple[int, ...]]]()
    for stack, layers in (("encoder.", c.n_layers), ("decoder.", c.n_decoder_layers)) if S else (("", c.n_layers),):
        for layer in range(layers):
            steps = ("attention", "cross") if stack == "decoder." else ("attention",)
            kinds[stack, tuple(heads_at(c, f"{stack}blocks.{layer}.{step}")[0] for step in steps)] += 1
    return [
        (
            layers,
            _block(c, batch, S, 0, heads, setting, causal=False)
            if stack == "encoder."
            else _block(c, batch, T, S, heads, setting, causal=c.shape != "encoder"),
        )
        for (stack, heads), layers in kinds.items()
    ]


def _block(
    c: Config, batch: int, T: int, S: int, heads: tuple[int, ...], setting: Setting, *, causal: bool
) -> dict[str, int]:
    """Bytes of one block. With S > 0 it has cross-attention over S positions. `heads`: the number of heads of each attention."""
    steps, tokens = (3 if S else 2), batch * T
    dropped = (1 if setting.cuda else setting.size) * c.d_model if c.dropout else 0
    projections = _attention(c, batch, T, T, heads[0], setting)
    weights = batch * heads[0] * T * T * _weights_kept(c, setting)
    weights += _written_out(c, T, heads[0], setting, causal=causal)
    if S:
        projections += _attention(c, batch, T, S, heads[1], setting, cross=True)
        weights += batch * heads[1] * T * S * _weights_kept(c, setting, cross=True)
    return {
        "norm": steps * tokens * _norm(c, setting),
        "projections": projections + (steps - 1) * tokens * dropped,
        "attention": weights,
        "feedforward": tokens * (setting.size * (c.d_model + _widths(c) * c.d_ff) + dropped),
    }


def _norm(c: Config, setting: Setting) -> int:
    rms = c.d_model + 1 if setting.cuda else 2 * c.d_model + 1
    return 4 * {"layer": c.d_model + 2, "rms": rms, "none": 0}[c.norm]


def _widths(c: Config) -> int:
    """The number of tensors of the feed-forward's width that are kept."""
    if c.gated:
        return 5 if c.feedforward == "relu2" else 4
    return 1 if c.feedforward == "relu" else 2


def _attention(c: Config, batch: int, T: int, S: int, heads: int, setting: Setting, *, cross: bool = False) -> int:
    kv_heads = heads * c.n_kv_heads // c.n_heads
    size, d_q, d_kv = setting.size, heads * c.d_head, kv_heads * c.d_head
    queries, keys = batch * T, batch * S
    rotary = c.positions == "rotary" and not cross
    total = size * queries * (c.d_model + d_q)  # its input, and its output as the input of the output projection
    total += size * keys * c.d_model if cross else 0
    if c.qk_norm:
        # CUDA's kernel needs only its input; on a CPU its output is kept, and under autocast its input in float32.
        copies = 0 if setting.cuda else 2 if setting.half else 1
        total += 4 * (queries * (copies * d_q + heads) + keys * (copies * d_kv + kv_heads))
    if c.kernel == "explicit":
        return total + size * (queries * d_q + 2 * keys * d_kv)
    if _weights_kept(c, setting, cross=cross):  # not fused: in float32, with shared keys repeated
        return total + 4 * (queries + 2 * keys) * d_q
    total += size * (queries * d_q + 2 * keys * d_kv) + 4 * queries * heads
    if rotary or c.qk_norm:
        total += size * (queries * d_q + keys * d_kv)
    # The kernel's output has the layout of the queries. After rotary or a norm that is head by head: the output is copied.
    skipped = not cross and is_skipped(0, c.sparsity, T, cuda=setting.cuda)  # there it is token by token
    head_by_head = (rotary and not c.rotary_interleaved) or c.qk_norm or (is_narrow(c.window, T) and not cross)
    if head_by_head and not skipped:
        total += size * queries * d_q
    return total


def _weights_kept(c: Config, setting: Setting, *, cross: bool = False) -> int:
    """Bytes kept for each pair of a query and a key in each head: 0 with a fused kernel."""
    if c.kernel == "explicit":
        return 4 + setting.size * (2 if c.attention_dropout else 1)
    if (not cross and _has_no_kernel(c, setting)) or (c.attention_dropout and not setting.cuda):
        return 4 * (3 if c.attention_dropout else 1)
    return 0


def _has_no_kernel(c: Config, setting: Setting) -> bool:
    """Whether no fused kernel can train the bias: none on a CPU, and on CUDA none with shared key heads."""
    return c.positions == "t5" and (not setting.cuda or c.n_kv_heads != c.n_heads)


def _written_out(c: Config, T: int, heads: int, setting: Setting, *, causal: bool) -> int:
    """Bytes of a layer's mask or bias tensor: of any but a causal mask, up to WRITTEN_OUT pairs."""
    biased = c.positions in ("alibi", "t5")
    pairs = T * T * (heads if biased else 1)
    written = biased or 0 < c.window < T or bool(c.sparsity)
    if not written or is_skipped(c.window, c.sparsity, T, cuda=setting.cuda) or pairs > WRITTEN_OUT:
        return 0
    return setting.size * pairs if _is_fused(c, setting) else T * T * int(causal)


def _is_fused(c: Config, setting: Setting) -> bool:
    return c.kernel != "explicit" and not _has_no_kernel(c, setting) and (setting.cuda or not c.attention_dropout)


def _shared_bias(c: Config, at: Lengths, setting: Setting) -> int:
    """Bytes that `_written_out` counts for each layer although all layers of a stack share the tensor.

    Under autocast each layer of a fused kernel has a narrow copy; layers that lost heads have a part of their own.
    """
    biased = c.positions in ("alibi", "t5") and c.kernel != "explicit"
    if not biased or c.pruned_heads or (setting.half and _is_fused(c, setting)):
        return 0
    T, S = at.target, at.source
    written = partial(_written_out, c, heads=c.n_heads, setting=setting)
    if S:
        encoder = (c.n_layers - 1) * written(T=S, causal=False)
        return encoder + (c.n_decoder_layers - 1) * written(T=T, causal=True)
    return (c.n_layers - 1) * written(T=T, causal=c.shape != "encoder")


def _entry(c: Config, batch: int, at: Lengths, setting: Setting) -> int:
    """What is kept before the first block of each stack: ids, positions, the inputs of convolutions."""
    lengths = [at.target] + ([at.source] if at.source else [])
    tokens = batch * sum(lengths)
    total = tokens * (_norm(c, setting) if c.embedding_norm else 0)
    total += tokens * c.d_model * (1 if setting.cuda else 4) if c.dropout else 0
    ids = batch * (0 if c.inputs == "patches" else at.target if c.inputs == "frames" else sum(lengths))
    total += 8 * ids * (2 if c.n_segments else 1)
    if c.inputs == "patches":
        total += setting.size * batch * c.n_channels * c.image_size**2
    if c.inputs == "frames":  # the inputs of both convolutions and of their activations
        total += setting.size * batch * at.source * (2 * c.n_mels + 5 * c.d_model)
    tables = {"rotary": c.d_head * (8 if c.rotary_interleaved else 4), "learned": 8}.get(c.positions, 0)
    total += sum(lengths) * tables
    return total + (sum(8 * n * n for n in lengths) if c.positions == "t5" else 0)


def _head(c: Config, batch: int, T: int, S: int, setting: Setting, logits: int) -> int:
    """What the last norm of each stack and the head keep."""
    total = batch * (T + S) * (_norm(c, setting) if c.norm_first else 0)
    if c.head == "none":
        return total
    if c.head == "classes":  # one state for each row; a view of it keeps all states
        return total + 4 * batch * c.d_model * (1 if setting.half or c.pool == "mean" else T)
    total += setting.size * batch * T * c.d_model + 4 * logits * c.vocab_size
    if c.head_transform:
        total += batch * T * (_norm(c, setting) + 2 * setting.size * c.d_model)
    return total
