"""Presets: the exact published parameter counts, by the closed form and by building the model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from models.drawn import Fields, fields

import clearhead as ch
from clearhead.costs.parameters import count_parameters
from clearhead.families import FAMILIES

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,  # tied
    "llama-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "smollm2-135m": 134_515_008,
    "qwen2-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "bert-base": 109_482_240,  # with pooler
    "bert-large": 335_141_888,
    "minilm-l6": 22_713_216,
    "vit-b-16": 86_567_656,  # 1,000 classes
    "vit-l-16": 304_326_632,
    "t5-small": 60_506_624,
    "opus-mt-en-de": 73_886_208,  # without its two fixed tables of positions
    "whisper-tiny": 37_760_640,  # encoder positions counted, head tied
}


def count(config: ch.Config) -> int:
    return sum(p.numel() for p in ch.build(config, device="meta").parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    assert count(ch.preset(name)) == PUBLISHED[name]
    assert sum(count_parameters(ch.preset(name)).values()) == PUBLISHED[name]


def test_marians_position_tables() -> None:
    """Other libraries count its two tables of 512 positions as parameters; here they are computed."""
    assert PUBLISHED["opus-mt-en-de"] + 2 * 512 * 512 == 74_410_496
    config = ch.preset("opus-mt-en-de")
    assert count(ch.Config.from_dict(config.to_dict() | dict(positions="learned"))) == 74_410_496


@pytest.mark.slow
@pytest.mark.parametrize("name", ch.presets())
def test_the_closed_form_is_the_count(name: str) -> None:
    config = ch.preset(name)
    assert sum(count_parameters(config).values()) == count(config)


PARTS = {
    "embedding": ("tokens.", "source.", "segments.", "positions."),
    "attention": ("qkv.", "kv.", "q_proj.", "o_proj."),
    "feedforward": ("feedforward.",),
    "norm": ("norm.",),
    "head": ("head.", "pool."),
}


def part_of(site: str) -> str:
    """The part to which a parameter belongs, by its name."""
    if site.startswith(PARTS["head"]):
        return "head"
    if "norm" in site:
        return "norm"
    return next(part for part, names in PARTS.items() if any(f".{name}" in f".{site}" for name in names))


@pytest.mark.slow
@given(drawn=fields())
@settings(max_examples=40)
def test_the_closed_form_is_the_count_of_any_config_part_by_part(drawn: Fields) -> None:
    config = ch.Config(**drawn)
    counted = dict.fromkeys(PARTS, 0)
    for site, parameter in ch.build(config, device="meta").named_parameters():
        counted[part_of(site)] += parameter.numel()
    assert count_parameters(config) == counted


def millions(name: str, vocab_size: int) -> float:
    return sum(count_parameters(ch.preset(name, vocab_size=vocab_size)).values()) / 1e6


def test_the_papers_table_3_as_families_original_states_it() -> None:
    module = FAMILIES["original"].__doc__
    assert module is not None
    assert "37,000" in module
    assert f"{millions('transformer-base', 37_000):.1f} M" == "63.1 M"
    assert f"{millions('transformer-big', 37_000):.1f} M" == "214.2 M"
    assert "63.1 M and 214.2 M" in module
    for name, vocabulary, total, width in (
        ("transformer-base", 40_745, 65, 512),
        ("transformer-big", 35_784, 213, 1024),
    ):
        assert f"{total}.0 M takes {vocabulary:,}" in module
        # the vocabulary that comes nearest: a token is a row of the shared matrix
        assert abs(millions(name, vocabulary) - total) <= width / 2 / 1e6


def test_gpt3s_widths() -> None:
    config = ch.preset("gpt3-175b")
    assert (config.d_model, config.d_head, config.n_layers) == (12_288, 128, 96)


def test_every_family_has_a_size_and_every_size_its_family() -> None:
    assert set(FAMILIES) == {"original", "gpt2", "llama", "qwen3", "bert", "esm", "vit", "t5", "marian", "whisper"}
    for family, module in FAMILIES.items():
        assert module.SIZES
        assert {ch.preset(name).family for name in module.SIZES} == {family}
    names = ch.presets()
    assert len(names) == len(set(names)) == sum(len(module.SIZES) for module in FAMILIES.values())
    assert "esm2-8m" in names


def test_the_shape_of_each_family() -> None:
    shapes = {family: {ch.preset(name).shape for name in module.SIZES} for family, module in FAMILIES.items()}
    assert shapes == {
        "original": {"encoder-decoder"},
        "gpt2": {"decoder"},
        "llama": {"decoder"},
        "qwen3": {"decoder"},
        "bert": {"encoder"},
        "esm": {"encoder"},
        "vit": {"encoder"},
        "t5": {"encoder-decoder"},
        "marian": {"encoder-decoder"},
        "whisper": {"encoder-decoder"},
    }


def test_any_field_of_a_preset_can_be_changed() -> None:
    config = ch.preset("gpt2", n_layers=4, positions="alibi")
    assert (config.n_layers, config.positions, config.d_model) == (4, "alibi", 768)


def test_an_unknown_preset_is_named_with_the_nearest() -> None:
    with pytest.raises(ch.ConfigError, match=r"no preset 'gtp2'; did you mean 'gpt2'"):
        ch.preset("gtp2")
    with pytest.raises(ch.ConfigError, match=r"no preset 'lama-7b'; did you mean 'llama-7b'"):
        ch.preset("lama-7b")
    with pytest.raises(ch.ConfigError, match=r"no preset '%%%'; choose one of: .*gpt2.* in all\)"):
        ch.preset("%%%")


@pytest.mark.parametrize("name", ["bart-base", "gptj", "gpt-neo-1.3b", "roberta-base"])
def test_a_family_that_is_not_here_is_no_slip(name: str) -> None:
    with pytest.raises(ch.ConfigError, match=f"there is no preset '{name}': its family is none of original, gpt2"):
        ch.preset(name)
    with pytest.raises(ch.ConfigError, match="did you mean 'bert-base'"):
        ch.preset("bert-bas")
