"""LoRA: it starts at zero, only its matrices learn, and it is merged into the weights at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import assert_same, inputs, run, tiny
from torch import nn

import clearhead as ch
from clearhead.layers.linear import FusedLinear, Linear
from clearhead.models import Model
from clearhead.training.lora import add_lora, gather_model
from clearhead.training.optimizers import Optimizers
from clearhead.training.precision import set_residual_dtype
from clearhead.training.recipe import Train

LORA = ["gpt2", "llama", "bert-classes", "t5", "qwen2", "vit"]


def with_lora(name: str, rank: int = 3, alpha: float = 5.0) -> tuple[Model, Model]:
    base, model = (tiny(name, dtype=torch.float32) for _ in range(2))
    add_lora(model, rank, alpha, seed=0)
    return base, model


@pytest.mark.parametrize("name", LORA)
def test_lora_starts_as_the_base(name: str):
    base, model = with_lora(name)
    args = inputs(base.config)
    # B A x is exactly zero; but a sum has another layout in memory than a split, and the kernels add in another order
    assert_same(run(model, *args), run(base, *args), within=1e-6)
    assert all(not p.any() for place, p in model.named_parameters() if place.endswith("lora_b"))


@pytest.mark.parametrize("name", LORA)
def test_only_the_additions_learn(name: str):
    base, model = with_lora(name)
    run(model, *inputs(base.config)).square().sum().backward()
    learning = {place for place, p in model.named_parameters() if p.requires_grad}
    linear = [
        place for place, m in base.named_modules() if "blocks." in place and isinstance(m, nn.Linear | FusedLinear)
    ]
    head = {
        place for place, _ in base.named_parameters() if place.startswith("head.") and base.config.head == "classes"
    }
    assert learning == {f"{place}.lora_{part}" for place in linear for part in "ab"} | head
    for place, p in model.named_parameters():
        assert (p.grad is not None) == (place in learning)
        if place.endswith("lora_b"):  # the other gets none while this one is zero
            assert p.grad is not None
            assert p.grad.any(), place


def test_how_many_numbers_learn():
    model = tiny("llama", dtype=torch.float32)
    count = add_lora(model, 3, 5.0, seed=0)
    assert count == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count == 3 * sum(sum(p.shape) for n, p in tiny("llama").named_parameters() if "blocks." in n and p.ndim == 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", LORA)
def test_lora_is_merged_on_export(name: str, tmp_path: Path):
    base, model = with_lora(name)
    with torch.no_grad():
        for place, p in model.named_parameters():
            if place.endswith("lora_b"):
                p.normal_(std=0.2)
    args = inputs(base.config)
    running, exported = run(model, *args), gather_model(model)
    assert (running - run(base, *args)).abs().max() > 0.01
    assert exported.state_dict().keys() == base.state_dict().keys()
    assert not exported.training
    # float32: W x + B A x against (W + B A) x
    assert_same(run(exported, *args), running, within=1e-5)
    ch.save(exported, tmp_path)
    assert_same(run(ch.load(tmp_path), *args), running, within=1e-5)


def test_lora_is_its_equation():
    """y = W x + (alpha / r) B A x, for both kinds of layer."""
    _, model = with_lora("gpt2", rank=3, alpha=5.0)
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_a")]
    assert {type(layer) for layer in layers} == {Linear, FusedLinear}
    for layer in layers:
        nn.init.normal_(layer.lora_b)
        x = torch.randn(2, 7, layer.weight.shape[1])
        out = layer(x)
        out = out if isinstance(out, torch.Tensor) else torch.cat(out, -1)
        wanted = x @ layer.weight.T + layer.bias + 5 / 3 * (x @ layer.lora_a.T @ layer.lora_b.T)
        assert_same(out, wanted, within=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_lora_learns(optimizer: Any):
    base, model = with_lora("llama")
    optimizers = Optimizers(model, Train(optimizer=optimizer, lr=0.01, muon_lr=0.05), lr=0.01)
    tokens = inputs(base.config)[0]
    losses = []
    for _ in range(20):
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    frozen = {place: p for place, p in model.named_parameters() if "lora" not in place}
    assert all(torch.equal(p, frozen[place]) for place, p in base.named_parameters())


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "whisper", "bert-mlm"])
def test_an_export_is_a_whole_copy(name: str):
    model = tiny(name, dtype=torch.float32).train()
    exported = gather_model(model)
    assert model.training
    args = inputs(model.config)
    assert torch.equal(run(exported, *args), run(model.eval(), *args))
    for ours, theirs in zip(exported.parameters(), model.parameters(), strict=True):
        assert ours.data_ptr() != theirs.data_ptr()
    assert exported.generation == model.generation


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_gathered_model_computes_as_the_model_does(name: str):
    """With several processes it decodes the held-out texts, under the run's autocast."""
    model = tiny(name, dtype=torch.float32)
    args = inputs(model.config)
    with torch.autocast("cpu", torch.bfloat16):
        plain = run(model, *args)
        set_residual_dtype(model, Train(stream="bfloat16"), torch.autocast("cpu", torch.bfloat16))
        in_bfloat16 = run(model, *args)
        assert not torch.equal(in_bfloat16, plain)
        assert torch.equal(run(gather_model(model), *args), in_bfloat16)
