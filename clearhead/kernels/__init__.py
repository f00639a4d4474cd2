"""Everything that is there for speed: tensors in, tensors out. This file is the door: layers and models call these functions only.

One law holds for all of them: a fast path computes what the plain one does, or says no. None means "use torch". Rooms that run
a whole step or a loss (engine, quantization, generation, training) import the modules below as well.

checks.py         when a kernel of our own may replace torch's operators
native.py         native.cpp and cpp/: C++ for the CPU
memory.py         free memory of this machine
native_library.py where the compiled native.cpp comes from: the wheel, the cache folder, the compiler
compiler.py       settings of torch.compile
decode_step.py    a whole decode step of native.cpp: from last tokens to logits
snapshot.py       whether the weights and attributes of modules have changed
onednn.py         products of many rows on the CPU
huge_pages.py     weights in 2 MB pages of memory
memory.py         free memory, asked before much of it is taken
packed.py         int8 and int4 weights in tiles
attention.py      whole texts, texts packed into one row, block-sparse
tiles.py          tiles of the score matrix that a mask leaves something of
sparse_strips.py  block-sparse on the CPU, with gradients
float8.py         fp8 products with gradients
cross_entropy.py  the loss over a large vocabulary, in chunks
gpu/              Triton kernels

Knows no layer, model or cache. May import: errors.
"""

from __future__ import annotations

from types import ModuleType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.kernels import native, onednn
from clearhead.kernels.attention import (
    block_sparse_attention,
    packed_attention,
    prefers_flex,
    takes_packed,
    text_attention,
)
from clearhead.kernels.checks import (
    best_device,
    can_read,
    capture,
    has_triton,
    is_plain,
    is_watched,
    to_float64,
    torch_only,
)
from clearhead.kernels.memory import require_memory
from clearhead.kernels.packed import Packed
from clearhead.kernels.sparse_strips import Strip, make_strips, strip_attention, takes_strips
from clearhead.kernels.tiles import Tiles, block_mask, find_tiles, flex_side, pair_rule, strip_side

__all__ = [
    "Packed",
    "Strip",
    "Tiles",
    "best_device",
    "block_mask",
    "block_sparse_attention",
    "can_read",
    "capture",
    "draw",
    "find_tiles",
    "flex_side",
    "gpu_kernels",
    "has_triton",
    "is_plain",
    "is_watched",
    "make_strips",
    "pack_int4",
    "packed_attention",
    "packed_product",
    "paged_attention",
    "pair_rule",
    "prefers_flex",
    "product",
    "require_memory",
    "rows",
    "search_int4",
    "store",
    "strip_attention",
    "strip_side",
    "takes_packed",
    "takes_strips",
    "text_attention",
    "to_float64",
    "top_log_probs",
    "torch_only",
    "wants_tiles",
]

CPU_ROWS, CUDA_ROWS = 32, 64  # up to so many rows our own products win


def product(
    x: Float[Tensor, "*_ D"],
    weight: Float[Tensor, "N D"] | Packed,
    bias: Float[Tensor, " N"] | None = None,
    activation: str | None = None,
) -> Float[Tensor, "*_ N"] | None:
    """f(x W^T + b). A few rows, as in decoding, take as long as reading the weights does: our kernels read them faster.

    With `activation`, None also means that no kernel does both at once.
    """
    if isinstance(weight, Packed):
        return weight.product(x, bias) if activation is None else None
    if not is_plain(x, weight) or x.dtype != weight.dtype or not weight.is_contiguous():
        return None
    if onednn.fits(x, weight):
        return onednn.linear(x, weight, bias, activation) if onednn.knows(activation) else None
    if torch.is_grad_enabled():
        return None
    n_rows = x.numel() // x.shape[-1]
    if x.is_cuda:
        return _cuda_product(x, weight, bias, activation, n_rows)
    if 0 < n_rows <= CPU_ROWS and x.dtype == torch.float32 and activation is None and native.is_there():
        return native.linear(_rows(x), weight, bias).view(*x.shape[:-1], -1)
    return None


def _cuda_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, n_rows: int
) -> Float[Tensor, "*_ N"] | None:
    N, D = weight.shape
    if 0 < n_rows <= CUDA_ROWS and capture.is_on and has_triton():
        from clearhead.kernels import gpu

        if gpu.knows(activation) and (plan := gpu.linear_plan(n_rows, N, D, weight.dtype)) is not None:
            return gpu.linear(_rows(x), weight, bias, activation=activation, plan=plan).view(*x.shape[:-1], -1)
    if activation is not None or N % 8 == 0:
        return None
    # N = 50,257 for GPT-2: result rows that start at multiples of 8 are written six times as fast.
    rows, even = _rows(x), N // 8 * 8
    out = rows.new_empty(len(rows), even + 8)
    torch.mm(rows, weight[:even].T, out=out[:, :even])
    torch.mm(rows, weight[even:].T, out=out[:, even:N])
    return (out[:, :N] if bias is None else out[:, :N].add_(bias)).view(*x.shape[:-1], -1)


