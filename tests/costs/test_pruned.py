"""Forecasts of models with unevenly pruned heads, against counted operators, real caches and what autograd keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch
from clearhead.costs import cost
from clearhead.costs.activations import Setting, count_saved
from clearhead.costs.flops import Lengths, check_lengths
from clearhead.costs.measurement import make_inputs
from clearhead.kernels import Packed
from clearhead.models import Decoder, EncoderDecoder, build
from clearhead.quantization.integer import quantize
from tests.costs.saved_tensors import saved_bytes
from tests.models.tiny import EVERY, tiny_config

B = 3


def pruned(name: str, **changes: Any) -> tuple[ch.Config, Lengths]:
    """A config without the last group of heads in every third attention, and without the first and the last in the last one."""
    whole = tiny_config(name, **changes)
    group = whole.n_heads // whole.n_kv_heads
    last = range(whole.n_heads - group, whole.n_heads)
    gone = {place: set(last) for place in whole.attentions[1::3]}
    if whole.n_kv_heads > 2:
        gone[whole.attentions[-1]] = {*range(group), *last}
    names = tuple(f"{place}.{head}" for place in whole.attentions for head in sorted(gone.get(place, ())))
    config = replace(whole, pruned_heads=names)
    length = None if config.inputs == "patches" else 11
    return config, check_lengths(config, length, 13 if config.shape == "encoder-decoder" else None)


def asked(config: ch.Config, at: Lengths) -> dict[str, Any]:
    return dict(batch=B, length=at.target, source_length=at.source or None)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_operations_and_parameters_are_those_counted(name: str, checkpointing: bool) -> None:
    config, at = pruned(name, kernel="explicit")
    model = build(config, device="meta").train()
    with FlopCounterMode(display=False) as counter:
        out = model(*make_inputs(config, B, at, "meta"), checkpointing=checkpointing)
        forward = counter.get_total_flops()
        out.sum().backward()
    given = asked(config, at)
    training = cost(config, **given, mode="train", checkpointing=checkpointing)
    assert cost(config, **given).flops == forward
    assert training.flops == counter.get_total_flops()
    assert training.params == sum(p.numel() for p in model.parameters())
    assert training.optimizer_bytes == 8 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    whole = cost(replace(config, pruned_heads=()), **given)
    assert (training.params < whole.params) == bool(config.pruned_heads)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt2", "mistral", "original", "t5"])
def test_the_cache_is_as_large_as_said(name: str, precision: str) -> None:
    config, at = pruned(name)
    assert config.pruned_heads
    model = build(config, dtype=getattr(torch, precision)).eval()
    assert isinstance(model, Decoder | EncoderDecoder)
    cache = model.new_cache(batch=B, max_len=at.target)
    with torch.no_grad():
        model(*make_inputs(config, B, at), cache=cache)
    said = cost(config, **asked(config, at), mode="decode", precision=precision)
    assert said.kv_cache_bytes == cache.nbytes
    assert said.weight_bytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounded_weights_weigh_what_is_said(kind: str) -> None:
    """Rows of the output projection are shorter, and no longer whole blocks of 32 or 64."""
    config = ch.preset(
        "gpt2", d_model=96, n_heads=6, n_layers=2, vocab_size=101, pruned_heads=("blocks.1.attention.3",)
    )
    model = quantize(build(config), kind)
    packed = [x for module in model.modules() if isinstance(module, Packed) for x in module.buffers(recurse=False)]
    assert cost(config, batch=1, quantize=kind).weight_bytes == sum(x.nbytes for x in (*model.parameters(), *packed))


@pytest.mark.parametrize("name", ["gpt2", "mistral", "original", "bert"])
def test_training_keeps_what_is_said(name: str) -> None:
    config, at = pruned(name, dropout=0.0, attention_dropout=0.0)
    said = sum(count_saved(config, B, at, Setting(half=False, cuda=False), logits=0).values())
    # As for whole models: tables of angles and what is a number a row are rounded.
    assert said == pytest.approx(saved_bytes(config, B, at, half=False), rel=0.01)
