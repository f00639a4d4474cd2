"""Positions: each kind against its paper's formula, and against Hugging Face's independent code."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import ConfigError, InputError
from clearhead.layers.positions import DistanceBias, Learned, Positions, Rotary, Sinusoidal, check_length, rotate
from clearhead.layers.relative_positions import Alibi, RelativeBuckets
from clearhead.lessons import references

from .reference import alibi_slopes, t5_bucket

CPU = torch.device("cpu")

# The kinds without a parameter compute in float32: numbers up to 1, rounded once or twice at 24 significant bits.
FLOAT32 = dict(rtol=0, atol=1e-6)


@pytest.mark.parametrize("d_model", [2, 14, 38])
def test_sinusoids_are_the_papers(d_model: int) -> None:
    places = [0, 1, 7, 101, 5003, 100_003]
    table = Sinusoidal(d_model=d_model).table(torch.tensor(places))
    torch.testing.assert_close(table, torch.tensor([references.sinusoid(p, d_model) for p in places]), **FLOAT32)


def test_halves_hold_the_same_numbers_in_another_order() -> None:
    places = torch.tensor([3, 1, 211])
    pairs, halves = Sinusoidal(d_model=14).table(places), Sinusoidal(d_model=14, halves=True).table(places)
    assert torch.equal(halves, torch.cat([pairs[:, 0::2], pairs[:, 1::2]], -1))


def test_halves_are_marians() -> None:
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    theirs = MarianSinusoidalPositionalEmbedding(53, 14).create_weight()
    torch.testing.assert_close(Sinusoidal(d_model=14, halves=True).table(torch.arange(53)), theirs, **FLOAT32)


def test_a_step_is_a_rotation() -> None:
    """PE(pos + k) is a linear function of PE(pos), the same for each pos: the reason the paper gives for sinusoids."""
    table = Sinusoidal(d_model=14).table(torch.arange(97)).double()
    sin, cos = table[:, 0::2], table[:, 1::2]
    k = 11
    dot = sin[k:] * sin[:-k] + cos[k:] * cos[:-k]
    torch.testing.assert_close(dot, dot[:1].expand_as(dot), **FLOAT32)


@pytest.mark.parametrize("places", [torch.tensor([2, 0, 5]), torch.tensor([[2, 0, 5], [1, 1, 3]])], ids=["T", "B T"])
def test_positions_enter_by_addition(places: torch.Tensor) -> None:
    x = torch.randn(2, 3, 14)
    learned = Learned(d_model=14, max_len=7)
    assert torch.equal(learned.enter(x, places), x + learned.weight[places])
    sinusoidal = Sinusoidal(d_model=14)
    assert torch.equal(sinusoidal.enter(x, places), x + sinusoidal.table(places))


def test_the_table_is_not_rounded_with_the_model() -> None:
    """A table kept as a buffer would be: bfloat16 can't even tell position 257 from 256."""
    positions = Sinusoidal(d_model=14).bfloat16()
    entered = positions.enter(torch.zeros(1, 3, 14, dtype=torch.bfloat16), torch.tensor([256, 257, 258]))
    exact = torch.tensor([[references.sinusoid(p, 14) for p in (256, 257, 258)]])
    assert torch.equal(entered, exact.bfloat16())


@pytest.mark.parametrize("kind", [Positions(), Sinusoidal(d_model=14), Rotary(d_head=6), Alibi(n_heads=5)])
def test_what_is_computed_is_not_saved(kind: Positions) -> None:
    assert not kind.state_dict()


def test_each_kind_answers_only_its_own_questions() -> None:
    x, places = torch.randn(2, 3, 14), torch.arange(3)
    for kind in (Positions(), Rotary(d_head=6), Alibi(n_heads=5), RelativeBuckets(n_heads=5)):
        assert torch.equal(kind.enter(x, places), x)
    for kind in (Positions(), Sinusoidal(d_model=14), Learned(d_model=14, max_len=3), Alibi(n_heads=5)):
        assert kind.angles(places) is None
    for kind in (Positions(), Sinusoidal(d_model=14), Learned(d_model=14, max_len=3), Rotary(d_head=6)):
        assert kind.bias is None
    for kind in (Alibi(n_heads=5), RelativeBuckets(n_heads=5)):
        assert kind.bias is kind


def test_half_split_pairs_turn_as_complex_numbers() -> None:
    x, places = torch.randn(2, 3, 5, 14, dtype=torch.float64), torch.tensor([0, 1, 4, 9, 101])
    ours = rotate(x, Rotary(d_head=14, base=500.0).angles(places))
    # float32 angles up to 101, good to 101 * 2^-24
    torch.testing.assert_close(ours, references.turn(x, places, 500.0), rtol=0, atol=4e-5)


