"""Things that must not matter: which kernel runs, what comes later, whether activations are kept, the seed of another model.

compiled = eager is in `compiled/`: torch can't trace through the shape checks of this test run.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import clearhead as ch

from .drawn import Fields, fields
from .test_padding import masks
from .tiny import EVERY, FAMILIES, assert_same, built, inputs, run, tiny, tiny_config

WRITERS = [name for name in EVERY if tiny_config(name).shape != "encoder"]


def with_field(config: ch.Config, **changes: object) -> ch.Config:
    return ch.Config.from_dict(config.to_dict() | changes)


@pytest.mark.slow
@given(drawn=fields())
@settings(max_examples=40)
def test_fused_is_explicit(drawn: Fields) -> None:
    config = ch.Config(**drawn)
    fused, explicit = (built(with_field(config, kernel=kernel)) for kernel in ("fused", "explicit"))
    assert_same(run(fused, *inputs(config)), run(explicit, *inputs(config)))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_fused_is_explicit_and_so_are_its_gradients(name: str) -> None:
    fused, explicit = (tiny(name, kernel=kernel) for kernel in ("fused", "explicit"))
    for model in (fused, explicit):
        run(model, *inputs(model.config)).square().sum().backward()
    for (site, ours), theirs in zip(fused.named_parameters(), explicit.named_parameters(), strict=True):
        if theirs[1].grad is not None:
            assert ours.grad is not None, site
            assert_same(ours.grad, theirs[1].grad)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled_flex")
@given(drawn=fields(), real=masks(3, 11))
@settings(max_examples=25)
def test_flex_is_explicit(drawn: Fields, real: Tensor) -> None:
    config = ch.Config(**drawn)
    flex, explicit = (built(with_field(config, kernel=kernel)) for kernel in ("flex", "explicit"))
    where = {} if config.inputs == "patches" else {"target_mask" if config.shape == "encoder-decoder" else "mask": real}
    with torch.no_grad():  # torch's flex kernel has no backward pass on the CPU
        ours, theirs = (run(model, *inputs(config), **where) for model in (flex, explicit))
    assert_same(ours, theirs)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize("name", EVERY)
def test_flex_is_explicit_in_every_family(name: str) -> None:
    flex, explicit = (tiny(name, kernel=kernel) for kernel in ("flex", "explicit"))
    with torch.no_grad():
        assert_same(run(flex, *inputs(flex.config)), run(explicit, *inputs(flex.config)))


@pytest.mark.slow
@given(drawn=fields(shapes=("decoder", "encoder-decoder")))
@settings(max_examples=40)
def test_no_future_token_changes_a_past_logit(drawn: Fields) -> None:
    config = ch.Config(**drawn)
    assert_no_leak(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kernel", ["fused", "explicit"])
def test_no_future_token_changes_a_past_logit_in_any_family(name: str, kernel: str) -> None:
    assert_no_leak(tiny_config(name, kernel=kernel))


def assert_no_leak(config: ch.Config) -> None:
    model = built(config, dtype=torch.float32)
    *source, target = inputs(config)
    with torch.no_grad():
        before = run(model, *source, target)
        for t in (0, 4, 10):
            other = target.clone()
            other[:, t:] = (other[:, t:] + 1) % config.vocab_size
            after = run(model, *source, other)
            assert torch.equal(before[:, :t], after[:, :t])  # bit for bit
            assert not torch.equal(before[:, t], after[:, t])  # and the present token is seen


@pytest.mark.parametrize("name", ["bert", "esm"])
def test_an_encoder_sees_both_ways(name: str) -> None:
    model = tiny(name)
    (tokens,) = inputs(model.config)
    other = tokens.clone()
    other[:, 5] = (other[:, 5] + 1) % model.config.vocab_size
    changed = (model(tokens) != model(other)).any(-1)
    assert changed.all()


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_window_reaches_as_far_as_it_says(window: int) -> None:
    """One layer, one changed token: a decoder's window looks back, an encoder's both ways."""
    for shape, reach in (("decoder", range(5, 5 + window)), ("encoder", range(5 - window + 1, 5 + window))):
        model = tiny("gpt2" if shape == "decoder" else "esm", n_layers=1, window=window)
        (tokens,) = inputs(model.config)
        other = tokens.clone()
        other[:, 5] = (other[:, 5] + 1) % model.config.vocab_size
        changed = (model(tokens) != model(other)).any(-1)[0]
        assert changed.nonzero().flatten().tolist() == list(reach)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_checkpointing_is_plain(name: str) -> None:
    plain, checkpointed = tiny(name), tiny(name)
    answers = run(plain, *inputs(plain.config)), run(checkpointed, *inputs(plain.config), checkpointing=True)
    assert torch.equal(*answers)
    for answer in answers:
        answer.square().sum().backward()
    for ours, theirs in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None
        else:
            assert_same(ours.grad, theirs.grad)


def test_checkpointing_draws_the_same_dropout() -> None:
    models = [tiny("original", dropout=0.3, attention_dropout=0.2).train() for _ in range(2)]
    for model, checkpointing in zip(models, (False, True), strict=True):
        torch.manual_seed(7)
        run(model, *inputs(model.config), checkpointing=checkpointing).square().sum().backward()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert_same(ours.grad, theirs.grad)


def test_checkpointing_keeps_less() -> None:
    """What it is for: fewer numbers are kept for the backward pass."""

    def kept(checkpointing: bool) -> int:
        model, total = tiny("gpt2", n_layers=5), 0

        def count(x: Tensor) -> Tensor:
            nonlocal total
            total += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            run(model, *inputs(model.config), checkpointing=checkpointing)
        return total

    assert kept(True) < kept(False) / 3


def test_dropout_falls_in_training_only() -> None:
    for field in ("dropout", "attention_dropout"):
        model = tiny("gpt2", **{field: 0.5})
        (tokens,) = inputs(model.config)
        assert torch.equal(model(tokens), model(tokens))
        assert torch.equal(model(tokens), tiny("gpt2")(tokens))
        model.train()
        assert not torch.equal(model(tokens), model(tokens))


# Relative to the largest output. Half precision rounds each of some thirty steps to 2^-8 (bfloat16) or 2^-11 (float16) of
# its size, and attention's exponent turns a rounded score into a weight that many times off; float32 against float64 is
# 2^-24 the same way.
PRECISIONS = {torch.bfloat16: 0.1, torch.float16: 0.0125, torch.float32: 3e-6}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_every_family_runs_in_every_precision(name: str, dtype: torch.dtype) -> None:
    exact, model = tiny(name), tiny(name).to(dtype)
    with torch.no_grad():
        expected, ours = run(exact, *inputs(exact.config)), run(model, *inputs(exact.config))
    assert ours.dtype == dtype
    error = (ours.double() - expected).abs().max() / expected.abs().max()
    assert error < PRECISIONS[dtype]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_family_trains_in_half_precision(name: str, dtype: torch.dtype) -> None:
    model = ch.build(tiny_config(name), dtype=dtype)
    run(model, *inputs(model.config)).float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_runs_under_autocast(name: str) -> None:
    model = tiny(name, dtype=torch.float32)
    with torch.no_grad():
        expected = run(model, *inputs(model.config))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = run(model, *inputs(model.config))
    # as bfloat16 above; norms and the residual stream stay in float32
    assert (ours.float() - expected).abs().max() / expected.abs().max() < PRECISIONS[torch.bfloat16]


def unreached(name: str) -> set[str]:
    """Parameters that no gradient reaches, by design."""
    if name in ("bert", "bert-mlm"):
        return {"pool.dense.weight", "pool.dense.bias"}  # used by head="classes" and by `pooled` alone
    if name == "whisper":
        return {"encoder.positions.weight"}  # fixed sinusoids
    return set()


@pytest.mark.parametrize("name", EVERY)
def test_gradients_reach_every_parameter(name: str) -> None:
    model = tiny(name)
    run(model, *inputs(model.config)).square().sum().backward()
    silent = {site for site, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert silent == unreached(name)


@pytest.mark.slow
@given(drawn=fields())
@settings(max_examples=30)
def test_gradients_reach_every_parameter_of_any_config(drawn: Fields) -> None:
    # Of the fields drawn, these leave a weight silent by design: a window of 1 makes every weight of attention 1 whatever
    # q and k are; a norm over one number keeps its sign alone; a relu may sleep on so few numbers; a pooler needs a pool.
    config = with_field(
        config := ch.Config(**drawn),
        window=config.window if config.window != 1 else 2,
        d_head=config.d_head if config.d_head != 1 else 2,
        feedforward=config.feedforward.replace("relu2", "silu").replace("relu", "gelu"),
        pooler=config.pooler and config.head == "classes",
    )
    model = built(config)
    run(model, *inputs(config)).square().sum().backward()
    trained = {site: p.grad for site, p in model.named_parameters() if p.requires_grad}  # not the sinusoids of sound
    assert not [site for site, grad in trained.items() if grad is None or not grad.any()]
