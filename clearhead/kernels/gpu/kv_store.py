"""One token a row: rotary positions of queries and keys, and keys and values stored in their blocks."""
# triton has no types, and kernels are a language of their own.
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.kernels.gpu.launch import pdl_options, start_kernel


@triton.jit
@no_type_check
def _rotate_heads(
    x, to, x_head, to_head, cos, sin, real,
    HEADS: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs of some heads: (2i, 2i + 1) if interleaved, else (i, i + E/2)."""
    i = tl.arange(0, HALF)[None, :]
    if INTERLEAVED:
        one, two, angle = 2 * i, 2 * i + 1, 2 * i
    else:
        one, two, angle = i, i + E // 2, i
    h = tl.arange(0, HEADS)[:, None]
    mask = real[:, None] & (i < E // 2)
    a = tl.load(x + h * x_head + one, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + h * x_head + two, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=i < E // 2, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=i < E // 2, other=0.0).to(tl.float32)
    tl.store(to + h * to_head + one, (a * c - b * s).to(to.dtype.element_ty), mask=mask)
    tl.store(to + h * to_head + two, (b * c + a * s).to(to.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _copy(x, to, x_head, to_head, real, HEADS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr):
    h, e = tl.arange(0, HEADS)[:, None], tl.arange(0, EP)[None, :]
    mask = real[:, None] & (e < E)
    tl.store(to + h * to_head + e, tl.load(x + h * x_head + e, mask=mask), mask=mask)


@triton.jit
@no_type_check
def _find_slot(table, positions, b, table_stride, SLOTS: tl.constexpr):
    """Block and slot of a row's next token, and whether it is stored: not at a negative position."""
    position = tl.load(positions + b).to(tl.int64)
    block = tl.load(table + b * table_stride + tl.maximum(position, 0) // SLOTS).to(tl.int64)
    return block, position % SLOTS, position >= 0


@triton.jit
@no_type_check
def _store(
    k, v, pool_k, pool_v, table, positions,
    k_row, k_in_head, v_row, v_in_head, table_stride, k_block, k_head, v_block, v_head,
    K: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_kernel(PDL)
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    block, slot, stored = _find_slot(table, positions, b, table_stride, SLOTS)
    real = (head + tl.arange(0, HEADS) < K) & stored
    to_k = pool_k + block * k_block + head * k_head + slot * E
    to_v = pool_v + block * v_block + head * v_head + slot * E
    _copy(k + b * k_row + head * k_in_head, to_k, k_in_head, k_head, real, HEADS, E, EP)
    _copy(v + b * v_row + head * v_in_head, to_v, v_in_head, v_head, real, HEADS, E, EP)


@triton.jit
@no_type_check
def _rotate(
    x, out, cos, sin, x_row, x_head, cos_row, sin_row,
    h: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_kernel(PDL)
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    x += b * x_row + head * x_head
    out += (b * h + head) * E
    real = head + tl.arange(0, HEADS) < h
    _rotate_heads(x, out, x_head, E, cos + b * cos_row, sin + b * sin_row, real, HEADS, E, HALF, INTERLEAVED)


@triton.jit
@no_type_check
def _rotate_store(
    q, k, v, out, cos, sin, pool_k, pool_v, table, positions,
    q_row, q_head, k_row, k_in_head, v_row, v_in_head, cos_row, sin_row, table_stride, k_block, k_head, v_block, v_head,
    H: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, SLOTS: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first programs rotate query heads, the others rotate and store key/value heads."""
    start_kernel(PDL)
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    cos += b * cos_row
    sin += b * sin_row
    h = tl.arange(0, HEADS)
    if head < H:
        q += b * q_row + head * q_head
        _rotate_heads(q, out + (b * H + head) * E, q_head, E, cos, sin, head + h < H, HEADS, E, EP // 2, INTERLEAVED)
    else:
        head -= tl.cdiv(H, HEADS) * HEADS
        block, slot, stored = _find_slot(table, positions, b, table_stride, SLOTS)
        real = (head + h < K) & stored
        to_k = pool_k + block * k_block + head * k_head + slot * E
        to_v = pool_v + block * v_block + head * v_head + slot * E
        _rotate_heads(
            k + b * k_row + head * k_in_head, to_k, k_in_head, k_head, cos, sin, real, HEADS, E, EP // 2, INTERLEAVED
        )
        _copy(v + b * v_row + head * v_in_head, to_v, v_in_head, v_head, real, HEADS, E, EP)


def _heads(B: int, heads: int) -> int:
    """Heads a program: one, or several if there would be too many small programs."""
    return 1 if B * heads <= 2048 else 8


def _pool_strides(pool_k: Tensor, pool_v: Tensor, table: Tensor) -> tuple[int, ...]:
    E = pool_k.shape[-1]
    assert pool_k.stride()[2:] == pool_v.stride()[2:] == (E, 1)
    assert table.stride(1) == 1
    return table.stride(0), *pool_k.stride()[:2], *pool_v.stride()[:2]


def store(
    k: Float[Tensor, "B K E"],
    v: Float[Tensor, "B K E"],
    pool_k: Float[Tensor, "n K block E"],
    pool_v: Float[Tensor, "n K block E"],
    table: Int[Tensor, "B m"],
    positions: Int[Tensor, " B"],
) -> None:
    """Write each row's key and value at its position. A negative position writes nothing."""
    B, K, E = k.shape
    assert k.stride(-1) == v.stride(-1) == 1
    heads = _heads(B, K)
    _store[(B, triton.cdiv(K, heads))](
        k, v, pool_k, pool_v, table, positions,
        *k.stride()[:2], *v.stride()[:2], *_pool_strides(pool_k, pool_v, table),
        K=K, HEADS=heads, E=E, EP=triton.next_power_of_2(E), SLOTS=pool_k.shape[2], num_warps=1, **pdl_options(k.device),
    )  # fmt: skip


def rotate(x: Float[Tensor, "B h E"], cos: Float[Tensor, "B e"], sin: Float[Tensor, "B e"]) -> Float[Tensor, "B h E"]:
    """`positions.rotate` for one token a row: e = E/2 angles for half-split pairs, e = E for interleaved ones."""
    B, h, E = x.shape
    assert x.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
    out = x.new_empty(B, h, E)
    heads = _heads(B, h)
    _rotate[(B, triton.cdiv(h, heads))](
        x, out, cos, sin, *x.stride()[:2], cos.stride(0), sin.stride(0),
        h=h, HEADS=heads, E=E, HALF=triton.next_power_of_2(E) // 2, INTERLEAVED=cos.shape[1] == E, num_warps=1,
        **pdl_options(x.device),
    )  # fmt: skip
    return out


def rotate_store(
    q: Float[Tensor, "B H E"],
    k: Float[Tensor, "B K E"],
    v: Float[Tensor, "B K E"],
    cos: Float[Tensor, "B e"],
    sin: Float[Tensor, "B e"],
    pool_k: Float[Tensor, "n K block E"],
    pool_v: Float[Tensor, "n K block E"],
    table: Int[Tensor, "B m"],
    positions: Int[Tensor, " B"],
) -> Float[Tensor, "B H E"]:
    """Rotate queries and keys, `store` keys and values, and return the queries; in one kernel."""
    (B, H, E), K = q.shape, k.shape[1]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
    out = q.new_empty(B, H, E)
    heads = _heads(B, H)
    _rotate_store[(B, triton.cdiv(H, heads) + triton.cdiv(K, heads))](
        q, k, v, out, cos, sin, pool_k, pool_v, table, positions,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0), sin.stride(0),
        *_pool_strides(pool_k, pool_v, table),
        H=H, K=K, HEADS=heads, E=E, EP=triton.next_power_of_2(E), SLOTS=pool_k.shape[2], INTERLEAVED=cos.shape[1] == E, num_warps=1,
        **pdl_options(q.device),
    )  # fmt: skip
    return out
