"""Attention's one door, `attend`, and the three kernels behind it.

*explicit* is the equation, and the reference for the others. *fused* is torch's scaled_dot_product_attention, fed so that
no T x T tensor is made at long lengths; in float32 on the CPU, where nothing is masked but the future and no gradient is wanted, a
kernel of our own (native.cpp) takes its place. *flex* is torch's flex_attention, which skips whole blocks a mask forbids. All three
agree to rounding; `kernel="auto"` takes fused, and flex on CUDA where it can skip enough to win.

Keys may also lie in the blocks of a pool (`Mask.pages`). One query a row then reads them where they are, by a kernel of our own
(native.cpp, gpu/); where that does not fit, they are laid side by side first.

A query that may look at nothing gets zeros and sends no gradient, in every kernel.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from clearhead.engine.kv_cache import spread, unpage
from clearhead.errors import InputError, did_you_mean
from clearhead.kernels import native
from clearhead.layers.flex import block_mask, flex
from clearhead.layers.limits import WRITTEN_OUT, is_narrow
from clearhead.layers.linear import has_triton, is_bare
from clearhead.layers.masks import Mask
from clearhead.layers.positions import Bias, DistanceBias

ALL = slice(None)


def attend(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "n K s E"],
    v: Float[Tensor, "n K s E"],
    mask: Mask | None = None,
    *,
    bias: Bias | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    kernel: str = "auto",
) -> Float[Tensor, "B H T E"]:
    """softmax(q k^T / sqrt(E) + bias) v, over the keys the mask allows (equation 1 of the paper).

    k and v are (B, K, S, E), or with `mask.pages` a pool's blocks (n, K, block, E).

    With fewer key heads than query heads (K < H), H / K neighbouring queries share a key head; k and v are not copied.
    `scale` replaces 1 / sqrt(E). `dropout` falls on the weights.
    """
    mask = check_mask(mask)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if mask.pages is not None:
        if reads_blocks(mask, bias, q.shape[2], q, kernel):
            return _paged(q, k, v, mask, scale)
        k, v, mask = unpage(k, v, mask)
    T, S = q.shape[2], k.shape[2]
    check_fit(q, k, v, mask)
    mask = mask.simplify(T, S)
    if goes_by_spans(mask, bias, q, kernel, dropout) and k.shape[1] == q.shape[1]:
        return _by_spans(q, k, v, mask, scale)
    match choose_kernel(kernel, mask, S, q.device, dropout):
        case "explicit":
            return _explicit(q, k, v, mask, bias, scale, dropout)
        case "flex":
            return flex(q, k, v, mask, bias, scale)
        case _:
            return _fused(q, k, v, mask, bias, scale, dropout)


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
    return softmax_of(scores, mask.allowed(T, S, rows, ALL, q.device)).to(q.dtype)


def softmax_of(
    scores: Float[Tensor, "B h t S"], allowed: Bool[Tensor, "_ 1 _ S"] | None = None
) -> Float[Tensor, "B h t S"]:
    """softmax over the allowed keys; zeros where there is none."""
    if allowed is None:
        return scores.softmax(-1)
    # The lowest finite number, not -inf: a row of nothing but -inf is NaN, here it is uniform and then zeroed.
    weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(~allowed, 0)


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
    if bias is not None:
        scores = scores + _bias_of(bias, check_mask(mask), T, S, rows, ALL, q.device)
    return scores


def choose_kernel(kernel: str, mask: Mask, S: int, device: torch.device, dropout: float) -> str:
    """Which kernel runs. Flex pays only where whole blocks can be skipped, on a GPU, and knows no dropout."""
    if kernel == "auto":
        sparse = bool(mask.documents) or 0 < mask.window <= S // 2
        return "flex" if sparse and S >= 2048 and device.type == "cuda" and dropout == 0 else "fused"
    if kernel not in ("explicit", "fused", "flex"):
        raise InputError(
            f"kernel={kernel!r} is not known; {did_you_mean(kernel, ['auto', 'explicit', 'fused', 'flex'])}"
        )
    if kernel == "flex" and dropout > 0:
        raise InputError(
            f"the flex kernel has no dropout on weights; got dropout={dropout}; use kernel='fused' or dropout=0"
        )
    return kernel


def settle(
    mask: Mask, bias: Bias | None, *, T: int, S: int, like: Tensor, kernel: str, dropout: float
) -> tuple[Mask, Bias | None]:
    """Write mask and bias out once, where that is small, so that every layer finds them made."""
    device = like.device
    if mask.pages is not None:
        if reads_blocks(mask, bias, T, like, kernel):
            return mask, bias
        mask = spread(mask)
    if mask.keys is not None and mask.keys.shape[1] != S:
        return settle(mask, bias, T=T, S=mask.keys.shape[1], like=like, kernel=kernel, dropout=dropout)
    mask = mask.simplify(T, S)
    if goes_by_spans(mask, bias, like, kernel, dropout):
        return mask, bias
    chosen = choose_kernel(kernel, mask, S, device, dropout)
    if chosen == "flex":
        return replace(mask, blocks=block_mask(mask, T, S, device)), bias
    if chosen == "fused" and (_goes_in_strips(mask, bias, T, S) or (bias is None and _is_plainly_causal(mask, T, S))):
        return mask, bias
    if bias is not None:
        bias = _bias_of(bias, mask, T, S, ALL, ALL, device)
    return replace(mask, dense=mask.allowed(T, S, ALL, ALL, device)), bias


def reads_blocks(mask: Mask, bias: Bias | None, T: int, like: Tensor, kernel: str) -> bool:
    """Whether keys are read in their blocks: one query a row, the last of its text or one over a source, and no bias."""
    if T != 1 or bias is not None or kernel not in ("auto", "fused") or mask.dense is not None:
        return False
    if like.is_cuda:
        return has_triton()
    alone = mask.pages is not None and mask.pages.block == 1  # token by token: only the GPU's kernel reads that
    return like.device.type == "cpu" and like.dtype == torch.float32 and not alone and native.is_there()


def goes_by_spans(mask: Mask, bias: Bias | None, like: Tensor, kernel: str, dropout: float) -> bool:
    """Whether texts packed into a row are attended to one by one: by torch's kernel for that on CUDA GPUs in 16 bits, on the CPU by
    our own, or a call for each length."""
    return (
        mask.spans is not None
        and kernel in ("auto", "fused")
        and bias is None
        and not dropout
        and not (mask.window or mask.keys is not None)
        and (
            autocast_type(like) in (torch.bfloat16, torch.float16)
            if like.is_cuda
            else like.device.type == "cpu" and not torch.compiler.is_compiling()
        )
    )


def autocast_type(x: Tensor) -> torch.dtype:
    """What x becomes in a product."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _by_spans(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    spans = mask.spans
    assert spans is not None
    keys = spans.keys or spans
    if not q.is_cuda:
        if _is_ours(q, k, v) and (not mask.causal or spans.keys is None):
            return native.text_attention(q, k, v, scale, (spans.starts, keys.starts), causal=mask.causal)
        return _length_by_length(q, k, v, mask, scale)
    from torch.nn.attention.varlen import varlen_attn

    usual = 1 / math.sqrt(q.shape[-1])  # what it multiplies with itself
    q, k, v = (x[0].transpose(0, 1) for x in (q if scale == usual else q * (scale / usual), k, v))
    reach = (-1, 0 if mask.causal else -1)  # keys before and after the query; -1: all
    out = varlen_attn(q, k, v, spans.starts, keys.starts, spans.longest, keys.longest, window_size=reach)
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]


