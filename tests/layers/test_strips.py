"""The fused kernel at long lengths: strips of queries change nothing, and no T x T tensor is ever made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from clearhead.layers import strips as strips_of
from clearhead.layers.attention import attend
from clearhead.layers.masks import Mask, causal, documents, padding, window
from clearhead.layers.positions import Bias
from clearhead.layers.relative_positions import Alibi, RelativeBuckets

# float64, numbers near 1, up to a thousand terms a sum: errors stay near 1e-14.
TIGHT = dict(rtol=0, atol=1e-12)

B, H, K, E = 2, 6, 3, 5


def random_qkv(T: int, S: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = (B, H, T, E), (B, K, S, E), (B, K, S, E)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def real(S: int) -> Tensor:
    """Padding in front of the first row, at the end and in the middle of the second."""
    real = torch.ones(B, S).bool()
    real[0, :71] = False
    real[1, S - 67 :] = False
    real[1, 13:17] = False
    return real


def ids(S: int) -> Tensor:
    return torch.stack([torch.arange(S) // 31, torch.arange(S) // 83])


@pytest.fixture
def strips(monkeypatch: pytest.MonkeyPatch) -> list[slice]:
    """Forces strips, and tells which were computed."""
    seen: list[slice] = []
    whole = strips_of._strip

    def watched(*args: Any, **options: Any) -> Tensor:
        seen.append(options.get("rows", slice(None)))
        return whole(*args, **options)

    monkeypatch.setattr(strips_of, "WRITTEN_OUT", 97)
    monkeypatch.setattr(strips_of, "_strip", watched)
    return seen


MASKS: dict[str, Callable[[int], Mask]] = {
    "none": lambda S: Mask(),
    "causal": lambda S: causal(),
    "window": lambda S: window(29),
    "causal window": lambda S: causal() & window(29),
    "padding": lambda S: padding(real(S)),
    "causal padding": lambda S: causal() & padding(real(S)),
    "window padding": lambda S: window(29) & padding(real(S)),
    "documents": lambda S: documents(ids(S)),
    "all": lambda S: causal() & window(101) & padding(real(S)) & documents(ids(S)),
}


def check_against_explicit(qkv: list[Tensor], mask: Mask, bias: Bias | None) -> None:
    """The output, and the gradients of q, k, v and the bias; without gradients strips are kept differently, so both ways."""
    table = bias if isinstance(bias, Tensor) else bias.weight if isinstance(bias, RelativeBuckets) else None
    inputs = qkv if table is None else [*qkv, table]
    expected = attend(*qkv, mask, bias=bias, kernel="explicit")
    ours = attend(*qkv, mask, bias=bias, kernel="fused")
    torch.testing.assert_close(ours, expected, **TIGHT)
    weight = torch.randn_like(ours)
    grads = [torch.autograd.grad(out, inputs, weight) for out in (ours, expected)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, **TIGHT)
    with torch.no_grad():
        torch.testing.assert_close(attend(*qkv, mask, bias=bias, kernel="fused"), expected, **TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "alibi", "t5", "written"])
@pytest.mark.parametrize("name", MASKS)
def test_strips_change_nothing(strips: list[slice], name: str, kind: str) -> None:
    T, S = 199, 211
    biases: dict[str, Bias | None] = {
        "none": None,
        "alibi": Alibi(n_heads=H),
        "t5": RelativeBuckets(n_heads=H).double(),
        "written": torch.randn(1, H, T, S, dtype=torch.float64, requires_grad=True),
    }
    check_against_explicit(random_qkv(T, S), MASKS[name](S), biases[kind])
    if (name, kind) != ("none", "none"):  # that needs no mask, so no strips
        assert len(strips) > 1


@pytest.mark.parametrize("mask", [window(67), causal() & window(67)], ids=["window", "causal window"])
@pytest.mark.parametrize("T", [1031, 151])
def test_a_narrow_window_goes_in_strips_by_itself(mask: Mask, T: int) -> None:
    S = 1031
    q, k, v = random_qkv(T, S)
    check_against_explicit([q[:1, :2], k[:1, :1], v[:1, :1]], mask, None)
    assert strips_of.pays(mask, None, T, S)


def test_every_query_is_in_one_strip(strips: list[slice]) -> None:
    with torch.no_grad():
        attend(*random_qkv(199, 211), causal(), kernel="fused")
    assert [row for rows in strips for row in range(199)[rows]] == list(range(199))


def test_strips_computed_twice_drop_the_same_weights(strips: list[slice]) -> None:
    """The output is linear in v, so v . dv = weight . output: only if the backward pass saw the forward pass's weights."""
    q, k, v = random_qkv(199, 211)
    out = attend(q, k, v, causal(), dropout=0.3, kernel="fused")
    weight = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, [v], weight)
    # sums of 11,940 float64 products near 1
    torch.testing.assert_close((v * dv).sum(), (weight * out).sum(), rtol=0, atol=1e-9)
    assert len(strips) > 4  # 4 strips, some computed again


