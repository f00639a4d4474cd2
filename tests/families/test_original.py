"""The original Transformer, saved in Marian's layout: transformers and families/marian.py load it with the same output."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MarianMTModel

import clearhead as ch
from clearhead.checkpoint import load, save
from clearhead.config import Generation
from clearhead.errors import CheckpointError
from tests.families.compare import FP32, FP64, assert_near, assert_same_weights, sides, tokens
from tests.families.seq2seq import aligned, greedy
from tests.models.tiny import built, stir

SIZES: dict[str, Any] = dict(
    d_model=22, n_heads=2, n_layers=3, n_decoder_layers=2, d_ff=37, vocab_size=53, max_len=31, dropout=0.1
)
SPECIAL = Generation(bos=1, eos=(2,), pad=3, decoder_start=1, max_length=29)
SOURCE, TARGET = tokens(length=13), tokens(seed=3)


def original(*, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    model = built(ch.preset("transformer-base", **SIZES | fields), dtype=dtype)
    model.generation = SPECIAL
    return model


def run_theirs(model: Any, **inputs: Tensor) -> Tensor:
    return aligned(model)(input_ids=SOURCE, decoder_input_ids=TARGET, **inputs).logits


@torch.no_grad()
def exported(ours: Any, folder: Path, *, within: float = FP32) -> Any:
    """The model as transformers loads it: same output as ours, no missing keys. Loaded by families/marian.py, the same."""
    save(ours, folder / "hf", format="hf")
    theirs, report = MarianMTModel.from_pretrained(folder / "hf", output_loading_info=True)
    assert not any(report.values()), report  # nothing missing, unexpected, mismatched
    answer = ours(SOURCE, TARGET)
    assert_near(answer, run_theirs(theirs.eval()), within)

    again = load(folder / "hf")
    assert (again.config.family, again.config.sinusoid_halves) == ("marian", True)
    assert again.generation == ours.generation
    assert_near(again(SOURCE, TARGET), answer, within)

    save(ours, folder / "ours")
    same = load(folder / "ours")
    assert (same.config, same.generation) == (ours.config, ours.generation)
    assert_same_weights(same, ours)
    assert torch.equal(same(SOURCE, TARGET), answer)
    return theirs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("halves", [False, True], ids=["alternating", "halves"])
def test_export(halves: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    ours = original(sinusoid_halves=halves, dtype=dtype)
    exported(ours, tmp_path, within=FP32 if dtype == torch.float32 else FP64)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=10)
def test_any_config_that_marian_can_express(data: st.DataObject) -> None:
    draw = data.draw
    heads, source_vocab_size = draw(st.integers(1, 4)), draw(st.sampled_from([0, 59]))
    ours = original(
        dtype=torch.float64,
        sinusoid_halves=draw(st.booleans()),
        n_heads=heads,
        d_model=heads * draw(st.sampled_from([2, 6, 10])),
        n_layers=draw(st.integers(1, 3)),
        n_decoder_layers=draw(st.integers(1, 3)),
        feedforward=draw(st.sampled_from(["relu", "gelu", "gelu_tanh", "silu", "relu2"])),
        embedding_scale=draw(st.booleans()),
        source_vocab_size=source_vocab_size,
        tie_embeddings=draw(st.booleans()) or not source_vocab_size,
        head_bias=draw(st.sampled_from(["none", "learned", "fixed"])),
    )
    with tempfile.TemporaryDirectory() as folder:
        exported(ours, Path(folder), within=FP64)


def test_only_the_order_of_coordinates_changes(tmp_path: Path) -> None:
    """Sines first: coordinates 0 2 4 ..., then the cosines, 1 3 5 ..., in every tensor that reads or writes the residual stream."""
    ours = original()
    theirs = exported(ours, tmp_path)
    order = torch.arange(22).reshape(-1, 2).T.flatten()
    block, layer = ours.decoder.blocks[1], theirs.model.decoder.layers[1]
    state = block.state_dict()
    assert torch.equal(theirs.model.shared.weight, ours.tokens.weight[:, order])
    assert torch.equal(layer.encoder_attn.k_proj.weight, state["cross.k_proj.weight"][:, order])
    assert torch.equal(layer.encoder_attn.k_proj.bias, state["cross.k_proj.bias"])
    assert torch.equal(layer.self_attn.out_proj.weight, state["attention.o_proj.weight"][order])
    assert torch.equal(layer.fc2.bias, state["feedforward.down.bias"][order])
    assert torch.equal(layer.final_layer_norm.weight, state["feedforward_norm.weight"][order])


def test_halves_are_saved_unchanged(tmp_path: Path) -> None:
    ours = original(sinusoid_halves=True)
    exported(ours, tmp_path)
    assert_same_weights(load(tmp_path / "hf"), ours)


@torch.no_grad()
def test_padding(tmp_path: Path) -> None:
    ours, source, target = original(), sides(3, 13)["right"], sides(3, 11)["right"]
    theirs = exported(ours, tmp_path)
    masked = run_theirs(theirs, attention_mask=source.long(), decoder_attention_mask=target.long())
    assert_near(ours(SOURCE, TARGET, source, target_mask=target)[target], masked[target])


@pytest.mark.slow
def test_greedy(tmp_path: Path) -> None:
    ours = original(source_vocab_size=53, tie_embeddings=False)
    for seed in range(30):
        stir(ours, seed)
        for parameter in (*ours.encoder.parameters(), *ours.decoder.parameters()):
            parameter.data *= 2 if parameter.ndim == 2 else 1
        text = greedy(ours, SOURCE)
        if len(text.unique()) > 2:  # otherwise the comparison would mean little
            break
    else:
        raise AssertionError("every model writes the same few tokens over and over: change the weights")
    theirs = exported(ours, tmp_path)
    written = theirs.generate(SOURCE, max_new_tokens=10, min_new_tokens=10, do_sample=False, num_beams=1)
    assert written[:, 1:].tolist() == text.tolist()


def test_without_special_tokens(tmp_path: Path) -> None:
    """By default transformers uses pad 58,100 and fails with a smaller vocabulary."""
    ours = original()
    ours.generation = Generation()
    theirs = exported(ours, tmp_path)
    assert (theirs.config.pad_token_id, theirs.config.eos_token_id, theirs.generation_config.forced_eos_token_id) == (
        None,
    ) * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        dict(positions="rotary"),
        dict(positions="learned"),
        dict(norm="rms"),
        dict(norm_first=True),
        dict(norm_eps=1e-6),
        dict(embedding_norm=True),
        dict(gated=True),
        dict(attention_bias="qkvo", bias=False),
        dict(attention_bias="qv"),
        dict(qk_norm=True),
        dict(d_head=10),
        dict(n_kv_heads=1),
        dict(attention_scale=0.3),
        dict(window=5),
        dict(head_transform=True),
        dict(head_scale=True),
        dict(tie_embeddings=False),
        dict(inputs="frames"),
    ],
    ids=str,
)
def test_refused_to_write(change: dict[str, Any], tmp_path: Path) -> None:
    config = ch.preset("transformer-base", **SIZES | dict(n_heads=1 if "positions" in change else 2) | change)
    with pytest.raises(
        CheckpointError, match=f"Marian's layout.* has no place for {list(change)[-1]}=.*format='clearhead'"
    ):
        save(ch.build(config), tmp_path / "hf", format="hf")
    assert not (tmp_path / "hf").exists()


def test_published_sizes_can_be_saved() -> None:
    from clearhead.families import FAMILIES

    for name in ("transformer-base", "transformer-big"):
        assert FAMILIES["original"].write(ch.preset(name))["d_model"] == ch.preset(name).d_model
        assert (
            FAMILIES["original"].write(replace(ch.preset(name), source_vocab_size=7, tie_embeddings=False))[
                "vocab_size"
            ]
            == 7
        )
