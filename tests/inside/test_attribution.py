"""Attribution: parts sum to the logit; saliency equals finite differences. And what every analysis leaves as it was."""

from __future__ import annotations

import math

import pytest
import torch
from models.tiny import assert_same, inputs, tiny
from torch import Tensor, nn

import clearhead as ch
from clearhead.inside import (
    attention_rollout,
    head_scores,
    logit_attribution,
    logit_lens,
    neighbours,
    saliency,
)
from clearhead.quantization.integer import quantize
from clearhead.training.lora import add_lora
from tests.inside.models import SCORED, SUMS, TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parts_sum_to_the_logit(name: str, dtype: torch.dtype) -> None:
    model = tiny(name, dtype=dtype)
    args = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs(model.config))
    found = logit_attribution(model, *args)
    with torch.no_grad():
        assert torch.equal(found.logit, model(*args).amax(-1))
    # of order 10, in some models 100: float32 rounds at 1e-7 of that
    assert_same(found.total, found.logit, within=1e-9 if dtype == torch.float64 else 1e-6)


def test_every_family_that_can_be_summed_is() -> None:
    assert {"gpt2", "llama", "t5", "vit", "whisper", "mistral", "alibi"} <= set(SUMS)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_heads_part_is_its_slice_of_the_output_projection_through_a_frozen_norm(name: str) -> None:
    model = tiny(name)
    (tokens,) = inputs(model.config)
    wanted = torch.randint(0, 53, (3, 11))
    found = logit_attribution(model, tokens, tokens=wanted)
    with ch.probe(model) as seen:
        model(tokens)
    E, last = model.config.d_head, seen["blocks.1.residual"]
    weight = model.tokens.weight if model.head.weight is None else model.head.weight
    for head in range(model.config.n_heads):
        for b in range(3):
            for t in range(11):
                written = (
                    model.blocks[0].attention.o_proj.weight[:, head * E : (head + 1) * E]
                    @ (seen["blocks.0.attention.out"][b, head, t])
                )
                x = last[b, t]
                if name == "gpt2":
                    written = (written - written.mean()) / math.sqrt(((x - x.mean()) ** 2).mean() + model.norm.eps)
                else:
                    written = written / math.sqrt((x**2).mean() + model.norm.eps)
                expected = (written * model.norm.weight) @ weight[wanted[b, t]]
                assert found.parts[f"blocks.0.attention.{head}"][b, t] == pytest.approx(float(expected), abs=1e-9)


def test_against_another_token_is_the_difference() -> None:
    model = tiny("gpt2")
    (tokens,) = inputs(model.config)
    one, other = torch.full((3, 11), 7), torch.full((3, 11), 8)
    difference = logit_attribution(model, tokens, tokens=one, against=other)
    alone = [logit_attribution(model, tokens, tokens=ids) for ids in (one, other)]
    for name, part in difference.parts.items():
        assert_same(part, alone[0].parts[name] - alone[1].parts[name])
    with torch.no_grad():
        logits = model(tokens)
    assert_same(difference.total, logits[..., 7] - logits[..., 8])


def test_parts_of_a_class_sum_over_a_mean_of_states() -> None:
    model = tiny("vit", pool="mean")
    found = logit_attribution(model, *inputs(model.config), tokens=torch.tensor([0, 3, 6]))
    assert found.logit.shape == (3,)
    assert_same(found.total, found.logit)


