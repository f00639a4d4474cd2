"""Short texts at the Python prompt, tables in notebooks: of configs, models, costs and what a probe saw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from models.drawn import Fields, fields

import clearhead as ch
from clearhead.quantization.integer import quantize

SIZES = dict(n_layers=2, d_model=24, n_heads=2, d_ff=64, vocab_size=53, max_len=31)


def html_of(shown: Any) -> str:
    return shown._repr_html_()


@pytest.mark.parametrize("name", ch.presets())
def test_a_presets_repr_is_short_and_makes_it_again(name: str) -> None:
    config = ch.preset(name)
    assert eval(repr(config), {"Config": ch.Config}) == config
    assert len(repr(config)) < 450


@given(drawn=fields())
@settings(max_examples=20)
def test_any_configs_repr_makes_it_again(drawn: Fields) -> None:
    config = ch.Config.from_dict(dict(drawn))
    assert eval(repr(config), {"Config": ch.Config}) == config


def test_what_follows_from_other_fields_is_left_out() -> None:
    assert repr(ch.preset("gpt2", n_layers=2)) == (
        "Config(shape='decoder', family='gpt2', d_model=768, n_layers=2, n_heads=12, vocab_size=50257, max_len=1024, "
        "positions='learned', norm_first=True, feedforward='gelu_tanh', tie_embeddings=True, init_residual='scaled')"
    )
    assert "d_head=13" in repr(ch.preset("gpt2", d_head=13))


def test_long_tuples_are_cut() -> None:
    config = ch.preset("vit-b-16", labels=tuple(f"label {i}" for i in range(1000)), n_classes=1000)
    assert "'label 3', ... 1000 in all)" in repr(config)
    assert len(html_of(config)) < 4000
    assert repr(ch.Generation(eos=(2,), suppress=tuple(range(90)))) == (
        "Generation(eos=(2,), suppress=(0, 1, 2, 3, ... 90 in all))"
    )


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "transformer-base"])
def test_a_model_is_one_line(name: str) -> None:
    model = ch.build(ch.preset(name, **SIZES))
    line, count = repr(model), sum(p.numel() for p in model.parameters())
    assert "\n" not in line
    assert f"{name.partition('-')[0]}" in line or "original" in line
    assert f"of width 24, 2 heads, 53 tokens, {count:,} parameters, float32 on cpu)" in line
    assert "(blocks): ModuleList(" in model.tree()
    html = html_of(model)
    assert html.startswith("<details><summary>")
    assert "ModuleList" in html
    assert str(torch.nn.Sequential(model)).count("\n") == 2  # inside another module, too


def test_a_quantised_model_counts_what_it_was_trained_with() -> None:
    model = ch.build(ch.preset("gpt2", **SIZES)).eval()
    count = sum(p.numel() for p in model.parameters())
    assert f"{count:,} parameters, float32 and int8 on cpu" in repr(quantize(model, "int8"))


def test_classes_and_pictures_are_named() -> None:
    model = ch.build(ch.preset("vit-b-16", n_layers=1, d_model=24, n_heads=2, image_size=32, n_classes=7))
    assert "images of 32 x 32, 7 classes" in repr(model)


def test_a_cost_is_one_line_and_a_table() -> None:
    cost = ch.cost(ch.preset("gpt2"), batch=8, length=64, mode="train")
    assert repr(cost).startswith(f"Cost(params=124,439,808, flops={cost.flops:,}, peak_bytes=")
    assert len(repr(cost)) < 120
    html = html_of(cost)
    assert "<td" in html
    for word in ("attention: T²", "feed-forward", "optimizer", "124,439,808"):
        assert word in html
    assert "cache" not in html  # nothing of it in training


def test_what_was_seen_is_summed_up() -> None:
    model = ch.build(ch.preset("gpt2", **SIZES)).eval()
    with torch.no_grad(), ch.probe(model, "blocks.*.attention.weights", "blocks.*.residual") as seen:
        assert "not reached" in repr(seen)
        model(torch.randint(0, 53, (3, 7)))
    assert repr(seen) == "Seen(4 sites: blocks.*.attention.weights (3, 2, 7, 7), blocks.*.residual (3, 7, 24))"
    assert "<td" in html_of(seen)
    assert seen["blocks.0.attention.weights"].shape == (3, 2, 7, 7)
    with torch.no_grad(), ch.probe(model, "*", rows=-1, head=1) as all_of_it:
        model(torch.randint(0, 53, (3, 7)))
    assert len(repr(all_of_it)) < 300
    assert "(3, 1, 1, 7)" in html_of(all_of_it)


def test_html_is_escaped() -> None:
    config = replace(ch.preset("gpt2"), family="<script>")
    assert "<script>" not in html_of(config)
