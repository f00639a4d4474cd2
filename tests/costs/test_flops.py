"""FLOPs in closed form against torch's count, and allowed pairs against mask tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch
from clearhead.costs.flops import Lengths, check_lengths, count_forward, count_pairs, count_training
from clearhead.costs.measurement import make_inputs
from clearhead.layers.masks import Mask
from clearhead.models import build
from tests.models.drawn import Fields, fields

ALL = slice(None)
FAMILIES = [
    *("gpt2", "smollm2-135m", "bert-base", "esm2-8m", "deit-ti-16"),
    *("transformer-base", "t5-small", "opus-mt-en-de", "whisper-tiny"),
]


def counted(config: ch.Config, at: Lengths, *, checkpointing: bool = False) -> tuple[int, int]:
    """torch's count on the meta device: forward, total. With the explicit kernel: on a CPU torch does not count fused ones."""
    model = build(config, device="meta")
    with FlopCounterMode(display=False) as counter:
        out = model(*make_inputs(config, 3, at, "meta"), checkpointing=checkpointing)
        forward = counter.get_total_flops()
        out.sum().backward()
    return forward, counter.get_total_flops()


def said(config: ch.Config, at: Lengths, *, checkpointing: bool = False) -> tuple[int, int]:
    training = count_training(config, 3, at, checkpointing=checkpointing)
    return sum(count_forward(config, 3, at).values()), sum(training.values())


@pytest.mark.slow
@given(drawn=fields(kernel="explicit"), checkpointing=st.booleans())
@settings(max_examples=15)
def test_any_config_does_the_operations_that_torch_counts(drawn: Fields, checkpointing: bool) -> None:
    config = ch.Config(**drawn)
    at = check_lengths(config, None, None)
    assert said(config, at, checkpointing=checkpointing) == counted(config, at, checkpointing=checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_does_the_operations_that_torch_counts(name: str, checkpointing: bool) -> None:
    config = ch.preset(name, n_layers=2, kernel="explicit")
    length = None if config.inputs == "patches" else 13
    at = check_lengths(config, length, 17 if config.shape == "encoder-decoder" else None)
    assert said(config, at, checkpointing=checkpointing) == counted(config, at, checkpointing=checkpointing)


def test_gpt2_at_its_full_length() -> None:
    parts = count_forward(ch.preset("gpt2"), 1, Lengths(1024))
    assert parts == {
        "embedding": 0,
        "projections": 12 * 2 * 1024 * 4 * 768**2,
        "attention": 12 * 2 * 2 * 1024**2 * 768,
        "feedforward": 12 * 2 * 1024 * 8 * 768**2,
        "head": 2 * 1024 * 768 * 50257,
    }
    assert sum(parts.values()) == 291_648_307_200


def test_attention_costs_as_much_as_the_rest_of_a_layer_from_six_widths_on() -> None:
    config = ch.preset("gpt2", max_len=6 * 768)
    parts = count_forward(config, 1, check_lengths(config, None, None))
    assert parts["attention"] == parts["projections"] + parts["feedforward"]


@given(T=st.integers(1, 23), window=st.integers(0, 29), causal=st.booleans())
def test_allowed_pairs_are_those_of_the_mask(T: int, window: int, causal: bool) -> None:
    allowed = Mask(causal=causal, window=window).allowed(T, T, ALL, ALL, torch.device("cpu"))
    pairs = T * T if allowed is None else int(allowed.sum())
    assert count_pairs(T, T, causal=causal, window=window) == pairs
    assert count_pairs(T, T, causal=causal, window=window, pairs="all") == T * T


@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "transformer-base", "whisper-tiny"])
def test_tokens_one_by_one_do_the_useful_work_of_all_at_once(name: str) -> None:
    """The source is read with the first."""
    config = ch.preset(name, window=5)
    source = 11 if config.shape == "encoder-decoder" else 0
    whole = count_forward(config, 2, Lengths(7, source), pairs="allowed")
    first = count_forward(config, 2, Lengths(1, source), pairs="allowed")
    steps = [count_forward(config, 2, Lengths(1, source, past=n), pairs="allowed") for n in range(1, 7)]
    for part, n in whole.items():
        assert n == first[part] + sum(step[part] for step in steps)


def test_pictures_have_one_length_and_only_encoder_decoders_a_source() -> None:
    with pytest.raises(
        ch.ClearheadError, match=r"196 patches and a class token has length 197; got length=64; leave it"
    ):
        check_lengths(ch.preset("vit-b-16"), 64, None)
    with pytest.raises(ch.ClearheadError, match=r"source_length=5 is for encoder-decoders; got shape='decoder'"):
        check_lengths(ch.preset("gpt2"), 7, 5)
    with pytest.raises(ch.ClearheadError, match=r"at least 1; got length=0, source_length=None"):
        check_lengths(ch.preset("gpt2"), 0, None)
