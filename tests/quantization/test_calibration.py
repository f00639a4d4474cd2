"""int4 weights rounded for known inputs: nearer in their results, the same format, and only where it has an effect."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.errors import InputError
from clearhead.generation import generate
from clearhead.kernels import native
from clearhead.quantization import calibration
from clearhead.quantization.calibration import divide, find_norms, second_moments
from clearhead.quantization.int4_rounding import DAMPING, GROUP, SHRINKS, balancing_factors, gptq, search
from clearhead.quantization.integer import Int4, Quantized, quantize

SMALL = dict(n_layers=2, d_model=64, n_heads=4, d_ff=96, vocab_size=97, max_len=53)


def small(family: str = "gpt2", **changes: Any) -> Any:
    kv = dict(n_kv_heads=2) if family.startswith("llama") else {}
    return ch.build(ch.preset(family, **{**SMALL, **kv, **changes}), seed=0).eval()


def correlated(rows: int, width: int) -> Tensor:
    """Inputs as they are in models: a few directions hold most of them, and their sizes differ."""
    mixed = torch.randn(rows, width // 4) @ torch.randn(width // 4, width) + 0.3 * torch.randn(rows, width)
    return mixed * torch.logspace(-1, 1, width)[torch.randperm(width)]


def unpacked(u: Tensor, scales: Tensor, mins: Tensor) -> Tensor:
    return u * scales.repeat_interleave(GROUP, 1) + mins.repeat_interleave(GROUP, 1)


def test_results_are_nearer_than_with_plain_rounding() -> None:
    weight, seen, unseen = torch.randn(67, 128), *correlated(1500, 128).split([1000, 500])
    plain, ours = Int4(weight), Int4(weight, seen.T @ seen / len(seen))
    assert (ours.held("q").shape, ours.held("scales").dtype) == (plain.held("q").shape, torch.float16)
    for x, most in ((seen, 0.5), (unseen, 0.6)):
        loss = [float((x @ (each.unpack() - weight).T).norm()) for each in (plain, ours)]
        assert loss[1] < most * loss[0]


def shrunk(x: Tensor) -> Tensor:
    """Schäfer and Strimmer's share, from each correlation and its variance one by one, in float64."""
    n, D = x.shape
    found = x.double().T @ x.double() / n
    z = x.double() / found.diagonal().sqrt()
    chance = certain = 0.0
    for i in range(D):
        for j in set(range(D)) - {i}:
            certain += float((z[:, i] * z[:, j]).mean() ** 2)
            chance += float((z[:, i] * z[:, j]).var(correction=0)) / (n - 1)
    kept = 1 - min(1.0, chance / certain)
    return found * (kept + (1 - kept) * torch.eye(D, dtype=torch.float64))