def _rows(x: Float[Tensor, "*_ D"]) -> Float[Tensor, "R D"]:
    """Rows one after the other in memory."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def rows(weight: Float[Tensor, "N D"] | Packed, ids: Int[Tensor, "*_"]) -> Float[Tensor, "*_ D"] | None:
    """The rows of a packed weight, unpacked; None for a plain one."""
    return weight.rows(ids) if isinstance(weight, Packed) else None


def packed_product(
    x: Float[Tensor, "*_ D"],
    q: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    bias: Float[Tensor, " N"] | None,
    N: int,
    *,
    inputs: int,
    is_tiled: bool,
) -> Float[Tensor, "*_ N"] | None:
    """x W^T + b with W in the formats of quantization/integer.py: int4 has `mins`, int8 has none. `inputs`: bits of x."""
    if not x.numel() or not is_plain(x, q):
        return None
    if q.is_cuda:
        if x.numel() // x.shape[-1] > CUDA_ROWS or inputs == 8 or not has_triton():
            return None
        from clearhead.kernels import gpu

        if mins is None:
            return gpu.linear_int8(_rows(x), q, scales, bias).view(*x.shape[:-1], -1)
        return gpu.linear_int4(_rows(x), q, scales, mins, bias).view(*x.shape[:-1], -1)
    if x.device.type != "cpu" or not native.is_there() or is_tiled != native.has_tiles():
        return None
    wide = None if bias is None else bias.float()
    out = native.linear_packed(_rows(x.float()), q, scales, mins, wide, N, 8 if mins is None else 4, inputs)
    return out.view(*x.shape[:-1], -1).to(x.dtype)


def pack_int4(
    weight: Float[Tensor, "N D"], shrinks: tuple[float, ...], n_fits: int
) -> tuple[Tensor, Float[Tensor, "N g"], Float[Tensor, "N g"]] | None:
    """q, scales and mins of quantization/integer.py's int4, which explains the search."""
    if weight.device.type != "cpu" or not native.is_there() or not is_plain(weight):
        return None
    return native.pack_int4(weight.float().contiguous(), shrinks, n_fits)


def search_int4(
    weights: Float[Tensor, "32 n"],
    factor: Float[Tensor, "32 32"],
    inverse: Float[Tensor, "32 32"],
    shrinks: tuple[float, ...],
    n_fits: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The values, scales, minimums and errors that `search` of quantization/int4_rounding.py explains."""
    if weights.device.type != "cpu" or not native.is_there() or not is_plain(weights):
        return None
    return native.search_int4(weights.contiguous(), factor, inverse, shrinks, n_fits)


def wants_tiles(weight: Tensor) -> bool:
    """Whether packed weights on this device lie in tiles."""
    return weight.device.type == "cpu" and native.has_tiles()


def gpu_kernels() -> ModuleType | None:
    """The Triton kernels, for a whole step of decoding; None without triton."""
    if not has_triton():
        return None
    from clearhead.kernels import gpu

    return gpu


def store(
    k: Float[Tensor, "B K E"],
    v: Float[Tensor, "B K E"],
    pool_k: Float[Tensor, "n K block E"],
    pool_v: Float[Tensor, "n K block E"],
    table: Int[Tensor, "B m"],
    positions: Int[Tensor, " B"],
) -> bool:
    """Write each row's new key and value into its block of the pool. False: not done, use torch."""
    if k.is_cuda and has_triton():
        from clearhead.kernels import gpu

        gpu.store(k, v, pool_k, pool_v, table, positions)
        return True
    if k.device.type == "cpu" and k.dtype == pool_k.dtype == torch.float32 and native.is_there():
        native.store(k, v, pool_k, pool_v, table, positions)
        return True
    return False


def paged_attention(
    q: Float[Tensor, "B H E"],
    k: Float[Tensor, "n K block E"],
    v: Float[Tensor, "n K block E"],
    table: Int[Tensor, "B m"],
    counts: Int[Tensor, " B"],
    scale: float,
    window: int,
    *,
    each: bool,
) -> Float[Tensor, "B H E"] | None:
    """One query a row over its keys in the blocks of a pool. `each`: the table names each token's slot (GPU only)."""
    if q.is_cuda and has_triton() and is_plain(q):
        from clearhead.kernels import gpu

        return gpu.paged_attention(q.contiguous(), k, v, table, counts, scale, window, each=each)
    floats = q.dtype == k.dtype == torch.float32
    if (
        q.device.type == "cpu"
        and floats
        and not each
        and not torch.is_grad_enabled()
        and is_plain(q)
        and native.is_there()
    ):
        return native.paged_attention(q, k, v, table, counts, scale, window)
    return None


def top_log_probs(
    logits: Float[Tensor, "R V"], n: int, bias: Float[Tensor, " V"] | None = None
) -> tuple[Float[Tensor, "R n"], Int[Tensor, "R n"]] | None:
    """Each row's n largest log-probabilities, after `bias` is added to them, and their ids."""
    if logits.is_cuda and bias is None and n <= 32 and has_triton():
        from clearhead.kernels import gpu

        return gpu.top_log_probs(logits, n)
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and is_plain(logits) and native.is_there():
        return native.top_log_probs(logits.contiguous(), n, bias)
    return None


def draw(logits: Float[Tensor, "R V"], seeds: Int[Tensor, " R"], steps: Int[Tensor, " R"]) -> Int[Tensor, " R"] | None:
    """A token for each row with the probabilities softmax(logits), as `sample` in sampling/strategy.py draws it."""
    is_float = logits.device.type == seeds.device.type == "cpu" and logits.dtype == torch.float32
    if not is_float or not logits.numel() or not is_plain(logits) or not native.is_there():
        return None
    return native.draw(logits.contiguous(), seeds.long().contiguous(), steps.long().contiguous())
