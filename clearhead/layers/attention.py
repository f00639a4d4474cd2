"""Attention: the equation, the door `attend` to its kernels, and multi-head attention on top.

Three kernels agree to rounding. *explicit* is the equation, and the reference for the others. *fused* is torch's
scaled_dot_product_attention, fed so that no T x T tensor exists at long lengths. *flex* is torch's flex_attention, which skips
blocks of the score matrix that a mask forbids. `kernel="auto"` takes fused, and flex where it can skip enough to win.

A query that may attend to nothing gets zeros and sends no gradient, in every kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from clearhead import kernels
from clearhead.errors import InputError, did_you_mean
from clearhead.layers import block_sparse, packing, strips
from clearhead.layers.cache import AnyLayerCache, Keys
from clearhead.layers.linear import FusedLinear, Linear, RMSNorm
from clearhead.layers.masks import ALL, Mask, bias_of, lower_pairs
from clearhead.layers.positions import Angles, Bias, rotate
from clearhead.layers.state_names import save_apart


class MultiHeadAttention(nn.Module):
    """concat(head_1 .. head_H) W_o with head_i = attend(x W_q, y W_k, y W_v) (section 3.2.2).

    y is x itself, or with `cross=True` the encoder's output. `bias` names which of q k v o carry one.
    Self-attention projects q, k and v in one product, cross-attention k and v; saved, all have names of their own.
    Where heads were pruned, `kept` lists the original numbers of the heads that remain: a score bias belongs to one head.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        bias: str = "qkvo",
        cross: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
        scale: float | None = None,
        dropout: float = 0.0,
        kernel: str = "auto",
        kept: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.kept, self.n_kv_heads = kept, n_kv_heads or n_heads
        self.d_head = d_head or d_model // n_heads
        d_q, d_kv = n_heads * self.d_head, self.n_kv_heads * self.d_head
        biased = {f"{letter}_proj" for letter in bias}
        self.cross = cross
        if cross:
            self.q_proj = Linear(d_model, d_q, bias="q" in bias)
            self.kv = FusedLinear(d_model, {"k_proj": d_kv, "v_proj": d_kv}, bias=biased)
            save_apart(self, "kv")
        else:
            self.qkv = FusedLinear(d_model, {"q_proj": d_q, "k_proj": d_kv, "v_proj": d_kv}, bias=biased)
            save_apart(self, "qkv")
        self.q_norm = RMSNorm(self.d_head, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.d_head, eps=norm_eps) if qk_norm else nn.Identity()
        self.heads = Attend(scale=scale, dropout=dropout, kernel=kernel)
        self.o_proj = Linear(d_q, d_model, bias="o" in bias)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        mask: Mask | Lowered | None = None,
        *,
        memory: Float[Tensor, "B S D"] | None = None,
        angles: Angles | None = None,
        cache: AnyLayerCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """x attends to itself, or to `memory`. With a cache, x follows the tokens that it holds."""
        if self.cross:
            q = self.q_norm(self._split(self.q_proj(x)))
            k, v = self.read_source(memory, cache)
        else:
            q, k, v = (self._split(part) for part in self.qkv(x))
            q, k = self.q_norm(q), self.k_norm(k)
            if angles is not None:
                q, k = rotate(q, angles), rotate(k, angles)
            if cache is not None:
                k, v = cache.extend(k, v)
        if self.kept and isinstance(mask, Lowered):
            mask = mask.only(self.kept)
        return self.o_proj(self.heads(q, k, v, mask).transpose(1, 2).flatten(2))

    def _split(self, x: Float[Tensor, "B T _"]) -> Float[Tensor, "B h T E"]:
        return x.unflatten(-1, (-1, self.d_head)).transpose(1, 2)

    def read_source(self, memory: Float[Tensor, "B S D"] | None, cache: AnyLayerCache | None) -> tuple[Keys, Keys]:
        """Keys and values of the encoder's output: computed once, then kept by the cache."""
        if cache is not None and cache.cross is not None:
            return cache.cross
        assert memory is not None, "cross-attention needs the encoder's output, or a cache that has read it"
        k, v = (self._split(part) for part in self.kv(memory))
        k = self.k_norm(k)
        if cache is not None:
            cache.cross = k, v
        return k, v


class Attend(nn.Module):
    """`attend` as a module: the one place where q, k, v and the mask meet, so that a hook here sees all of attention."""

    def __init__(self, *, scale: float | None = None, dropout: float = 0.0, kernel: str = "auto") -> None:
        super().__init__()
        self.scale, self.dropout, self.kernel = scale, dropout, kernel

    def forward(
        self, q: Float[Tensor, "B H T E"], k: Keys, v: Keys, mask: Mask | Lowered | None = None
    ) -> Float[Tensor, "B H T E"]:
        dropout = self.dropout if self.training else 0.0
        facts, bias = facts_of(mask)
        plain = bias is None and not (dropout or len(facts.patterns)) and self.kernel in ("auto", "fused")
        if not (isinstance(k, Tensor) or isinstance(v, Tensor)) and q.shape[2] == 1 and plain:
            scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
            out = k.attend(q, v, scale, facts.window)
            if out is not None:
                return out
        return attend(q, gathered(k), gathered(v), mask, scale=self.scale, dropout=dropout, kernel=self.kernel)


