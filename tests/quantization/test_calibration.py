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
from clearhead.quantization.calibration import second_moments
from clearhead.quantization.int4_rounding import DAMPING, GROUP, SHRINKS, gptq, search
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


def test_correlations_that_may_be_chance_are_taken_back() -> None:
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
