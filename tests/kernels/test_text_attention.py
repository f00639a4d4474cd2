"""The CPU's attention of whole texts (native.cpp) against float64: alone and packed, by any number of threads, and who takes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from clearhead.kernels import native
from clearhead.layers.attention import attend
from clearhead.layers.masks import causal, window
from clearhead.layers.packing import across, packed, packed_at

pytestmark = pytest.mark.skipif(not native.is_there(), reason=str(native.why_not()))

QKV = tuple[Tensor, Tensor, Tensor]


def assert_near(ours: Tensor, expected: Tensor) -> None:
    # float32: scores up to about 10 and a softmax of them, then a mean of numbers near 1
    torch.testing.assert_close(ours.double(), expected.double(), rtol=0, atol=1e-5)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def equation(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    scores = q.double() @ k.transpose(-2, -1) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ v


def projected(B: int, T: int, heads: int, width: int, S: int = 0, kv_heads: int = 0) -> QKV:
    """As products leave them: side by side in each token's row."""
    first, second = (
        torch.randn(B, T, heads * width),
        torch.randn(B, S or T, 2 * (kv_heads or heads) * width),
    )
    q, k, v = (x.unflatten(-1, (-1, width)).transpose(1, 2) for x in (first, *second.chunk(2, -1)))
    return q, k, v


def each(change: Callable[[Tensor], Tensor], qkv: QKV) -> QKV:
    q, k, v = qkv
    return change(q), change(k), change(v)


def part(qkv: QKV, rows: slice, tokens: slice) -> QKV:
    return each(lambda x: x[rows, :, tokens], qkv)


@pytest.mark.parametrize("width", [16, 32, 48, 64, 80, 128, 208])
@pytest.mark.parametrize(("B", "T", "S"), [(3, 2, 1), (1, 7, 13), (2, 67, 61), (1, 131, 523), (2, 37, 1031)])
def test_is_the_equation(B: int, T: int, S: int, width: int, threads: int) -> None:
    q, k, v = qkv = projected(B, T, 6, width, S, 2)
    scale = width**-0.5
    ours = native.text_attention(q, k, v, scale)
    assert_near(ours, equation(q, k, v, scale, is_causal=False))
    for b in range(B):
        alone = native.text_attention(*part(qkv, slice(b, b + 1), slice(None)), scale)
        assert torch.equal(alone[0], ours[b]), "alone as in the batch"


@pytest.mark.parametrize("T", [2, 5, 17, 127, 513, 1091])
def test_causal(T: int, threads: int) -> None:
    q, k, v = projected(2, T, 3, 32)
    ours = native.text_attention(q, k, v, 0.2, causal=True)
    assert_near(ours, equation(q, k, v, 0.2, is_causal=True))
    for x in (k, v):
        x[:, :, T - 1] = 1e4
    later = native.text_attention(q, k, v, 0.2, causal=True)
    assert torch.equal(later[:, :, :-1], ours[:, :, :-1]), "the future changes nothing"


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_texts(is_causal: bool, threads: int) -> None:
    lengths = [1, 2, 129, 5, 1, 1, 601, 31, 16]
    q, k, v = qkv = projected(1, sum(lengths), 5, 32)
    mask = packed(lengths)[0]
    with torch.no_grad():
        ours = attend(q, k, v, mask & causal() if is_causal else mask)
        for low, high in itertools.pairwise([0, *itertools.accumulate(lengths)]):
            text = part(qkv, slice(None), slice(low, high))
            scale = 32**-0.5
            assert_near(ours[:, :, low:high], equation(*text, scale, is_causal))
            assert torch.equal(native.text_attention(*text, scale, causal=is_causal), ours[:, :, low:high])


def test_across_texts_and_without_any() -> None:
    """Keys of other texts; and texts of no key, whose queries get zeros, or of no query."""
    starts = [torch.tensor(at, dtype=torch.int32) for at in ([0, 3, 3, 10, 12], [0, 7, 9, 9, 20])]
    masks = [packed_at(at, int(at[-1]), 11)[0] for at in starts]
    q, k, v = projected(1, 12, 3, 16, 20)
    with torch.no_grad():
        ours = attend(q, k, v, across(masks[0], masks[1]))
    for t, s in ((slice(0, 3), slice(0, 7)), (slice(10, 12), slice(9, 20))):
        expected = equation(q[:, :, t], k[:, :, s], v[:, :, s], 0.25, is_causal=False)
        assert_near(ours[:, :, t], expected)
    assert not ours[:, :, 3:10].any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_comes_out_again(wrong: float) -> None:
    q, k, v = projected(2, 19, 2, 16)
    k[1, 1, 7, 3] = wrong
    found, expected = native.text_attention(q, k, v, 0.25), F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(found.isnan().any(-1), expected.isnan().any(-1))


def test_far_apart_scores() -> None:
    """What the largest score drowns is 0, also where it comes in a later block of keys."""
    q, k, v = torch.ones(1, 1, 2, 16), torch.full((1, 1, 1200, 16), -1e3), torch.randn(1, 1, 1200, 16)
    k[0, 0, 1100] = 1e3
    assert torch.equal(native.text_attention(q, k, v, 1.0)[0, 0], v[0, 0, 1100].expand(2, -1))


def test_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for texts in float32 without gradient, and for nothing else; whatever is taken, results agree."""
    taken: list[int] = []
    real = native.text_attention

    def seen(q: Tensor, *rest: Any, **named: Any) -> Tensor:
        taken.append(q.shape[2])
        return real(q, *rest, **named)

    monkeypatch.setattr(native, "text_attention", seen)
    q, k, v = qkv = projected(1, 20, 3, 16)
    texts = packed([7, 13])[0]
    with torch.no_grad():
        found = [attend(q, k, v), attend(q, k, v, causal()), attend(q, k, v, texts), attend(q, k, v, texts & causal())]
        assert taken == [20] * 4
        taken.clear()
        for mask, ours in zip((None, causal(), texts, texts & causal()), found, strict=True):
            assert_near(attend(q, k, v, mask, kernel="explicit"), ours)
        _ = attend(q, k, v, window(3)), attend(q, k, v, dropout=0.1), attend(q[:, :, :1], k, v)
        _ = attend(*each(Tensor.double, qkv)), attend(*each(lambda x: x[..., :15], qkv))
        attend(*each(lambda x: x.mT.contiguous().mT, qkv))
        attend(*each(lambda _: torch.randn(2, 3, 40, 16)[:, :, :20], qkv))
        with torch.autocast("cpu"):
            attend(q, k, v)
        with FlopCounterMode(display=False):
            attend(q, k, v)
        with pytest.warns(UserWarning, match="batching rule"):  # torch's own kernel goes one by one there
            torch.func.vmap(attend)(*each(lambda x: x[None], qkv))
        with forward_ad.dual_level():
            attend(q, k, v)
    for mask in (None, causal(), texts, texts & causal()):
        needs = q.clone().requires_grad_()
        attend(needs, k, v, mask).sum().backward()
        assert needs.grad is not None
    assert taken == []
    attend(q, k, v)  # nobody asks for gradients, though they are on
    assert taken == [20]
