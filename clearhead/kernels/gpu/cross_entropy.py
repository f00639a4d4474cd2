"""Cross-entropy on a CUDA GPU: the losses and gradients of a chunk of rows from its logits, in one kernel.

A row of 50,304 logits is 100 kB: it is read twice, for the sum and for the gradient, and the second time from cache. For 8-bit
products (quantization/float8.py) the gradient is also written transposed, tile by tile.

Import this only where tensors are on a CUDA GPU: it needs triton.
"""
# triton has no types, and kernels are a language of their own.
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.kernels.gpu.float8_cast import pack

LOG2E = tl.constexpr(1.4426950408889634)
TILE = dict(FOURS=16, COLUMNS=128, num_warps=4)
LANES, WARPS = 1024, 16  # eight columns each; tuned on an H200


@triton.jit
@no_type_check
def _rows(
    logits, targets, stats, grad, n, V, W, smoothing, IGNORED: tl.constexpr, WANTED: tl.constexpr, SMOOTH: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """One row. Writes to `stats`: its loss, its mean loss over all words, whether the target is the most likely word, and its
    log-sum-exp; and if WANTED its gradient.

    Each lane keeps the maximum and the sum of its own columns, eight at a time; lanes are joined once, at the end.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    real = target != IGNORED
    c = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    logits += row * W
    chosen = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    top = tl.full((LANES,), -1.0e30, tl.float32)  # finite, so that the difference of two is 0 and not NaN
    total = tl.zeros((LANES,), tl.float32)
    spread = tl.zeros((LANES,), tl.float32)
    earlier = tl.full(
        (LANES,), -float("inf"), tl.float32
    )  # the maximum before the target: among equals the first word is the guess
    for start in range(0, V, LANES * 8):
        at = start + c
        x = tl.load(logits + at, mask=at < V, other=-float("inf")).to(tl.float32)
        last, top = top, tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp2((last - top) * LOG2E) + tl.sum(tl.exp2(x * LOG2E - (top * LOG2E)[:, None]), 1)
        if SMOOTH:
            spread += tl.sum(tl.where(at < V, x, 0.0), 1)
        if start < target:
            earlier = tl.maximum(earlier, tl.max(tl.where(at < target, x, -float("inf")), 1))
    largest = tl.max(top, 0)
    log_sum = largest + tl.log(tl.sum(total * tl.exp2((top - largest) * LOG2E), 0))
    guessed = real & (chosen == largest) & (tl.max(earlier, 0) < chosen)
    tl.store(stats + row, tl.where(real, log_sum - chosen, 0.0))
    tl.store(stats + n + row, tl.where(real, log_sum - tl.sum(spread, 0) / V, 0.0))
    tl.store(stats + 2 * n + row, guessed.to(tl.float32))
    tl.store(stats + 3 * n + row, log_sum)
    if WANTED:
        grad += row * W
        for start in range(0, W, LANES * 8):
            at = start + c
            x = tl.load(logits + at, mask=at < V, other=-float("inf")).to(tl.float32)
            y = _gradient(x, at, target, real, log_sum, V, smoothing, SMOOTH)
            tl.store(grad + at, y.to(grad.dtype.element_ty), mask=at < W)


@triton.jit
@no_type_check
def _gradient(x, column, target, real, log_sum, V, smoothing, SMOOTH: tl.constexpr):
    """softmax - (1 - e) onehot(target) - e / V. Zero for an ignored target, and past V, where x is -inf."""
    y = tl.exp2(x * LOG2E - tl.where(real, log_sum * LOG2E, float("inf")))
    if SMOOTH:
        y = tl.where(real & (column < V), y - smoothing / V, 0.0)
    return tl.where(column == target, y - (1 - smoothing), y)


@triton.jit
@no_type_check
def _row8(logits, targets, log_sums, out, r, c, n, V, W, smoothing, scale, IGNORED: tl.constexpr, SMOOTH: tl.constexpr):
    """Rows r of a tile of the gradient: written to `out`, and returned."""
    where = r[:, None].to(tl.int64) * W + c[None, :]
    target = tl.load(targets + r, mask=r < n, other=IGNORED)[:, None]
    log_sum = tl.load(log_sums + r, mask=r < n, other=0.0)[:, None]
    x = tl.load(logits + where, mask=(r < n)[:, None] & (c < V)[None, :], other=-float("inf")).to(tl.float32)
    y = scale * _gradient(x, c[None, :], target, target != IGNORED, log_sum, V, smoothing, SMOOTH)
    tl.store(out + where, y.to(out.dtype.element_ty), mask=(r < n)[:, None] & (c < W)[None, :])
    return y


@triton.jit
@no_type_check
def _gradient8(
    logits, targets, log_sums, out, transposed, n, V, W, LONG, smoothing, scale,
    IGNORED: tl.constexpr, SMOOTH: tl.constexpr, FOURS: tl.constexpr, COLUMNS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient, written plain and transposed as in float8_cast.py."""
    four = tl.program_id(1) * FOURS + tl.arange(0, FOURS)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    y0 = _row8(logits, targets, log_sums, out, 4 * four, c, n, V, W, smoothing, scale, IGNORED, SMOOTH)
    y1 = _row8(logits, targets, log_sums, out, 4 * four + 1, c, n, V, W, smoothing, scale, IGNORED, SMOOTH)
    y2 = _row8(logits, targets, log_sums, out, 4 * four + 2, c, n, V, W, smoothing, scale, IGNORED, SMOOTH)
    y3 = _row8(logits, targets, log_sums, out, 4 * four + 3, c, n, V, W, smoothing, scale, IGNORED, SMOOTH)
    there = c[:, None].to(tl.int64) * (LONG // 4) + four[None, :]
    words = pack(y0, y1, y2, y3, out.dtype.element_ty, PTX)
    tl.store(transposed + there, tl.trans(words), mask=(c < W)[:, None] & (four < LONG // 4)[None, :])


def losses(
    logits: Tensor, targets: Tensor, smoothing: float, V: int, ignored: int, *, wanted: bool
) -> tuple[Tensor, Tensor]:
    """The statistics of `_rows`, (4, n), and the gradient if `wanted`."""
    n, W = logits.shape
    stats = torch.empty(4, n, device=logits.device)
    grad = torch.empty_like(logits) if wanted else logits.new_empty(0)
    if n:
        _rows[(n,)](
            *(logits, targets, stats, grad, n, V, W, smoothing),
            IGNORED=ignored, WANTED=wanted, SMOOTH=smoothing > 0, LANES=LANES, num_warps=WARPS,
        )  # fmt: skip
    return stats, grad


def gradient8(
    logits: Tensor, targets: Tensor, log_sums: Tensor, smoothing: float, V: int, ignored: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The gradient times `scale` in e5m2: (n, W), and transposed, (W, n padded to a multiple of 16)."""
    n, W = logits.shape
    out = torch.empty(n, W, dtype=torch.float8_e5m2, device=logits.device)
    words = torch.empty(W, -(-n // 16) * 4, dtype=torch.int32, device=logits.device)
    if n:
        _gradient8[triton.cdiv(W, TILE["COLUMNS"]), triton.cdiv(words.shape[1], TILE["FOURS"])](
            *(logits, targets, log_sums, out, words, n, V, W, 4 * words.shape[1], smoothing, scale),
            IGNORED=ignored, SMOOTH=smoothing > 0, PTX=logits.is_cuda, **TILE,
        )  # fmt: skip
    return out, words.view(torch.float8_e5m2)