def test_parts_sum_with_lora() -> None:
    """In training a module's matrix is not its weight alone."""
    model = tiny("gpt2")
    add_lora(model, rank=2, alpha=4.0, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("lora_b"):
                weight.copy_(torch.randn(weight.shape, generator=generator))
    found = logit_attribution(model, TOKENS)
    assert_same(found.total, found.logit, within=1e-9)


def test_what_is_no_sum_is_refused() -> None:
    for name, message in (
        ("original", "norms its stream after each step"),
        ("esm", "head has a layer of its own"),
        ("vit", "pooled state that is no sum"),
    ):
        changes = {"esm": dict(head="tokens", head_transform=True), "vit": dict(pool="max")}.get(name, {})
        model = tiny(name, **changes)
        with pytest.raises(ch.InputError, match=message):
            logit_attribution(model, *inputs(model.config))
    model = tiny("gpt2")
    with pytest.raises(ch.InputError, match=r"ids of shape \(3, 11\), from 0 to 52"):
        logit_attribution(model, *inputs(model.config), tokens=torch.full((3, 11), 53))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORED)
def test_saliency_is_the_slope_as_embeddings_grow(name: str) -> None:
    """Gradient times input is the derivative of f(x (1 + e)) at e = 0, for each token alone; here by finite differences."""
    model = tiny(name)
    args = inputs(model.config, batch=2, length=5, source=4)
    found = saliency(model, *args, position=3)
    with torch.no_grad():
        out = model(*args)
    chosen = (out[:, 3] if out.ndim == 3 else out).argmax(-1)

    def logit(at: int, place: int, grow: float) -> Tensor:
        calls = 0

        def hook(_: nn.Module, __: object, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls - 1 != at:
                return x
            x = x.clone()
            x[:, place] *= 1 + grow
            return x

        modules = {model.tokens, getattr(model, "source", None)} - {None}
        handles = [module.register_forward_hook(hook) for module in modules]
        with torch.no_grad():
            out = model(*args)
        for handle in handles:
            handle.remove()
        return (out[:, 3] if out.ndim == 3 else out).gather(1, chosen[:, None])[:, 0]

    assert len(found) == len(args)
    for at, scores in enumerate(found):
        for place in range(scores.shape[1]):
            slope = (logit(at, place, 1e-6) - logit(at, place, -1e-6)) / 2e-6
            # differences of float64 logits of order 10, over 2e-6
            torch.testing.assert_close(scores[:, place], slope, rtol=1e-5, atol=1e-6)


def test_saliency_of_another_token_and_its_mistakes() -> None:
    model = tiny("gpt2")
    token = torch.tensor([3, 4, 5])
    (scores,) = saliency(model, TOKENS, position=4, token=token)
    assert not scores[:, 5:].any()  # no token after the position can matter
    assert scores[:, :5].all()
    with pytest.raises(ch.InputError, match="position=11 is outside of 11 tokens"):
        saliency(model, TOKENS, position=11)
    with torch.no_grad():  # as callers often have it
        assert torch.equal(saliency(model, TOKENS, position=4, token=token)[0], scores)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_analyses_of_a_quantised_model() -> None:
    model = quantize(
        ch.build(ch.preset("gpt2", n_layers=2, d_model=64, n_heads=4, vocab_size=53, max_len=31)).eval(), "int8"
    )
    found = logit_attribution(model, TOKENS)
    # of the same rounded weights: float32 sums in another order
    torch.testing.assert_close(found.total, found.logit, rtol=0, atol=1e-4)
    assert len(neighbours(model, [7], n=5)) == 5
    assert len(head_scores(model, TOKENS)) == 8


def test_analyses_leave_no_trace() -> None:
    """Dropout is off during an analysis and restored after it; hooks are removed, also after an error."""
    model = tiny("gpt2", dropout=0.5).train()
    model.blocks[0].eval()
    lens = logit_lens(model, TOKENS)
    assert torch.equal(lens, logit_lens(model, TOKENS))
    logit_attribution(model, TOKENS)
    head_scores(model, TOKENS)
    attention_rollout(model, TOKENS)
    saliency(model, TOKENS)
    for reading in (logit_lens, logit_attribution, saliency, head_scores):
        with pytest.raises(ch.InputError):
            reading(model, torch.full((1, 3), 53))
    assert model.training
    assert model.blocks[1].training
    assert not model.blocks[0].training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