def gathered(keys: Keys) -> Float[Tensor, "B K S E"]:
    return keys if isinstance(keys, Tensor) else keys.gather()


def attend(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B K S E"],
    v: Float[Tensor, "B K S E"],
    mask: Mask | Lowered | None = None,
    *,
    bias: Bias | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    kernel: str = "auto",
) -> Float[Tensor, "B H T E"]:
    """softmax(q k^T / sqrt(E) + bias) v, over the keys the mask allows (equation 1 of the paper).

    With fewer key heads than query heads (K < H), H / K neighbouring queries share a key head; k and v are not copied.
    `scale` replaces 1 / sqrt(E). `dropout` falls on the weights. A lowered mask brings its own bias.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    facts, bias = facts_of(mask, bias)
    check_fit(q, k, v, facts)
    how = mask if isinstance(mask, Lowered) and mask.asked == kernel else None
    if how is None:
        how = lower(facts, bias, T=q.shape[2], S=k.shape[2], like=q, kernel=kernel, dropout=dropout)
    match how.kernel:
        case "explicit":
            weights = F.dropout(attention_weights(q, k, facts, bias=bias, scale=scale), dropout)
            grouped = weights.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
            return (grouped @ v).unflatten(2, (-1, q.shape[2])).flatten(1, 2)
        case "flex":
            return block_sparse.attend(q, k, v, how.mask, how.blocks, bias, scale)
        case "sparse":
            return kernels.strip_attention(q, k, v, how.strips, scale)
        case "packed":
            return packing.attend(q, k, v, how.mask, scale)
        case "strips":
            fused = partial(_fused, scale=scale, dropout=dropout)
            return strips.attend(q, k, v, how.mask, bias, fused)
        case _:
            causal = how.mask.causal and how.pairs is None
            return _fused(q, k, v, how.pairs, how.empty, scale, dropout, causal=causal)


def attention_weights(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B K S E"],
    mask: Mask | None = None,
    *,
    bias: Bias | None = None,
    scale: float | None = None,
    rows: slice = ALL,
) -> Float[Tensor, "B H t S"]:
    """softmax(q k^T / sqrt(E) + bias) for some rows of queries: what `attend` multiplies with v."""
    T, S = q.shape[2], k.shape[2]
    mask = check_mask(mask)
    scores = attention_scores(q, k, mask, bias=bias, scale=scale, rows=rows)
    return masked_softmax(scores, mask.allowed(T, S, rows, ALL, q.device)).to(q.dtype)


def attention_scores(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B K S E"],
    mask: Mask | None = None,
    *,
    bias: Bias | None = None,
    scale: float | None = None,
    rows: slice = ALL,
) -> Float[Tensor, "B H t S"]:
    """q k^T / sqrt(E) + bias, before any mask, in at least float32."""
    T, S = q.shape[2], k.shape[2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    q = q[:, :, rows]
    # Queries that share a key head are laid one under the other: one product a key head, k not repeated.
    grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    # float32 before the product: 8 or 11 bits are too few for a softmax, and float16 overflows before it is scaled.
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (grouped.to(wide) @ k.to(wide).transpose(-2, -1)).unflatten(2, (-1, q.shape[2])).flatten(1, 2) * scale
    return scores if bias is None else scores + bias_of(bias, check_mask(mask), T, S, rows, ALL, q.device)


def masked_softmax(
    scores: Float[Tensor, "B h t S"], allowed: Bool[Tensor, "_ 1 _ S"] | None = None
) -> Float[Tensor, "B h t S"]:
    """softmax over the allowed keys; zeros where there is none."""
    if allowed is None:
        return scores.softmax(-1)
    # The lowest finite number, not -inf: a row of nothing but -inf is NaN, here it is uniform and then zeroed.
    weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(~allowed, 0)


@dataclass(frozen=True, eq=False)
class Lowered:
    """A mask and a bias as one kernel takes them: made once by `lower`, used by every layer of a stack."""

    mask: Mask  # the facts, without those that forbid nothing at this size
    bias: Bias | None
    asked: str  # the kernel that was asked for
    kernel: str  # what runs: explicit, flex, fused; fused text by text ("packed"), in "strips", in strips that skip ("sparse")
    pairs: Tensor | None = (
        None  # for fused: True = may attend, or what is added; None: all, or only the future is hidden
    )
    empty: Bool[Tensor, "_ 1 _ 1"] | None = None  # queries that may attend to nothing
    blocks: BlockMask | None = None  # for flex
    strips: Sequence[kernels.Strip] = ()  # for sparse

    def only(self, heads: tuple[int, ...]) -> Lowered:
        """For an attention that has only these heads left."""
        if self.bias is None:
            return self
        bias = self.bias[:, list(heads)] if isinstance(self.bias, Tensor) else self.bias.only(heads)
        kernel = "strips" if self.kernel == "sparse" else self.kernel  # its strips hold the bias of all heads
        return replace(self, bias=bias, kernel=kernel, pairs=None if self.pairs is None else self.pairs[:, list(heads)])


def lower(
    mask: Mask, bias: Bias | None, *, T: int, S: int, like: Tensor, kernel: str = "auto", dropout: float = 0.0
) -> Lowered:
    """Choose the kernel, and write out the mask and the bias where that is small. `like` has the queries' device and type."""
    mask = mask.simplify(T, S)
    if mask.spans is not None and packing.pays(mask, bias, like, kernel, dropout):
        return Lowered(mask, bias, kernel, "packed")
    chosen = choose_kernel(kernel, mask, T, S, like, dropout)
    if chosen == "flex":
        return Lowered(mask, bias, kernel, chosen, blocks=block_sparse.block_mask(mask, T, S, like.device))
    plain = bias is None and mask.is_ordered and not (mask.window or len(mask.patterns)) and (not mask.causal or T == S)
    # len: `not` of a tuple breaks a compiled model's graph.
    if chosen == "explicit" or (plain and len(mask.documents) == 0):
        return Lowered(mask, bias, kernel, chosen)
    if not dropout and (made := block_sparse.strips(mask, bias, T, S, like)) is not None:
        return Lowered(mask, bias, kernel, "sparse", strips=made)
    if strips.pays(mask, bias, T, S):
        return Lowered(mask, bias, kernel, "strips")
    pairs, empty = lower_pairs(mask, bias, T, S, ALL, ALL, like.device)
    return Lowered(mask, bias, kernel, chosen, pairs, empty)


