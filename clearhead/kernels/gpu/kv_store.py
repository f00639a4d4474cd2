"""One token a row: queries and keys are turned, keys and values put in their blocks."""
# triton has no types, and kernels are a language of their own.
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.kernels.gpu.launch import begin, early


@triton.jit
@no_type_check
def _turn(
    x, to, x_each, to_each, cos, sin, real,
    HEADS: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Some heads turned: pairs (2i, 2i + 1), or (i, i + E/2)."""
    i = tl.arange(0, HALF)[None, :]
    if INTERLEAVED:
        one, two, angle = 2 * i, 2 * i + 1, 2 * i
    else:
        one, two, angle = i, i + E // 2, i
    h = tl.arange(0, HEADS)[:, None]
    mask = real[:, None] & (i < E // 2)
    a = tl.load(x + h * x_each + one, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + h * x_each + two, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=i < E // 2, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=i < E // 2, other=0.0).to(tl.float32)
    tl.store(to + h * to_each + one, (a * c - b * s).to(to.dtype.element_ty), mask=mask)
    tl.store(to + h * to_each + two, (b * c + a * s).to(to.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _copy(x, to, x_each, to_each, real, HEADS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr):
    h, e = tl.arange(0, HEADS)[:, None], tl.arange(0, EP)[None, :]
    mask = real[:, None] & (e < E)
    tl.store(to + h * to_each + e, tl.load(x + h * x_each + e, mask=mask), mask=mask)


@triton.jit
@no_type_check
def _place(table, positions, b, table_stride, SLOTS: tl.constexpr):
    """Block and slot of a row's next token, and whether there is one: a negative position keeps nothing."""
    position = tl.load(positions + b).to(tl.int64)
    block = tl.load(table + b * table_stride + tl.maximum(position, 0) // SLOTS).to(tl.int64)
    return block, position % SLOTS, position >= 0


@triton.jit
@no_type_check
def _store(
    k, v, pool_k, pool_v, table, positions,
    k_row, k_each, v_row, v_each, table_stride, k_block, k_head, v_block, v_head,
    K: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, SLOTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    block, slot, keeps = _place(table, positions, b, table_stride, SLOTS)
    real = (head + tl.arange(0, HEADS) < K) & keeps
    to_k = pool_k + block * k_block + head * k_head + slot * E
    to_v = pool_v + block * v_block + head * v_head + slot * E
    _copy(k + b * k_row + head * k_each, to_k, k_each, k_head, real, HEADS, E, EP)
    _copy(v + b * v_row + head * v_each, to_v, v_each, v_head, real, HEADS, E, EP)


@triton.jit
@no_type_check
def _rotate(
    x, out, cos, sin, x_row, x_each, cos_row, sin_row,
    h: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    x += b * x_row + head * x_each
    out += (b * h + head) * E
    real = head + tl.arange(0, HEADS) < h
    _turn(x, out, x_each, E, cos + b * cos_row, sin + b * sin_row, real, HEADS, E, HALF, INTERLEAVED)


@triton.jit
@no_type_check
def _rotate_store(
    q, k, v, out, cos, sin, pool_k, pool_v, table, positions,
    q_row, q_each, k_row, k_each, v_row, v_each, cos_row, sin_row, table_stride, k_block, k_head, v_block, v_head,
    H: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, SLOTS: tl.constexpr,
    INTERLEAVED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """First the programs of the queries' heads, then those of the keys' and values'."""
    begin(EARLY)
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    cos += b * cos_row
    sin += b * sin_row
    h = tl.arange(0, HEADS)
    if head < H:
        q += b * q_row + head * q_each
        _turn(q, out + (b * H + head) * E, q_each, E, cos, sin, head + h < H, HEADS, E, EP // 2, INTERLEAVED)
    else:
        head -= tl.cdiv(H, HEADS) * HEADS
        block, slot, keeps = _place(table, positions, b, table_stride, SLOTS)
        real = (head + h < K) & keeps
        to_k = pool_k + block * k_block + head * k_head + slot * E
        to_v = pool_v + block * v_block + head * v_head + slot * E
        _turn(k + b * k_row + head * k_each, to_k, k_each, k_head, cos, sin, real, HEADS, E, EP // 2, INTERLEAVED)
        _copy(v + b * v_row + head * v_each, to_v, v_each, v_head, real, HEADS, E, EP)


def _heads(B: int, heads: int) -> int:
    """Heads a program: one where there are few, for speed; several where programs would be too many and too small."""
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
        K=K, HEADS=heads, E=E, EP=triton.next_power_of_2(E), SLOTS=pool_k.shape[2], num_warps=1, **early(k.device),
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
        **early(x.device),
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
    """`store` of the turned keys and the values, and the turned queries, in one kernel."""
    (B, H, E), K = q.shape, k.shape[1]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
    out = q.new_empty(B, H, E)
    heads = _heads(B, H)
    _rotate_store[(B, triton.cdiv(H, heads) + triton.cdiv(K, heads))](
        q, k, v, out, cos, sin, pool_k, pool_v, table, positions,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0), sin.stride(0),
        *_pool_strides(pool_k, pool_v, table),
        H=H, K=K, HEADS=heads, E=E, EP=triton.next_power_of_2(E), SLOTS=pool_k.shape[2], INTERLEAVED=cos.shape[1] == E, num_warps=1,
        **early(q.device),
    )  # fmt: skip
    return out
