"""Vision Transformers: checkpoints with and without head and pooler, loaded, compared, saved; other image sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    DeiTConfig,
    DeiTModel,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    ViTModel,
)

import clearhead as ch
from clearhead.checkpoint import load, save

from .compare import FP32, FP64, assert_near, assert_same_weights, refusal, saved, there_and_back, tiny

SIZES: dict[str, Any] = dict(hidden_size=21, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37)
SIZES |= dict(image_size=15, patch_size=5, num_channels=3, num_labels=7)
ENDS = {ViTModel: "last_hidden_state", ViTForImageClassification: "logits"}


def make(kind: type[Any] = ViTForImageClassification, **changes: Any) -> Any:
    return tiny(kind, ViTConfig(**SIZES | changes))


def images(size: int = 15, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(2))


def compare(theirs: Any, x: Tensor, *, within: float = FP32, **options: Any) -> Any:
    end = ENDS[type(theirs)]
    return there_and_back(theirs, lambda m: getattr(m(x), end), lambda m: m(x), within=within, **options)


@st.composite
def configs(draw: st.DrawFn) -> ViTConfig:
    n_heads, patch_size = draw(st.sampled_from([1, 2, 3, 5])), draw(st.sampled_from([3, 5]))
    drawn = dict(
        num_attention_heads=n_heads,
        hidden_size=n_heads * draw(st.sampled_from([7, 8, 11])),
        num_hidden_layers=draw(st.integers(1, 3)),
        hidden_act=draw(st.sampled_from(["gelu", "gelu_new", "relu"])),
        layer_norm_eps=draw(st.sampled_from([1e-12, 1e-5])),
        qkv_bias=draw(st.booleans()),
        patch_size=patch_size,
        image_size=patch_size * draw(st.sampled_from([1, 2, 4])),
        num_channels=draw(st.sampled_from([1, 3])),
        num_labels=draw(st.sampled_from([1, 2, 7])),
    )
    return ViTConfig(**SIZES | drawn)


@pytest.mark.slow
@given(kind=st.sampled_from(list(ENDS)), config=configs(), seed=st.integers(0, 9))
@settings(max_examples=15)
def test_any_vit(kind: type[Any], config: ViTConfig, seed: int) -> None:
    compare(tiny(kind, config, seed=seed), images(config.image_size, config.num_channels))


@pytest.mark.parametrize("kind", ENDS)
def test_float64(kind: type[Any]) -> None:
    compare(make(kind).double(), images().double(), within=FP64)


def test_without_a_pooler() -> None:
    bare = tiny(lambda c: ViTModel(c, add_pooling_layer=False), ViTConfig(**SIZES))
    assert not compare(bare, images(), add_pooling_layer=False).config.pooler


@torch.no_grad()
def test_the_pooler(tmp_path: Path) -> None:
    theirs, x = make(ViTModel), images()
    ours = load(saved(theirs, tmp_path))
    assert_near(ours.pooled(ours(x)), theirs(x).pooler_output)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("size", [5, 10, 25, 40])
@torch.no_grad()
def test_images_of_another_size(tmp_path: Path, kind: type[Any], size: int) -> None:
    theirs, x = make(kind), images(size)
    ours = load(saved(theirs, tmp_path / "theirs"), image_size=size)
    assert (ours.config.image_size, ours.config.max_len) == (size, (size // 5) ** 2 + 1)
    assert_near(ours(x), getattr(theirs(x, interpolate_pos_encoding=True), ENDS[kind]))
    # Saved, it is a model for that size.
    back = kind.from_pretrained(save(ours, tmp_path / "hf", format="hf")).eval()
    assert_near(ours(x), getattr(back(x), ENDS[kind]))
    again = load(save(ours, tmp_path / "ours"))
    assert again.config == ours.config
    assert_same_weights(again, ours)


def test_the_same_size_changes_nothing(tmp_path: Path) -> None:
    folder = saved(make(), tmp_path)
    assert_same_weights(load(folder, image_size=15), load(folder))


@torch.no_grad()
def test_another_size_in_float64_and_bfloat16(tmp_path: Path) -> None:
    theirs, x = make().double(), images(25).double()
    ours = load(saved(theirs, tmp_path), image_size=25)
    assert_near(ours(x), theirs(x, interpolate_pos_encoding=True).logits, FP64)
    small = load(tmp_path, image_size=25, dtype=torch.bfloat16)
    assert {x.dtype for x in small.parameters()} == {torch.bfloat16}
    # interpolated in float32 from a rounded table: off by that rounding and the final one
    wanted = ours.get_parameter("positions.weight")
    assert float((small.get_parameter("positions.weight") - wanted).abs().max()) < 2**-7


def test_a_size_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = saved(make(), tmp_path / "vit")
    with pytest.raises(ch.ConfigError, match="image_size=17 is no whole number of patches of 5; nearest: 15"):
        load(folder, image_size=17)
    words = ch.build(ch.preset("gpt2", n_layers=1, d_model=21, n_heads=3, vocab_size=53, max_len=19))
    with pytest.raises(ch.ConfigError, match="image_size=25 is for models of pictures"):
        load(save(words, tmp_path / "gpt2"), image_size=25)


def test_the_in_memory_names_of_transformers_5(tmp_path: Path) -> None:
    theirs = make()
    theirs.save_pretrained(tmp_path, save_original_format=False)
    assert_near(load(tmp_path)(images()).detach(), theirs(images()).logits.detach())


def test_labels_are_saved(tmp_path: Path) -> None:
    names = ("tench", "goldfish")
    theirs = make(num_labels=2, id2label=dict(enumerate(names)))
    ours = load(saved(theirs, tmp_path / "theirs"))
    assert ours.config.labels == names
    assert load(save(ours, tmp_path / "hf", format="hf")).config == ours.config
    assert ViTForImageClassification.from_pretrained(tmp_path / "hf").config.id2label == dict(enumerate(names))


def test_sizes_as_lists(tmp_path: Path) -> None:
    model = load(saved(make(), tmp_path, image_size=[15, 15], patch_size=[5, 5]))
    assert (model.config.image_size, model.config.patch_size) == (15, 5)


def test_deit_without_a_distillation_token(tmp_path: Path) -> None:
    """transformers' DeiT always has two tokens; a DeiT without the second is stored as a ViT, and loads."""
    message = refusal(saved(tiny(DeiTModel, DeiTConfig(**SIZES)), tmp_path))
    assert "distillation token" in message
    assert "model_type='vit'" in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(image_size=[15, 20]), "image_size"),
        (dict(patch_size=[5, 3]), "patch_size"),
        (dict(pooler_act="relu"), "pooler_act"),
        (dict(pooler_output_size=11), "pooler_output_size"),
        (dict(hidden_act="quick_gelu"), "hidden_act"),
        (dict(quantization_config=dict(bits=4)), "quantization_config"),
        (dict(qkv_bias=False), "query.bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_fields(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    assert named in refusal(saved(make(), tmp_path, **changes))


def test_other_heads_are_refused(tmp_path: Path) -> None:
    assert "decoder.0.weight" in refusal(saved(make(ViTForMaskedImageModeling, encoder_stride=5), tmp_path))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(pooler=True), "pooler"),
        (dict(pool="mean"), "pool"),
        (dict(positions="rotary", d_head=8), "positions"),
        (dict(attention_bias="qvo"), "attention_bias"),
        (dict(embedding_norm=True), "embedding_norm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_to_write(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    sizes = dict(n_layers=1, d_model=21, n_heads=3, image_size=15, patch_size=5, n_classes=7)
    model = ch.build(ch.preset("vit-b-16", **sizes | changes))
    with pytest.raises(ch.CheckpointError, match=f"{named}=.*format='clearhead'"):
        save(model, tmp_path / "hf", format="hf")


def test_a_model_of_ours_goes_to_transformers(tmp_path: Path) -> None:
    sizes = dict(n_layers=2, d_model=21, n_heads=3, d_ff=37, image_size=15, patch_size=5, n_classes=7)
    model = ch.build(ch.preset("deit-ti-16", **sizes)).eval()
    theirs, report = ViTForImageClassification.from_pretrained(
        save(model, tmp_path, format="hf"), output_loading_info=True
    )
    assert not any(report.values()), report
    assert float((theirs.eval()(images()).logits - model(images())).detach().abs().max()) < FP32
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "vit"
