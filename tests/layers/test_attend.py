"""`attend`: three kernels, one equation."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clearhead.errors import InputError
from clearhead.layers.attention import attend, attention_scores, attention_weights, choose_kernel, lower
from clearhead.layers.masks import Mask, causal, documents, padding, sparse, window
from clearhead.layers.relative_positions import Alibi, RelativeBuckets
from clearhead.lessons import references

from . import drawn
from .reference import BIASES, Facts, H, K, S, T, make_bias, random_qkv

pytestmark = pytest.mark.usefixtures("uncompiled_flex")

KERNELS = ["explicit", "fused", "flex"]
TRAINED = ["explicit", "fused"]  # torch has no backward pass for flex on the CPU; tests/compiled has it on a GPU

# float64 against float64, numbers near 1, a dozen terms a sum: errors are near 1e-15.
TIGHT = dict(rtol=0, atol=1e-12)

REAL = [[True] * 3 + [False] * 2 + [True] * 6, [False] * 4 + [True] * 7]
IDS = [[0, 0, 0, 1, 1, 1, 1, 2, 2, 0, 0], [5, 5, 5, 5, 5, 5, 7, 7, 7, 7, 7]]
MASKS = {
    "none": Facts(),
    "causal": Facts(causal=True),
    "window": Facts(window=3),
    "causal window": Facts(causal=True, window=3),
    "padding": Facts(real=REAL),
    "causal padding": Facts(causal=True, real=REAL),
    "documents": Facts(documents=[IDS]),
    "all": Facts(causal=True, window=5, real=REAL, documents=[IDS]),
}


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Of a sum in which every output has another weight, so that no two gradients cancel. Unused inputs have zeros."""
    weight = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).reshape(out.shape)
    return list(torch.autograd.grad((out.double() * weight).sum(), inputs, allow_unused=True, materialize_grads=True))


def test_shapes_are_checked_in_this_run() -> None:
    """All tests here lean on it: a wrong annotation, or a wrong shape, does not pass in silence."""
    q, k, v = random_qkv()
    with pytest.raises(jaxtyping.TypeCheckError):
        attend(q, k, v[:, :, 1:])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n_kv_heads", [H, K, 1])
@pytest.mark.parametrize("name", MASKS)
def test_kernels_are_the_equation(kernel: str, n_kv_heads: int, name: str) -> None:
    facts = MASKS[name]
    q, k, v = random_qkv(K=n_kv_heads)
    expected = references.attend(q, k, v, facts.may)
    torch.testing.assert_close(attend(q, k, v, facts.mask(), kernel=kernel), expected, **TIGHT)