def test_interleaved_pairs_turn_as_complex_numbers() -> None:
    x, places = torch.randn(2, 3, 5, 14, dtype=torch.float64), torch.tensor([0, 1, 4, 9, 101])
    angles = places[:, None] * 10_000.0 ** (-2 * torch.arange(7, dtype=torch.float64) / 14)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.exp(1j * angles)
    ours = rotate(x, Rotary(d_head=14, interleaved=True).angles(places))
    # as above
    torch.testing.assert_close(ours, torch.view_as_real(turned).flatten(-2), rtol=0, atol=4e-5)


@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [False, True])
@given(i=st.integers(0, 97), j=st.integers(0, 97), shift=st.integers(1, 101))
def test_scores_see_only_the_distance(interleaved: bool, i: int, j: int, shift: int) -> None:
    rotary = Rotary(d_head=14, interleaved=interleaved)
    q, k = torch.randn(1, 1, 1, 14, dtype=torch.float64), torch.randn(1, 1, 1, 14, dtype=torch.float64)
    scores = []
    for start in (0, shift):
        turned = [rotate(x, rotary.angles(torch.tensor([p + start]))) for x, p in ((q, i), (k, j))]
        scores.append((turned[0] * turned[1]).sum())
    # 14 products of numbers near 1, float32 angles up to 200
    torch.testing.assert_close(*scores, rtol=0, atol=2e-3)


def test_positions_of_each_row_turn_that_row() -> None:
    rotary, x = Rotary(d_head=14), torch.randn(2, 3, 5, 14)
    places = torch.tensor([[0, 1, 2, 3, 4], [7, 2, 2, 0, 11]])
    rows = [rotate(x[b : b + 1], rotary.angles(places[b])) for b in range(2)]
    assert torch.equal(rotate(x, rotary.angles(places)), torch.cat(rows))


def test_rotation_keeps_the_type() -> None:
    """bfloat16 queries turned by float32 angles are bfloat16 again, and rounded once."""
    x, angles = torch.randn(1, 3, 5, 14), Rotary(d_head=14).angles(torch.arange(5))
    turned = rotate(x.bfloat16(), angles)
    assert torch.equal(turned, rotate(x.bfloat16().float(), angles).bfloat16())