@pytest.mark.parametrize("strip", [4, 256])
def test_correlations_that_may_be_chance_are_taken_back(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "STRIP", strip)
    x = torch.randn(19, 11) * torch.logspace(-1, 1, 11)
    torch.testing.assert_close(second_moments(x).double(), shrunk(x), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(second_moments(x), x.T @ x / 19, rtol=0.1)
    x[:, 3] = 0  # a dead channel
    assert second_moments(x).isfinite().all()
    assert second_moments(torch.zeros(3, 11)).equal(torch.zeros(11, 11))
    assert second_moments(x[:1]).isfinite().all()


@pytest.mark.parametrize("few", [16, 61])
def test_few_inputs_do_no_harm(few: int) -> None:
    """Fitted to few inputs alone, the errors of a weight are larger on others than those of plain rounding."""
    weight, mixing = torch.randn(67, 128), torch.randn(128, 128) / 128**0.5 + 0.3 * torch.eye(128)
    seen, unseen = (torch.randn(500 + few, 128) @ mixing).split([few, 500])
    rounded = [Int4(weight), Int4(weight, second_moments(seen)), Int4(weight, seen.T @ seen / few)]
    plain, ours, fitted = (float((unseen @ (each.unpack() - weight).T).norm()) for each in rounded)
    assert ours < 1.02 * plain < 1.2 * plain < fitted, (ours, plain, fitted)


def test_inputs_without_correlation_change_little() -> None:
    """H is then the identity, and the plain search's result is the best one."""
    weight = torch.randn(40, 64)
    ours, plain = Int4(weight, torch.eye(64)), Int4(weight)
    assert (ours.unpack() - weight).norm() < 1.02 * (plain.unpack() - weight).norm()
    assert Int4(weight, torch.zeros(64, 64)).unpack().isfinite().all()


def naive(weight: Tensor, hessian: Tensor, u: Tensor, scales: Tensor, mins: Tensor) -> Tensor:
    """GPTQ with given scales and minimums as its definition says, in float64: after each column the best change of all later ones,
    from the equations for the least error of the results, solved anew each time."""
    weight, hessian = weight.double().clone(), hessian.double()
    sizes = hessian.diagonal().view(-1, GROUP)
    groups = sizes.sum(1).argsort(descending=True)
    left = [int(g) * GROUP + int(i) for g in groups for i in sizes[g].argsort(descending=True)]
    hessian = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian))
    found = torch.zeros_like(weight)
    while left:
        column, left = left[0], left[1:]
        scale, least = scales[:, column // GROUP].double(), mins[:, column // GROUP].double()
        found[:, column] = ((weight[:, column] - least) / scale).round().clamp(0, 15)
        error = weight[:, column] - found[:, column] * scale - least
        if left:
            change = torch.linalg.solve(hessian[left][:, left], hessian[left, column])
            weight[:, left] += error[:, None] * change
    return found


def test_gptq_is_what_its_definition_says() -> None:
    weight, x = torch.randn(7, 96), correlated(300, 96)
    hessian = x.T @ x / len(x)
    u, scales, mins = gptq(weight, hessian)
    assert set(u.unique().tolist()) <= set(range(16))
    # A weight in the middle between two values may fall on the other side in float32, and then later ones, too.
    by_hand = naive(weight, hessian, u, scales, mins)
    assert (u == by_hand).float().mean() > 0.95
    ours, theirs = (float((x @ (unpacked(each.float(), scales, mins) - weight).T).norm()) for each in (u, by_hand))
    assert ours == pytest.approx(theirs, rel=0.02)


def test_the_loss_of_a_group_is_the_loss_of_its_results() -> None:
    """|e U^-1|^2 = e H e^T, and the group that is kept has the least of all starts."""
    x = correlated(200, GROUP)
    hessian, weights = x.T @ x, torch.randn(GROUP, 11)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    losses = []
    for shrinks in (SHRINKS, *((each,) for each in SHRINKS)):
        u, scale, least, lost = search(weights, factor, shrinks)
        error = x @ (weights - u * scale - least)
        # float32, and the largest inputs are some hundred times the smallest
        torch.testing.assert_close(lost.square().sum(0), error.square().sum(0), rtol=0.02, atol=0)
        losses.append(lost.square().sum(0))
    torch.testing.assert_close(losses[0], torch.stack(losses[1:]).amin(0))


@pytest.mark.skipif(not native.is_there(), reason=str(native.why_not()))
@pytest.mark.parametrize("scale", [1.0, 1e-4, 300.0])
def test_the_kernel_searches_as_torch_does(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """67 groups: the last registers are not full. One has no range, and another is zero."""
    hessian = second_moments(correlated(500, GROUP))
    weights, factor = torch.randn(GROUP, 67) * scale, torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    weights[:, 3], weights[:, 5] = 0, 0.25 * scale
    ours = search(weights, factor, SHRINKS[:5])
    monkeypatch.setattr(native, "is_there", lambda: False)
    theirs = search(weights, factor, SHRINKS[:5])
    assert [each.shape for each in ours] == [each.shape for each in theirs]
    # Sums in another order: a weight in the middle between two steps may fall on the other side, or another start be the best.
    assert (ours[0] == theirs[0]).all(0).float().mean() > 0.9
    losses = [each[3].square().sum(0) for each in (ours, theirs)]
    torch.testing.assert_close(losses[0].sum(), losses[1].sum(), rtol=0.05, atol=0)
    for loss in losses:
        assert loss[3] == 0
        assert loss[5] < 1e-3 * loss.mean()  # 0.25 has a rounding of its own in float16


def test_balanced_columns_lose_least() -> None:
    """If an error is as large as the group's scale, and that as large as its weights: no other factors have a smaller product."""
    sizes, costs = torch.logspace(-1, 1, GROUP), torch.logspace(3, 0, GROUP)
    weight, hessian = torch.randn(7, GROUP) * sizes, torch.diag(costs)  # no correlations: a column's cost is its own

    def loss(factors: Tensor) -> float:
        return float((weight * factors).square().sum() * (costs / factors.square()).sum())

    factors = balancing_factors(weight, hessian)
    assert float(factors.log().mean()) == pytest.approx(0, abs=1e-5)
    assert loss(factors) < 0.5 * loss(torch.ones(GROUP))
    assert all(loss(factors * torch.randn(GROUP).mul(0.2).exp()) > loss(factors) for _ in range(9))


def test_columns_or_inputs_of_zeros_are_balanced_too() -> None:
    weight, x = torch.randn(7, GROUP), correlated(50, GROUP)
    x[:, 3], weight[:, 5] = 0, 0
    for w, hessian in (
        (weight, second_moments(x)),
        (0 * weight, second_moments(x)),
        (weight, torch.zeros(GROUP, GROUP)),
    ):
        factors = balancing_factors(w, hessian)
        assert factors.isfinite().all()
        assert (factors > 0).all()


@pytest.mark.parametrize(("family", "n"), [("gpt2", 4), ("llama-3-8b", 4), ("t5-small", 10), ("bert-base", 0)])
@torch.no_grad()
def test_norms_and_columns_may_be_moved(family: str, n: int) -> None:
    """No result changes. In a post-norm block the residual stream takes the norm's results, too."""
    model, tokens = small(family), torch.randint(0, 97, (3, 50))
    given = (tokens, tokens) if family.startswith("t5") else (tokens,)
    expected = model(*given)
    norms = find_norms(model)
    assert len(norms) == n
    for name, norm in norms.items():
        factors = (0.5 * torch.randn(64)).exp()
        divide(norm, factors)
        model.get_submodule(name).weight.mul_(factors)
    torch.testing.assert_close(model(*given), expected, rtol=0, atol=1e-4)


def test_how_numbers_are_split_between_norm_and_columns_does_not_matter() -> None:
    """So a model may have been saved with its norms multiplied into its matrices. (Here the order of the columns stays.)"""
    weight, sizes, split = torch.randn(7, 64), torch.logspace(0, 3, 64), torch.logspace(0.2, 0, 64)
    ours = balancing_factors(weight, torch.diag(sizes))
    moved = balancing_factors(weight * split, torch.diag(sizes / split.square())) * split
    # The damping is a share of the mean, which changes.
    torch.testing.assert_close(moved / moved.mean(), ours / ours.mean(), rtol=0.2, atol=0)


def test_a_shared_weight_is_not_divided() -> None:
    """Also one that takes 8 bits, and so is rounded before the pass."""
    for changes in ({}, dict(d_model=48)):
        model = small("llama-3-8b", **changes)
        one, other = model.blocks
        assert len(find_norms(model)) == 4
        other.attention_norm.weight = one.attention_norm.weight
        other.feedforward.gate_up.weight = one.feedforward.gate_up.weight
        assert not find_norms(model)
        before = one.attention_norm.weight.clone()
        quantize(model, "int4", calibrate=texts())
        assert other.attention_norm.weight is one.attention_norm.weight
        assert torch.equal(one.attention_norm.weight, before)


@torch.no_grad()
def test_w4a8_has_the_weights_of_int4() -> None:
    """In the first block: later ones are rounded for other inputs."""
    one, other = (quantize(small(), kind, calibrate=texts()).blocks[0] for kind in ("int4", "w4a8"))
    assert torch.equal(one.attention.qkv.weight.q, other.attention.qkv.weight.q)
    assert torch.equal(one.attention_norm.weight, other.attention_norm.weight)


@torch.no_grad()
def test_the_native_step_writes_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantize(small("llama-3-8b"), "int4", calibrate=texts())
    ours = generate(model, [texts()[0][:9]], max_new_tokens=20, eos=())
    monkeypatch.setattr(native, "is_there", lambda: False)
    assert generate(model, [texts()[0][:9]], max_new_tokens=20, eos=()) == ours


def texts(n: int = 600) -> list[list[int]]:
    """Of few tokens, each of which says much about the next."""
    ids = torch.cumsum(torch.randint(1, 4, (n,), generator=torch.Generator().manual_seed(3)), 0) % 97
    return [ids[: n // 3].tolist(), ids[n // 3 :].tolist()]


@pytest.mark.parametrize("family", ["gpt2", "llama-3-8b", "bert-base"])
@torch.no_grad()
def test_a_whole_model(family: str) -> None:
    tokens = torch.tensor([id for text in texts() for id in text][:500]).view(10, 50)
    full, plain, ours = (
        small(family),
        quantize(small(family), "int4"),
        quantize(small(family), "int4", calibrate=texts()),
    )
    assert not any(module._forward_pre_hooks for module in ours.modules())
    loss = [float((model(tokens) - full(tokens)).norm()) for model in (plain, ours)]
    assert loss[1] < 0.9 * loss[0]
    kinds = [
        {n: (m.kind, m.shape) for n, m in model.named_modules() if isinstance(m, Quantized)} for model in (plain, ours)
    ]
    assert kinds[0] == kinds[1]
    again = quantize(small(family), "int4", calibrate=texts())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in ours.state_dict().items())
    plain.load_state_dict(ours.state_dict())
    assert torch.equal(plain(tokens), ours(tokens))


@torch.no_grad()
def test_a_function_calls_models_of_other_inputs() -> None:
    source, target = torch.randint(0, 97, (9, 40)), torch.randint(0, 97, (9, 30))

    def fresh() -> Any:
        sizes = dict(n_layers=2, d_model=64, n_heads=4, d_ff=96, vocab_size=97, max_len=64)
        return ch.build(ch.preset("transformer-base", **sizes), seed=0).eval()

    full, plain, ours = (
        fresh(),
        quantize(fresh(), "int4"),
        quantize(fresh(), "int4", calibrate=lambda m: m(source, target)),
    )
    loss = [float((model(source, target) - full(source, target)).norm()) for model in (plain, ours)]
    assert loss[1] < 0.9 * loss[0]
    with pytest.raises(InputError, match=r"shape='encoder-decoder'.*pass a function"):
        quantize(fresh(), "int4", calibrate=texts())
    with pytest.raises(InputError, match=r"did not reach 14 modules, such as decoder\.blocks\.0"):
        quantize(fresh(), "int4", calibrate=lambda m: m.encode(source))


def test_loading_with_texts(tmp_path: Path) -> None:
    ch.save(small(), tmp_path / "gpt")
    tokens = torch.arange(7)[None]
    ours: Any = ch.load(tmp_path / "gpt", quantize="int4", calibrate=texts())
    assert torch.equal(ours(tokens), quantize(small(), "int4", calibrate=texts())(tokens))
    assert not torch.equal(ours(tokens), quantize(small(), "int4")(tokens))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("given", [[1, 2, 3] * 99, ["some words"] * 99, [None]])
def test_what_is_no_list_of_texts_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match=r"a list of texts, each a list of ids; got .*tokenizer\.encode"):
        quantize(small(), "int4", calibrate=given)


def test_what_is_refused(tmp_path: Path) -> None:
    ch.save(small(), tmp_path / "gpt")
    for given in ([], [[]], [[1, 2, 3]]):
        model = small()
        with pytest.raises(InputError, match=rf"needs 256 tokens at least.*got {sum(map(len, given))}"):
            quantize(model, "int4", calibrate=given)
        assert isinstance(model.blocks[0].feedforward.down.weight, nn.Parameter), "nothing was rounded"
    with pytest.raises(InputError, match=r"token ids must be 0 \.\. 96.*got 97"):
        quantize(small(), "int4", calibrate=[[97] * 300])
    with pytest.raises(InputError, match="is for quantize='int4' or 'w4a8'; got 'int8'"):
        quantize(small(), "int8", calibrate=texts())
    with pytest.raises(InputError, match="is for quantize='int4' or 'w4a8'; got None"):
        ch.load(tmp_path / "gpt", calibrate=texts())
    with pytest.raises(InputError, match=r"weights of 4 bits, and this model has none: widths \[48, 80\]"):
        quantize(small(d_model=48, d_ff=80), "int4", calibrate=texts())
    spoilt = small()
    with torch.no_grad():
        spoilt.blocks[0].feedforward.up.weight[0] = math.nan
    with pytest.raises(InputError, match="are not all numbers"):
        quantize(spoilt, "int4", calibrate=texts())