@given(
    sizes=st.tuples(st.integers(1, 23), st.integers(1, 19)),
    causal_too=st.booleans(),
    width=st.integers(0, 23),
    ends=st.tuples(st.integers(0, 22), st.integers(1, 23)),
)
def test_reach_leaves_out_only_what_is_forbidden(
    sizes: tuple[int, int], causal_too: bool, width: int, ends: tuple[int, int]
) -> None:
    T, S = sizes
    rows = slice(min(ends[0], T - 1), min(max(ends), T))
    rows = slice(rows.start, max(rows.stop, rows.start + 1))
    mask = Mask(causal=causal_too, window=width)
    cols = strips_of._reach(mask, rows, T, S)
    assert 0 <= cols.start < cols.stop <= S
    for t in range(T)[rows]:
        i = t + S - T
        allowed = [j for j in range(S) if (not causal_too or j <= i) and (not width or abs(j - i) < width)]
        assert all(cols.start <= j < cols.stop for j in allowed)
    if width:  # and it leaves out enough: memory is bounded by the window
        assert cols.stop - cols.start <= rows.stop - rows.start + 2 * width


def test_reach_of_keys_out_of_order_is_everything() -> None:
    placed = causal() & padding(real(211))
    assert range(211)[strips_of._reach(placed, slice(0, 64), 211, 211)] == range(211)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory held at once during `work`, beyond what was held before: torch's own count of each allocation."""
    work()  # first, so that nothing made once and kept is counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


# One row of the batch, one head: what is linear in T is small against the pairs.
LONG: dict[str, Callable[[int], Mask]] = {
    "none": lambda S: Mask(),
    "causal": lambda S: causal(),
    "window": lambda S: window(29),
    "causal window": lambda S: causal() & window(29),
    "padding": lambda S: padding(real(S)[1:]),
    "causal padding": lambda S: causal() & padding(real(S)[1:]),
    "causal documents": lambda S: causal() & documents(ids(S)[1:]),
}


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", LONG)
def test_no_pair_of_tokens_costs_a_byte(monkeypatch: pytest.MonkeyPatch, name: str, backward: bool) -> None:
    """All memory at its peak is less than one byte a pair: the smallest T x T mask would not fit."""
    monkeypatch.setattr(strips_of, "WRITTEN_OUT", 2**17)  # the real limit, 2^24, is for lengths too slow for a test
    T = 2003
    mask = LONG[name](T)
    q, k, v = (torch.randn(1, 1, T, E, requires_grad=backward) for _ in "qkv")

    def work() -> None:
        out = attend(q, k, v, mask, kernel="fused")
        if backward:
            torch.autograd.grad(out.sum(), [q, k, v])

    assert peak_bytes(work) < T * T
    if name == "causal":  # the measure itself is right: the explicit kernel does hold them
        assert peak_bytes(lambda: attend(q, k, v, mask, kernel="explicit")) > 4 * T * T


@pytest.mark.parametrize("kernel", ["explicit", "fused"])
def test_shared_key_heads_are_not_copied(kernel: str) -> None:
    """Beyond the output, a call holds less than one copy of k for all query heads. (The scores are small here.)"""
    T, heads, width = 101, 16, 2039
    q, k = torch.randn(1, heads, T, width), torch.randn(1, 2, T, width)
    with torch.no_grad():
        spare = peak_bytes(lambda: attend(q, k, k, causal(), kernel=kernel)) - q.nbytes
    assert spare < k.nbytes * heads // 2


def test_shared_key_heads_need_less_memory_to_train() -> None:
    T, heads, width = 211, 12, 61

    def work(n_kv_heads: int) -> None:
        q, k, v = (torch.ones(1, n, T, width, requires_grad=True) for n in (heads, n_kv_heads, n_kv_heads))
        torch.autograd.grad(attend(q, k, v, causal(), kernel="fused").sum(), [q, k, v])

    assert peak_bytes(lambda: work(2)) < peak_bytes(lambda: work(heads))
