"""The cache by itself: reading in pieces is reading at once, whatever the pieces, the padding, the window and the rows kept.

Models that use it are in tests/models/test_cached_forward.py; the paged cache of the engine is in tests/engine/test_kv_cache.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from clearhead.errors import InputError
from clearhead.layers.attention import attend
from clearhead.layers.cache import Cache
from clearhead.layers.masks import ABSENT, Mask, causal, padding, window

B, LAYERS, K, H, E, LENGTH = 3, 2, 2, 4, 5, 13

# float64, the same sums over the same keys in another order
TIGHT = dict(rtol=0, atol=1e-12)


def new_cache(*, batch: int = B, max_len: int = LENGTH, window: int = 0) -> Cache:
    return Cache(
        batch=batch, max_len=max_len, n_layers=LAYERS, n_kv_heads=K, d_head=E, window=window, dtype=torch.float64
    )


def random_qkv(rows: int = B, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """For each layer; the layers' keys differ, so that one written into another's share would show."""
    q, k, v = (torch.randn(LAYERS, rows, n, length, E, dtype=torch.float64) for n in (H, K, K))
    return q, k, v


def read(cache: Cache, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, width: int) -> Tensor:
    """What a model does with a piece: check, place, extend and attend in each layer, advance."""
    batch, T = q.shape[1], q.shape[3]
    cache.check(batch, T)
    stands, mask = cache.place(T, real)
    mask = replace(mask, causal=True, window=width)
    out = [attend(q[i], *layer.extend(k[i], v[i]), mask, kernel="explicit") for i, layer in enumerate(cache.layers)]
    cache.advance(stands)
    return torch.stack(out)


def read_whole(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, width: int) -> Tensor:
    mask = causal() & (Mask() if real is None else padding(real)) & (window(width) if width else Mask())
    return torch.stack([attend(q[i], k[i], v[i], mask, kernel="explicit") for i in range(LAYERS)])


def cut(sizes: list[int], length: int = LENGTH) -> list[slice]:
    """The sizes drawn, cut to what is left of the length."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [slice(a, min(a + n, length)) for a, n in zip(starts, sizes, strict=True) if a < length]


pieces = st.lists(st.integers(1, LENGTH), min_size=LENGTH, max_size=LENGTH).map(cut)
PROMPTS = torch.ones(B, LENGTH).bool()  # of several lengths, padded left and in the middle; then one token each
PROMPTS[1, :4] = PROMPTS[2, 3:6] = False
reals = st.one_of(
    st.none(),
    st.lists(st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH), min_size=B, max_size=B).map(torch.tensor),
)


@pytest.mark.slow
@settings(max_examples=200)
@given(parts=pieces, width=st.integers(0, LENGTH + 2), real=reals)
@example(parts=cut([1] * LENGTH), width=0, real=None)
@example(parts=cut([1] * LENGTH), width=5, real=None)
@example(parts=cut([LENGTH]), width=5, real=None)
@example(parts=cut([4, 3, 1, 5]), width=3, real=torch.arange(LENGTH)[None] >= torch.tensor([[0], [6], [11]]))
@example(parts=cut([6] + [1] * (LENGTH - 1)), width=0, real=PROMPTS)
@example(parts=cut([6] + [1] * (LENGTH - 1)), width=4, real=PROMPTS)
def test_pieces_are_the_whole(parts: list[slice], width: int, real: Tensor | None) -> None:
    """With a window, memory is bounded by it; the queries compared are the real ones."""
    q, k, v = random_qkv()
    cache = new_cache(window=width)
    out = [
        read(cache, q[..., at, :], k[..., at, :], v[..., at, :], None if real is None else real[:, at], width)
        for at in parts
    ]
    ours, expected = torch.cat(out, 3), read_whole(q, k, v, real, width)
    if real is not None:
        shown = real[None, :, None, :, None].expand_as(ours)
        ours, expected = ours[shown], expected[shown]
    torch.testing.assert_close(ours, expected, **TIGHT)
    assert cache.length == LENGTH
    assert cache.layers[0].k.shape[2] == (min(width, LENGTH) or LENGTH)


@settings(max_examples=50)
@given(parts=pieces, width=st.integers(1, LENGTH), real=reals)
def test_the_ring_holds_the_last_keys_by_position(parts: list[slice], width: int, real: Tensor | None) -> None:
    _, k, v = random_qkv()
    cache = new_cache(window=width)
    for at in parts:
        read(cache, torch.zeros(LAYERS, B, H, at.stop - at.start, E).double(), k[..., at, :], v[..., at, :],
             None if real is None else real[:, at], width)  # fmt: skip
    for b in range(B):
        tokens = [t for t in range(LENGTH) if real is None or real[b, t]]
        for place, t in list(enumerate(tokens))[-width:]:
            for i, layer in enumerate(cache.layers):
                assert torch.equal(layer.k[b, :, place % width], k[i, b, :, t])
                assert torch.equal(layer.v[b, :, place % width], v[i, b, :, t])


def test_positions_count_real_tokens() -> None:
    cache = new_cache(batch=2)
    stands, _ = cache.place(3, torch.tensor([[True, True, True], [False, True, False]]))
    assert stands.tolist() == [[0, 1, 2], [ABSENT, 0, ABSENT]]
    cache.advance(stands)
    assert cache.place(2, None)[0].tolist() == [[3, 4], [1, 2]]
    plain = new_cache(batch=2)
    plain.advance(plain.place(3, None)[0])
    assert plain.place(2, None)[0].tolist() == [3, 4]  # the same in every row: one row says it


def test_placing_alone_reads_nothing() -> None:
    """A call that fails half-way can be made again."""
    q, k, v = random_qkv()
    cache = new_cache()
    cache.place(5, None)
    assert cache.length == 0
    torch.testing.assert_close(read(cache, q, k, v, None, 0), read_whole(q, k, v, None, 0), **TIGHT)


@pytest.mark.parametrize("width", [0, 4])
def test_overrunning_is_an_error(width: int) -> None:
    """With a window too: max_len is what the caller promised, and nothing has been written when it is broken."""
    q, k, v = random_qkv()
    cache = new_cache(window=width)
    read(cache, q[..., :10, :], k[..., :10, :], v[..., :10, :], None, width)
    before = [layer.k.clone() for layer in cache.layers]
    with pytest.raises(InputError, match=r"cache is full: 10 tokens held \+ 4 new > max_len=13.*max_len=14\) or more"):
        cache.check(B, 4)
    assert all(torch.equal(layer.k, kept) for layer, kept in zip(cache.layers, before, strict=True))
    cache.check(B, 3)


def test_another_batch_is_an_error() -> None:
    with pytest.raises(InputError, match=r"holds 3 rows, the input 2; use new_cache\(batch=2"):
        new_cache().check(2, 1)


def test_an_empty_cache_is_an_error() -> None:
    with pytest.raises(InputError, match=r"at least 1; got batch=0, max_len=13"):
        new_cache(batch=0)
    with pytest.raises(InputError, match=r"at least 1; got batch=3, max_len=0"):
        new_cache(max_len=0)