SCALINGS = {
    "default": (dict(), dict(rope_type="default", rope_theta=10_000.0)),
    "base": (dict(base=500_000.0), dict(rope_type="default", rope_theta=500_000.0)),
    "linear": (dict(scaling="linear", factor=4.0), dict(rope_type="linear", rope_theta=10_000.0, factor=4.0)),
    "llama3": (
        dict(base=500_000.0, scaling="llama3", factor=8.0, low=1.0, high=4.0, original_len=211),
        dict(
            rope_type="llama3",
            rope_theta=500_000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=211,
        ),
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rotary_is_llamas(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    ours, theirs = SCALINGS[name]
    rotary = Rotary(d_head=64, **ours)
    config = LlamaConfig(
        hidden_size=192, num_attention_heads=3, head_dim=64, max_position_embeddings=1009, rope_parameters=theirs
    )
    module = LlamaRotaryEmbedding(config)
    # the same float32 formula; the llama3 blend is written differently, so one rounding may differ
    torch.testing.assert_close(rotary.frequencies(CPU), module.inv_freq, rtol=1e-6, atol=0)
    q, k = torch.randn(2, 3, 5, 64), torch.randn(2, 1, 5, 64)
    places = torch.tensor([0, 3, 17, 101, 997])
    expected = apply_rotary_pos_emb(q, k, *module(q, places[None]))
    # frequencies up to 1 that differ by 1e-7, at positions up to 997
    for turned, wanted in zip((q, k), expected, strict=True):
        torch.testing.assert_close(rotate(turned, rotary.angles(places)), wanted, rtol=0, atol=5e-4)


def test_llama3_scaling_reaches_all_three_regions() -> None:
    """Short waves kept, long ones stretched by the factor, a smooth step between: else the test above proves little."""
    plain, scaled = (Rotary(d_head=64, **SCALINGS[name][0]).frequencies(CPU) for name in ("base", "llama3"))
    ratio = scaled / plain
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(1 / 8)
    assert ((ratio > 0.13) & (ratio < 0.99)).any()
    assert all(a >= b - 1e-6 for a, b in pairwise(ratio.tolist()))


def test_frequencies_can_be_those_of_a_rounded_model() -> None:
    exact, rounded = Rotary(d_head=14).frequencies(CPU), Rotary(d_head=14, precision="float16").frequencies(CPU)
    assert torch.equal(rounded, exact.half().float())
    assert not torch.equal(rounded, exact)


def test_rotary_scalings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"'yarn' is not known; use 'none', 'linear' or 'llama3'"):
        Rotary(d_head=14, scaling="yarn")


@pytest.mark.parametrize("n_heads", [1, 2, 3, 5, 8, 12, 16, 20])
def test_alibi_slopes_are_the_papers(n_heads: int) -> None:
    one_step_back = Alibi(n_heads=n_heads).dense(torch.tensor([[[-1]]])).flatten()
    # powers of two in float32, exact to a rounding
    torch.testing.assert_close(-one_step_back, torch.tensor(alibi_slopes(n_heads)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("n_heads", [8, 12])
def test_alibi_is_blooms(n_heads: int) -> None:
    """Theirs grows with the key's position and leaves the rest to the softmax, so only differences along a row compare."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    n = 13
    theirs = build_alibi_tensor(torch.ones(1, n), n_heads, torch.float32).reshape(1, n_heads, 1, n)
    place = torch.arange(n)
    ours = Alibi(n_heads=n_heads).dense((place[None, :] - place[:, None])[None])
    seen = (place[None, :] <= place[:, None]).expand_as(ours)
    last = ours.diagonal(dim1=-2, dim2=-1)[..., None], theirs.expand_as(ours).diagonal(dim1=-2, dim2=-1)[..., None]
    # slopes times distances up to 13, in float32
    torch.testing.assert_close((ours - last[0])[seen], (theirs - last[1])[seen], rtol=0, atol=1e-5)


def test_alibi_is_alike_to_both_sides() -> None:
    distance = torch.arange(-5, 6)[None, None]
    bias = Alibi(n_heads=7).dense(distance)
    assert torch.equal(bias, bias.flip(-1))
    assert (bias[..., 5] == 0).all()


def t5_attention(bidirectional: bool):
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=30, d_kv=5, num_heads=6, is_decoder=not bidirectional, relative_attention_num_buckets=32)
    return T5Attention(config, has_relative_attention_bias=True, layer_idx=0)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (8, 13), (16, 20)])
def test_buckets_are_t5s(both_ways: bool, n_buckets: int, max_distance: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    ours = RelativeBuckets(n_heads=5, n_buckets=n_buckets, max_distance=max_distance, both_ways=both_ways)
    distance = torch.arange(-307, 308)
    theirs = T5Attention._relative_position_bucket(
        distance, bidirectional=both_ways, num_buckets=n_buckets, max_distance=max_distance
    )
    assert torch.equal(ours.bucket(distance), theirs)
    near = torch.arange(-11, 12)
    assert ours.bucket(near).tolist() == [t5_bucket(d, n_buckets, max_distance, both_ways) for d in near.tolist()]


@pytest.mark.parametrize("both_ways", [True, False])
def test_bucket_bias_is_t5s(both_ways: bool) -> None:
    theirs = t5_attention(both_ways)
    ours = RelativeBuckets(n_heads=6, both_ways=both_ways)
    with torch.no_grad():
        ours.weight.normal_()
        theirs.relative_attention_bias.weight.copy_(ours.weight)
    keys, queries = torch.arange(211), torch.arange(30, 211)
    bias = ours.dense((keys[None, :] - queries[:, None])[None])
    assert torch.equal(bias, theirs.compute_bias(181, 211, past_seen_tokens=30))


@pytest.mark.parametrize(
    "kind",
    [
        Alibi(n_heads=5),
        Alibi(n_heads=8),
        Alibi(n_heads=12),
        RelativeBuckets(n_heads=5),
        RelativeBuckets(n_heads=5, both_ways=False),
    ],
    ids=["alibi 5", "alibi 8", "alibi 12", "t5", "t5 one way"],
)
def test_one_pair_at_a_time_is_the_same(kind: DistanceBias) -> None:
    distance = torch.tensor([-201, -17, -3, 0, 1, 2, 19, 130])
    one_by_one = [[kind.at(torch.tensor(h), d) for d in distance] for h in range(kind.n_heads)]
    dense = kind.dense(distance[None, None])[0, :, 0]
    # float32, one rounding apart
    torch.testing.assert_close(torch.stack([torch.stack(row) for row in one_by_one]), dense, rtol=1e-6, atol=0)


def test_length_is_checked_against_the_table() -> None:
    check_length(7, Learned(d_model=14, max_len=7))
    check_length(100_003, Sinusoidal(d_model=14))
    with pytest.raises(InputError, match=r"longer than the model's positions: 8 > max_len=7; shorten it, or build"):
        check_length(8, Learned(d_model=14, max_len=7))