def choose_kernel(kernel: str, mask: Mask, T: int, S: int, like: Tensor, dropout: float) -> str:
    """explicit, fused or flex. Flex pays only where whole blocks can be skipped, and knows no dropout."""
    if kernel == "auto":
        # A pattern only for whole texts: a step with a cache has another length each time, each of them a compilation.
        sparse = len(mask.documents) > 0 or (len(mask.patterns) > 0 and T == S) or 0 < mask.window <= S // 2
        return "flex" if sparse and dropout == 0 and kernels.prefers_flex(like, S) else "fused"
    if kernel not in ("explicit", "fused", "flex"):
        raise InputError(
            f"kernel={kernel!r} is not known; {did_you_mean(kernel, ['auto', 'explicit', 'fused', 'flex'])}"
        )
    if kernel == "flex" and dropout > 0:
        raise InputError(
            f"the flex kernel has no dropout on weights; got dropout={dropout}; use kernel='fused' or dropout=0"
        )
    return kernel


def facts_of(mask: Mask | Lowered | None, bias: Bias | None = None) -> tuple[Mask, Bias | None]:
    """The mask and the bias behind what `attend` takes."""
    return (mask.mask, mask.bias) if isinstance(mask, Lowered) else (check_mask(mask), bias)


def check_mask(mask: object) -> Mask:
    """A `Mask`, or no mask; tensors are refused with the convention."""
    if mask is None:
        return Mask()
    if not isinstance(mask, Mask):
        got = f"{mask.dtype} tensor" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"as a mask, attention takes a Mask (True = may attend), got a {got}; "
            f"make one with causal(), window(n), padding(real), documents(ids), sparse(pattern), combined with &"
        )
    return mask


def check_fit(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
    """Refuse what would broadcast into nonsense."""
    if q.shape[1] % k.shape[1] or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise InputError(
            f"q, k and v must share batch and head width, and q's heads be a multiple of k's; got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}; each is (batch, heads, length, width)"
        )
    mask.check(q.shape[0], q.shape[2], k.shape[2])


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: Tensor | None,
    empty: Tensor | None,
    scale: float,
    dropout: float,
    *,
    causal: bool = False,
) -> Tensor:
    if pairs is None and not dropout:
        out = kernels.text_attention(q, k, v, scale, causal=causal)
        if out is not None:
            return out
    if pairs is not None and pairs.is_floating_point():
        pairs = pairs.to(q.dtype)
    out = F.scaled_dot_product_attention(
        *(q, k, v, pairs), dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out if empty is None else out.masked_fill(empty, 0)