@pytest.mark.slow
@settings(max_examples=120)
@given(
    facts=drawn.facts(2, S),
    queries=st.integers(1, S),
    kind=st.sampled_from(BIASES),
    scale=st.sampled_from([None, 1.0, 0.3]),
)
def test_any_mask_with_any_bias(facts: Facts, queries: int, kind: str, scale: float | None) -> None:
    """Outputs of all kernels, and gradients of q, k, v and of the bias where the kernel has a backward pass."""
    q, k, v = random_qkv(T=queries, grad=True)
    bias, bias_at = make_bias(kind, facts, T=queries)
    table = bias if isinstance(bias, Tensor) else bias.weight if isinstance(bias, RelativeBuckets) else None
    inputs = [q, k, v] if table is None else [q, k, v, table]
    expected = references.attend(q, k, v, facts.may, bias=bias_at, scale=scale)
    slopes = gradients(expected, inputs) if expected.requires_grad else [torch.zeros_like(x) for x in inputs]
    for kernel in TRAINED:
        out = attend(q, k, v, facts.mask(), bias=bias, scale=scale, kernel=kernel)
        torch.testing.assert_close(out, expected, **TIGHT)
        for ours, theirs in zip(gradients(out, inputs), slopes, strict=True):
            torch.testing.assert_close(ours, theirs, **TIGHT)
    with torch.no_grad():
        out = attend(q.detach(), k.detach(), v.detach(), facts.mask(), bias=bias, scale=scale, kernel="flex")
    torch.testing.assert_close(out, expected.detach(), **TIGHT)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "atol"),
    [
        # a few roundings of numbers up to 4, at 24 significant bits
        (torch.float32, 4e-6),
        # weights and outputs up to 4 are rounded to 11 and to 8 bits
        (torch.float16, 4e-3),
        (torch.bfloat16, 3e-2),
    ],
)
@pytest.mark.parametrize("kind", ["none", "alibi", "t5"])
def test_smaller_floats(kernel: str, dtype: torch.dtype, atol: float, kind: str) -> None:
    facts = MASKS["causal padding"]
    q, k, v = random_qkv(dtype=dtype)
    bias, bias_at = make_bias(kind, facts)
    with torch.no_grad():
        out = attend(q, k, v, facts.mask(), bias=bias, kernel=kernel)
        expected = references.attend(q.double(), k.double(), v.double(), facts.may, bias=bias_at)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_scores_are_not_rounded(kernel: str, dtype: torch.dtype, atol: float) -> None:
    """A score of 30 in bfloat16 is wrong by up to 0.06, its weight by 6 %: scores must be kept in float32."""
    q, k, v = random_qkv(dtype=dtype)
    q = q * 10
    expected = references.attend(q.double(), k.double(), v.double(), Facts().may)
    torch.testing.assert_close(attend(q, k, v, kernel=kernel).double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("kernel", KERNELS)
def test_half_precision_does_not_overflow(kernel: str) -> None:
    """q k is past 65,504 here, the largest float16; the scaled scores are not."""
    q = torch.full((1, 1, 2, 64), 40.0, dtype=torch.float16)
    v = torch.randn(1, 1, 2, 64, dtype=torch.float16)
    expected = v.mean(2, keepdim=True).expand_as(v)  # all scores alike
    torch.testing.assert_close(attend(q, q, v, kernel=kernel), expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize("kernel", TRAINED)
@pytest.mark.parametrize("kind", BIASES)
def test_empty_rows_are_zero_and_send_no_gradient(kernel: str, kind: str) -> None:
    """Exactly zero, not nearly, and nothing leaks through 0 * inf."""
    # Row 0 of the batch has padding in front, so its first queries see nothing; row 1 has no real token at all.
    facts = Facts(causal=True, real=[[False] * 6 + [True] * 5, [False] * 11])
    empty = torch.tensor([[True] * 2 + [False] * 5, [True] * 7])
    q, k, v = random_qkv(grad=True)
    bias, _ = make_bias(kind, facts)
    out = attend(q, k, v, facts.mask(), bias=bias, kernel=kernel)
    table = bias if isinstance(bias, Tensor) else bias.weight if isinstance(bias, RelativeBuckets) else None
    inputs = [q, k, v] if table is None else [q, k, v, table]
    grads = gradients(out, inputs)
    assert not any(t.isnan().any() for t in [out, *grads])
    by_query = empty[:, None, :, None].expand_as(q)
    assert (out[by_query] == 0).all()
    assert (grads[0][by_query] == 0).all()
    for grad in grads[1:3]:
        assert (grad[1] == 0).all()
        assert (grad[0, :, :6] == 0).all()
    # the others are there: the mask took no more than it should
    assert (out[~by_query] != 0).all()
    assert (grads[0][~by_query].abs().sum() > 0).all()


@pytest.mark.parametrize("kind", BIASES)
def test_empty_rows_are_zero_in_flex(kind: str) -> None:
    facts = Facts(causal=True, real=[[False] * 6 + [True] * 5, [False] * 11])
    bias, _ = make_bias(kind, facts)
    with torch.no_grad():
        out = attend(*random_qkv(), facts.mask(), bias=bias, kernel="flex")
    assert (out[0, :, :2] == 0).all()
    assert (out[1] == 0).all()
    assert (out[0, :, 2:] != 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("mask", "may"),
    [
        (causal(), lambda b, i, j: j <= i),
        (window(S), lambda b, i, j: abs(j - i) < S),
        (window(4), lambda b, i, j: abs(j - i) < 4),
        (padding(torch.tensor(REAL)), lambda b, i, j: REAL[b][j]),
    ],
    ids=["causal", "window of all keys", "window", "padding"],
)
def test_more_queries_than_keys(kernel: str, mask: Mask, may) -> None:
    """The last query stands with the last key, the first ones before all keys: causal ones see nothing."""
    q, k, v = random_qkv(T=13)
    torch.testing.assert_close(attend(q, k, v, mask, kernel=kernel), references.attend(q, k, v, may), **TIGHT)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["padding", "documents"])
def test_one_mask_row_serves_the_whole_batch(kernel: str, kind: str) -> None:
    q, k, v = random_qkv()
    make, row = (padding, REAL[0]) if kind == "padding" else (documents, IDS[0])
    one, both = make(torch.tensor([row])), make(torch.tensor([row, row]))
    torch.testing.assert_close(attend(q, k, v, one, kernel=kernel), attend(q, k, v, both, kernel=kernel), **TIGHT)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scale_replaces_the_square_root(kernel: str) -> None:
    q, k, v = random_qkv()
    torch.testing.assert_close(
        attend(q, k, v, causal(), scale=0.7, kernel=kernel),
        attend(q * 0.7 * math.sqrt(q.shape[-1]), k, v, causal(), kernel=kernel),
        **TIGHT,
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", ["none", "alibi", "t5"])
def test_lowering_once_changes_nothing(kernel: str, name: str, kind: str) -> None:
    q, k, v = random_qkv()
    mask = MASKS[name].mask()
    bias, _ = make_bias(kind, MASKS[name])
    with torch.no_grad():
        lowered = lower(mask, bias, T=T, S=S, like=q, kernel=kernel)
        ours = attend(q, k, v, lowered, kernel=kernel)
        torch.testing.assert_close(ours, attend(q, k, v, mask, bias=bias, kernel=kernel), rtol=0, atol=0)
        weights = attention_weights(q, k, lowered.mask, bias=lowered.bias)
        torch.testing.assert_close(weights, attention_weights(q, k, mask, bias=bias), rtol=0, atol=0)


def test_lowering_keeps_the_gradient_of_the_bias() -> None:
    q, k, v = random_qkv()
    bias, _ = make_bias("t5", Facts())
    assert isinstance(bias, RelativeBuckets)
    grads = []
    grads += gradients(attend(q, k, v, causal(), bias=bias, kernel="fused"), [bias.weight])
    lowered = lower(causal(), bias, T=T, S=S, like=q, kernel="fused")
    grads += gradients(attend(q, k, v, lowered, kernel="fused"), [bias.weight])
    torch.testing.assert_close(*grads, **TIGHT)
    assert (grads[0] != 0).any()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", ["none", "alibi", "t5", "written per row"])
def test_weights_are_what_attend_multiplies_with_v(name: str, kind: str) -> None:
    q, k, v = random_qkv(K=H)
    mask = MASKS[name].mask()
    bias, _ = make_bias(kind, MASKS[name])
    with torch.no_grad():
        weights = attention_weights(q, k, mask, bias=bias)
        torch.testing.assert_close(weights @ v, attend(q, k, v, mask, bias=bias, kernel="fused"), **TIGHT)
        for rows in slice(2, 5), slice(6, 7), slice(0, 1), slice(-3, None):
            some = attention_weights(q, k, mask, bias=bias, rows=rows)
            torch.testing.assert_close(some, weights[:, :, rows], **TIGHT)
    sums = weights.sum(-1)
    assert ((sums - 1).abs().lt(1e-12) | sums.eq(0)).all()


def test_scores_before_any_mask() -> None:
    q, k, _ = random_qkv(K=1)
    scores = attention_scores(q, k, causal(), scale=0.5)
    torch.testing.assert_close(scores, torch.einsum("bhte,bse->bhts", q, k[:, 0]) * 0.5, **TIGHT)


@pytest.mark.parametrize("kernel", TRAINED)
def test_dropout_drops_weights_and_scales_the_rest(kernel: str) -> None:
    """With the identity for v the output is the weights: each is gone, or divided by 1 - p."""
    n, p = 11, 0.3
    q, k = torch.randn(97, 3, n, n), torch.randn(97, 3, n, n)
    v = torch.eye(n).expand(97, 3, n, n)
    weights = attention_weights(q, k, causal())
    dropped = attend(q, k, v, causal(), dropout=p, kernel=kernel)
    kept = dropped != 0
    # float32 weights below 1, divided once more
    torch.testing.assert_close(dropped, torch.where(kept, weights / (1 - p), 0), rtol=0, atol=1e-6)
    n_weights = 97 * 3 * n * (n + 1) // 2
    # five standard deviations of a binomial
    assert abs(kept.sum() / n_weights - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n_weights)


@pytest.mark.parametrize("kernel", TRAINED)
def test_dropout_keeps_the_expectation(kernel: str) -> None:
    draws, p = 4001, 0.2
    q, k, v = (x[:1].float() for x in random_qkv())
    weights = attention_weights(q, k, causal()).double()
    values = v.double().repeat_interleave(H // K, 1)
    many = [x.expand(draws, -1, -1, -1) for x in (q, k, v)]
    mean = attend(*many, causal(), dropout=p, kernel=kernel).double().mean(0)
    # each weight is w / (1 - p) or 0: variance w^2 p / (1 - p). Five deviations of the mean of all draws.
    deviation = (weights.square() @ values.square() * p / (1 - p)).sqrt()[0]
    assert ((mean - (weights @ values)[0]).abs() <= 5 * deviation / math.sqrt(draws) + 1e-6).all()


@pytest.mark.parametrize("kernel", TRAINED)
def test_no_dropout_is_exact(kernel: str) -> None:
    q, k, v = random_qkv()
    assert torch.equal(attend(q, k, v, dropout=0.0, kernel=kernel), attend(q, k, v, kernel=kernel))


def test_auto_takes_flex_only_where_it_wins(unchecked: None) -> None:
    cpu, gpu = torch.zeros(1), SimpleNamespace(is_cuda=True)
    narrow, packed = causal() & window(512), documents(torch.zeros(1, 16384, dtype=torch.long))
    assert choose_kernel("auto", narrow, 16384, 16384, gpu, 0.0) == "flex"
    assert choose_kernel("auto", packed, 16384, 16384, gpu, 0.0) == "flex"
    assert choose_kernel("auto", causal(), 16384, 16384, gpu, 0.0) == "fused"
    assert choose_kernel("auto", window(9001), 16384, 16384, gpu, 0.0) == "fused"  # hardly anything to skip
    assert choose_kernel("auto", narrow, 1021, 1021, gpu, 0.0) == "fused"  # too short to pay
    assert choose_kernel("auto", narrow, 16384, 16384, gpu, 0.1) == "fused"  # flex has no dropout
    assert choose_kernel("auto", narrow, 16384, 16384, cpu, 0.0) == "fused"
    assert choose_kernel("auto", sparse("block=128, window=2"), 16384, 16384, gpu, 0.0) == "flex"
    # a step with a cache, of a new length each time
    assert choose_kernel("auto", sparse("block=128, window=2"), 1, 16384, gpu, 0.0) == "fused"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_a_tensor_is_no_mask(unchecked: None, dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"True = may attend.*{dtype} tensor.*causal\(\).*padding\(real\).*&"):
        attend(*random_qkv(), torch.ones(T, S).to(dtype))


def test_anything_else_is_no_mask(unchecked: None) -> None:
    with pytest.raises(InputError, match=r"takes a Mask.*got a str"):
        attend(*random_qkv(), "causal")


def test_kernel_names_are_checked() -> None:
    with pytest.raises(InputError, match=r"kernel='flux' is not known; did you mean 'flex'\?"):
        attend(*random_qkv(), kernel="flux")
    with pytest.raises(InputError, match=r"kernel='cudnn' is not known; choose one of: auto, explicit, flex, fused"):
        attend(*random_qkv(), kernel="cudnn")


def test_flex_has_no_dropout() -> None:
    with pytest.raises(InputError, match=r"no dropout.*dropout=0\.1.*kernel='fused' or dropout=0"):
        attend(*random_qkv(), dropout=0.1, kernel="flex")


def test_flex_has_no_backward_pass_on_the_cpu() -> None:
    """Nor has torch; a clear sentence, and no NotImplementedError from inside it."""
    with pytest.raises(InputError, match=r"no backward pass on the CPU.*need gradients; use kernel='fused'"):
        attend(*random_qkv(grad=True), causal(), kernel="flex")


def test_flex_on_the_cpu_does_not_learn_a_bias() -> None:
    """Nothing but the table needs a gradient; torch can't compile that, so it is refused like the others."""
    q, k, v = random_qkv(T=1031, S=1031, dtype=torch.float32)
    with pytest.raises(InputError, match=r"no backward pass on the CPU.*use kernel='fused'"):
        attend(q, k, v, bias=RelativeBuckets(n_heads=H), kernel="flex")


def test_alibi_by_hand() -> None:
    """One head of slope 2^-8, equal scores: weights fall as exp(-distance / 256)."""
    q, k = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)
    weights = attention_weights(q, k, causal(), bias=Alibi(n_heads=1))[0, 0]
    step = math.exp(-1 / 256)
    expected = [[1, 0, 0], [step, 1, 0], [step**2, step, 1]]
    rows = [[w / sum(row) for w in row] for row in expected]
    # float32 numbers below 1
    torch.testing.assert_close(weights, torch.tensor(rows), rtol=0, atol=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_refused() -> None:
    q, k, v = torch.randn(2, 5, 7, 3), torch.randn(2, 5, 11, 3), torch.randn(2, 5, 11, 3)
    with pytest.raises(InputError, match="multiple of k's"):
        attend(q, k[:, :2], v[:, :2])
    with pytest.raises(InputError, match="multiple of k's"):
        attend(q, k, v[:, :, :10])
    with pytest.raises(InputError, match=r"\(2, 13\) keys, but there are \(2, 11\)"):
        attend(q, k, v, padding(torch.ones(2, 13, dtype=torch.bool)))
    with pytest.raises(InputError, match=r"\(3, 11\) keys, but there are \(2, 11\)"):
        attend(q, k, v, documents(torch.zeros(3, 11, dtype=torch.int64)))
    with pytest.raises(InputError, match="among the keys"):
        attend(k, q, q, documents(torch.zeros(2, 7, dtype=torch.int64)))
    with pytest.raises(InputError, match="whole numbers"):
        documents(torch.zeros(2, 11))