def _is_ours(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the CPU's kernel of our own takes these. It has no backward pass."""
    return (
        q.device.type == "cpu"
        and q.dtype == k.dtype == v.dtype == torch.float32
        and q.shape[2] > 1  # a single query is over before the keys are laid out
        and q.numel() > 0
        and k.numel() > 0
        and q.shape[3] % native.TEXT_WIDTHS == 0
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        and is_bare(q, k, v)
        and not torch.jit.is_tracing()
        and forward_ad._current_level < 0  # pyright: ignore[reportPrivateUsage]
        and native.lies_in_rows(q)
        and native.lies_in_rows(k)
        and native.lies_in_rows(v)
        and native.is_there()
    )


def _length_by_length(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Neighbouring texts of one length as a batch: nothing is masked, and sorted texts make large batches."""
    spans = mask.spans
    assert spans is not None
    queries, keys = (s.starts.tolist() for s in (spans, spans.keys or spans))
    sizes = [(b - a, d - c) for a, b, c, d in zip(queries, queries[1:], keys, keys[1:], strict=False)]
    parts: list[Tensor] = []
    i = 0
    for (t, s), group in itertools.groupby(sizes):
        n = len(list(group))
        one, other = slice(queries[i], queries[i] + n * t), slice(keys[i], keys[i] + n * s)
        i += n
        if t and s:
            rows = [x[0, :, at].unflatten(1, (n, -1)).transpose(0, 1) for x, at in ((q, one), (k, other), (v, other))]
            out = _sdpa(rows[0], rows[1], rows[2], None, scale, 0.0, causal=mask.causal)
            parts.append(out.transpose(1, 2).flatten(0, 1))  # (n t, H, E)
        elif t:
            parts.append(q.new_zeros(n * t, q.shape[1], q.shape[3]))
    return torch.cat(parts).transpose(0, 1)[None]


def _paged(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    pages = mask.pages
    assert pages is not None
    told = (pages.table, pages.counts, scale, mask.window)
    if not q.is_cuda:
        return native.paged_attention(q[:, :, 0], k, v, *told)[:, :, None]
    from clearhead.kernels.gpu import paged_attention

    return paged_attention(q[:, :, 0], k, v, *told, each=pages.block == 1)[:, :, None]


def check_mask(mask: object) -> Mask:
    """A `Mask`, or no mask; tensors are refused with the convention."""
    if mask is None:
        return Mask()
    if not isinstance(mask, Mask):
        got = f"{mask.dtype} tensor" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"as a mask, attention takes a Mask (True = may attend), got a {got}; "
            f"make one with causal(), window(n), padding(real), documents(ids), combined with &"
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


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None, scale: float, dropout: float) -> Tensor:
    weights = F.dropout(attention_weights(q, k, mask, bias=bias, scale=scale), dropout)
    grouped = weights.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    return (grouped @ v).unflatten(2, (-1, q.shape[2])).flatten(1, 2)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None, scale: float, dropout: float) -> Tensor:
    T, S = q.shape[2], k.shape[2]
    if bias is None and _is_plainly_causal(mask, T, S):
        return _sdpa(q, k, v, None, scale, dropout, causal=mask.causal)
    if not _goes_in_strips(mask, bias, T, S):
        return _fused_strip(q, k, v, mask=mask, bias=bias, scale=scale, dropout=dropout)
    # Strips of queries, each with only the keys it can reach: memory grows with T, not with T^2.
    narrow = _is_narrow(mask, S)
    step = max(mask.window, 64) if narrow else max(64, WRITTEN_OUT * T // (2 * _pairs(mask, bias, T, S)))
    # The backward pass would keep every strip's mask, T^2 in all, so wide strips are computed again instead.
    again = torch.is_grad_enabled() and not narrow
    # Narrow strips look alike but for the first and the last: one mask serves all that do.
    shared: Shared | None = {} if narrow and len(mask.documents) == 0 and not isinstance(bias, Tensor) else None
    strips: list[Tensor] = []
    for start in range(0, T, step):
        rows = slice(start, min(start + step, T))
        facts = dict(mask=mask, bias=bias, rows=rows, cols=_reach(mask, rows, T, S), shared=shared)
        strip = functools.partial(_fused_strip, scale=scale, dropout=dropout, **facts)
        strips.append(checkpoint(strip, q, k, v, use_reentrant=False) if again else strip(q, k, v))
    return torch.cat(strips, 2)


Shared = dict[tuple[int, int, int], tuple[Tensor | None, Tensor | None]]  # by offset, rows and columns of a strip


def _fused_strip(
    *qkv: Tensor,
    mask: Mask,
    bias: Bias | None,
    scale: float,
    dropout: float,
    rows: slice = ALL,
    cols: slice = ALL,
    shared: Shared | None = None,
) -> Tensor:
    q, k, v = qkv
    if shared is None:
        pairs, empty = _lower(mask, bias, q, k.shape[2], rows, cols)
    else:
        alike = (rows.start - cols.start, rows.stop - rows.start, cols.stop - cols.start)
        if alike not in shared:
            pairs, empty = _lower(mask, bias, q, k.shape[2], rows, cols)
            if pairs is not None and pairs.dtype == torch.bool:  # the kernel would do this anew for each strip
                pairs = torch.zeros_like(pairs, dtype=q.dtype).masked_fill(~pairs, float("-inf"))
            shared[alike] = pairs, empty
        pairs, empty = shared[alike]
    out = _sdpa(q[:, :, rows], k[:, :, cols], v[:, :, cols], pairs, scale, dropout)
    return out if empty is None else out.masked_fill(empty, 0)


def _lower(
    mask: Mask, bias: Bias | None, q: Tensor, S: int, rows: slice, cols: slice
) -> tuple[Tensor | None, Tensor | None]:
    """What the fused kernel takes for these pairs, and which of the queries may look at nothing."""
    T = q.shape[2]
    allowed = mask.allowed(T, S, rows, cols, q.device)
    empty = None
    # Only these can leave a row with nothing to look at; such a row looks at everything, then is zeroed.
    if allowed is not None and (mask.keys is not None or mask.documents or T > S):
        empty = ~allowed.any(-1, keepdim=True)
        allowed = allowed | empty
    if bias is None:
        return allowed, empty
    pairs = _bias_of(bias, mask, T, S, rows, cols, q.device).to(q.dtype)
    return pairs if allowed is None else pairs.masked_fill(~allowed, float("-inf")), empty


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, pairs: Tensor | None, scale: float, dropout: float, causal: bool = False
) -> Tensor:
    if pairs is None and not dropout and (not causal or q.shape[2] == k.shape[2]) and _is_ours(q, k, v):
        return native.text_attention(q, k, v, scale, causal=causal)
    # torch picks the kernel: since 2.11 that is cuDNN's on Hopper GPUs, the fastest there at long lengths.
    return F.scaled_dot_product_attention(
        *(q, k, v),
        attn_mask=pairs,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _is_plainly_causal(mask: Mask, T: int, S: int) -> bool:
    """Nothing forbidden, or just the future of a square: what the fused kernel needs no tensor for."""
    # len: `not` of a tuple of tensors breaks a compiled model's graph.
    return mask.is_ordered and len(mask.documents) == 0 and not mask.window and (not mask.causal or T == S)


def _is_narrow(mask: Mask, S: int) -> bool:
    return mask.is_ordered and is_narrow(mask.window, S)


def _goes_in_strips(mask: Mask, bias: Bias | None, T: int, S: int) -> bool:
    return mask.dense is None and (_is_narrow(mask, S) or _pairs(mask, bias, T, S) > WRITTEN_OUT)


def _reach(mask: Mask, rows: slice, T: int, S: int) -> slice:
    """The keys that these queries could look at, by index."""
    if not mask.is_ordered:
        return ALL
    first, last = rows.start + S - T, rows.stop - 1 + S - T
    low = max(0, first - mask.window + 1) if mask.window else 0
    high = last + 1 if mask.causal else last + mask.window if mask.window else S
    return slice(low, max(min(high, S), low + 1))


def _pairs(mask: Mask, bias: Bias | None, T: int, S: int) -> int:
    """How many numbers the mask and the bias hold when written out."""
    rows = T if bias is not None or mask.causal or mask.window or mask.documents else 1
    heads = 1 if bias is None else bias.n_heads if isinstance(bias, DistanceBias) else bias.shape[1]
    return (mask.batch or 1) * heads * rows * S


def _bias_of(bias: Bias, mask: Mask, T: int, S: int, rows: slice, cols: slice, device: torch.device) -> Tensor:
    if isinstance(bias, Tensor):
        return bias[:, :, rows, cols]
    return bias.dense(mask.distances(T, S, rows, cols, device))
