"""The most likely tokens, with their log-probabilities."""
# triton has no types, and kernels are a language of their own.
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.kernels.gpu.launch import pdl_options, start_kernel

LOWEST = tl.constexpr(-(2**63))


@triton.jit
@no_type_check
def _pack(value, index):
    """A number and its index as one integer that sorts by number; among equal numbers the lower index is the larger integer."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
@no_type_check
def _unpack(key):
    ordered = (key >> 32).to(tl.int32)
    value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return value, 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
@no_type_check
def _best_of_groups(
    logits, bests, tops, exp_sums, row_stride, V,
    PART: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one row: the maximum of each group of neighbours, the maximum of all, and the sum of exp(x - that maximum)."""
    start_kernel(PDL)
    part, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = part * (PART // WIDTH) + tl.arange(0, PART // WIDTH)
    at = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(logits + r * row_stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    best = tl.max(x, 1)
    tl.store(bests + r * (PARTS * (PART // WIDTH)) + group, best)
    part_top = tl.max(best, 0)
    exp_sum = tl.sum(tl.sum(tl.exp(x - tl.where(part_top == float("-inf"), 0.0, part_top)), 1), 0)
    tl.store(tops + r * PARTS + part, part_top)
    tl.store(exp_sums + r * PARTS + part, exp_sum)


@triton.jit
@no_type_check
def _top_of_row(
    logits, bests, tops, exp_sums, values, ids, row_stride, V,
    k: tl.constexpr, KP: tl.constexpr, PARTS: tl.constexpr, PARTSP: tl.constexpr,
    GROUPS: tl.constexpr, GROUPSP: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The k best tokens are in the k best groups: each of these has a token at least as good as any token outside them."""
    start_kernel(PDL)
    r, p = tl.program_id(0).to(tl.int64), tl.arange(0, PARTSP)
    part_top = tl.load(tops + r * PARTS + p, mask=p < PARTS, other=float("-inf"))
    exp_sum = tl.load(exp_sums + r * PARTS + p, mask=p < PARTS, other=0.0)
    top = tl.max(part_top, 0)
    log_sum = top + tl.log(tl.sum(exp_sum * tl.exp(part_top - top), 0))

    group, i = tl.arange(0, GROUPSP), tl.arange(0, KP)
    best = tl.load(bests + r * GROUPS + group, mask=group < GROUPS, other=float("-inf"))
    keys = tl.where(group * WIDTH < V, _pack(best, group), LOWEST)
    chosen = tl.full((KP,), 0x7FFFFFFF // WIDTH, tl.int32)  # no group: past the end
    for n in tl.range(k):
        key = tl.max(keys, 0)
        chosen = tl.where((i == n) & (key != LOWEST), _unpack(key)[1].to(tl.int32), chosen)
        keys = tl.where(keys == key, LOWEST, keys)

    at = chosen[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(logits + r * row_stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    keys = tl.where(at < V, _pack(x, at), LOWEST)
    for n in tl.range(k):
        key = tl.max(tl.max(keys, 1), 0)
        value, index = _unpack(key)
        tl.store(values + r * k + n, value - log_sum)
        tl.store(ids + r * k + n, index)
        keys = tl.where(keys == key, LOWEST, keys)


def top_log_probs(
    logits: Float[Tensor, "R V"], k: int, *, part: int = 4096, width: int = 32, warps: int = 4
) -> tuple[Float[Tensor, "R k"], Int[Tensor, "R k"]]:
    """The k (at most 32) largest of log_softmax(row), descending, of equals the lower id first; float32 and int64."""
    R, V = logits.shape
    assert 1 <= k <= min(V, 32)
    assert logits.stride(1) == 1
    parts = triton.cdiv(V, part)
    groups = parts * (part // width)
    bests = torch.empty(R, groups, dtype=torch.float32, device=logits.device)
    sums = torch.empty(2, R, parts, dtype=torch.float32, device=logits.device)
    _best_of_groups[(parts, R)](
        logits, bests, sums[0], sums[1], logits.stride(0), V,
        PART=part, PARTS=parts, WIDTH=width, num_warps=4, **pdl_options(logits.device),
    )  # fmt: skip
    values = torch.empty(R, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(R, k, dtype=torch.int64, device=logits.device)
    _top_of_row[(R,)](
        logits, bests, sums[0], sums[1], values, ids, logits.stride(0), V,
        k=k, KP=triton.next_power_of_2(k), PARTS=parts, PARTSP=triton.next_power_of_2(parts),
        GROUPS=groups, GROUPSP=triton.next_power_of_2(groups), WIDTH=width, num_warps=warps, **pdl_options(logits.device),
    )  # fmt: skip
    return values, ids
