"""GPT-2's checkpoints: loaded, compared, saved; and, with GPT-2 as the example, what loading does with any folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPT2Model

import clearhead as ch
from clearhead.checkpoint import load, save
from clearhead.config import Generation

from .compare import (
    FP32,
    FP64,
    assert_near,
    assert_same_weights,
    positions_of,
    refusal,
    saved,
    sides,
    there_and_back,
    tiny,
    tokens,
)

SIZES: dict[str, Any] = dict(vocab_size=53, n_positions=19, n_layer=2, n_embd=21, n_head=3, n_inner=37)
SIZES |= dict(bos_token_id=1, eos_token_id=2)


def gpt2(**changes: Any) -> Any:
    return tiny(GPT2LMHeadModel, GPT2Config(**SIZES | changes))


@st.composite
def configs(draw: st.DrawFn) -> GPT2Config:
    n_head = draw(st.sampled_from([1, 2, 3, 5]))
    drawn = dict(
        n_head=n_head,
        n_embd=n_head * draw(st.sampled_from([7, 8, 11])),
        n_layer=draw(st.integers(1, 3)),
        n_inner=draw(st.sampled_from([None, 37])),
        activation_function=draw(st.sampled_from(["gelu_new", "gelu", "gelu_pytorch_tanh", "relu", "silu", "swish"])),
        layer_norm_epsilon=draw(st.sampled_from([1e-5, 1e-3])),
        tie_word_embeddings=draw(st.booleans()),
    )
    return GPT2Config(**SIZES | drawn)


@pytest.mark.slow
@given(config=configs(), seed=st.integers(0, 9))
@settings(max_examples=12)
def test_any_gpt2(config: GPT2Config, seed: int) -> None:
    x = tokens()
    there_and_back(tiny(GPT2LMHeadModel, config, seed=seed), lambda m: m(x).logits, lambda m: m(x))


@pytest.mark.parametrize("tied", [True, False])
def test_float64(tied: bool) -> None:
    x = tokens()
    there_and_back(gpt2(tie_word_embeddings=tied).double(), lambda m: m(x).logits, lambda m: m(x), within=FP64)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    x, real = tokens(), sides(3, 11)[side]
    there_and_back(
        gpt2(),
        lambda m: m(x, attention_mask=real, position_ids=positions_of(real)).logits[real],
        lambda m: m(x, real)[real],
    )


def test_a_gpt2_without_its_head(tmp_path: Path) -> None:
    """The first files on the hub: no prefix, no head (it is tied), and a causal mask stored in every layer."""
    whole = gpt2()
    state = whole.transformer.state_dict()
    for i in range(2):
        state[f"h.{i}.attn.bias"] = torch.ones(1, 1, 19, 19).tril().bool()
        state[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    bare = GPT2Model(whole.config)
    bare.save_pretrained(tmp_path, state_dict=state)
    assert_near(load(tmp_path)(tokens()).detach(), whole(tokens()).logits.detach(), FP32)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(scale_attn_weights=False), "scale_attn_weights"),
        (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
        (dict(add_cross_attention=True), "add_cross_attention"),
        (dict(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        (dict(activation_function="quick_gelu"), "activation_function"),
        (dict(n_embd=None), "n_embd"),
        (dict(n_head=4), "n_heads=4"),
        (dict(n_layer="two"), "n_layer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_fields(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    assert named in refusal(saved(gpt2(), tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(positions="rotary", d_head=10), "positions"),
        (dict(gated=True), "gated"),
        (dict(n_kv_heads=1), "n_kv_heads"),
        (dict(window=4), "window"),
        (dict(attention_bias="qkv"), "attention_bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_to_write(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    sizes = dict(n_layers=1, d_model=21, n_heads=3, vocab_size=53, max_len=19)
    model = ch.build(ch.preset("gpt2", **sizes | changes))
    with pytest.raises(ch.CheckpointError, match=f"{named}=.*format='clearhead'"):
        save(model, tmp_path / "hf", format="hf")
    assert load(save(model, tmp_path / "ours")).config == model.config


# Folders of any family, with GPT-2 as the example.


@pytest.mark.parametrize("kind", ["gpt_2", "qwen2_moe", "lama", "brt", "falcon"])
def test_an_unknown_model_type_lists_the_families(tmp_path: Path, kind: str) -> None:
    message = refusal(saved(gpt2(), tmp_path, model_type=kind))
    assert (
        f"model_type {kind!r} is not a family we have; supported: apertus, arcee, bert, deit, esm, gpt2, llama"
        in message
    )


def test_missing_and_unexpected_keys_are_named_five_each(tmp_path: Path) -> None:
    model = gpt2()
    state = model.state_dict()
    taken = [key for key in state if ".ln_" in key]
    added = {f"added.{i}": torch.zeros(3) for i in range(7)}
    model.save_pretrained(tmp_path, state_dict={**{k: v for k, v in state.items() if k not in taken}, **added})
    message = refusal(tmp_path)
    assert "10 of its tensors are not in the file" in message
    assert message.count("norm.weight") + message.count("norm.bias") == 5
    assert "7 of the file's are not in the model (added.0, added.1, added.2, added.3, added.4)" in message


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    message = refusal(saved(gpt2(), tmp_path, n_positions=23))
    assert "wpe.weight" in message
    assert "(19, 21)" in message
    assert "(23, 21)" in message


def test_a_head_stored_twice_must_be_equal(tmp_path: Path) -> None:
    message = refusal(saved(gpt2(tie_word_embeddings=False), tmp_path, tie_word_embeddings=True))
    assert "lm_head.weight" in message
    assert "tie_word_embeddings" in message


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    assert "head.weight" in refusal(saved(gpt2(), tmp_path, tie_word_embeddings=False))


def test_torch_files_are_the_same_model(tmp_path: Path) -> None:
    model = gpt2()
    folder = saved(model, tmp_path / "bin")
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert_same_weights(load(folder), load(saved(model, tmp_path / "safe")))


def test_a_name_in_two_torch_files_is_refused(tmp_path: Path) -> None:
    """The second would replace the first, and nobody knows which of them the index means."""
    state = gpt2().state_dict()
    folder, names = saved(gpt2(), tmp_path), ["pytorch_model-1.bin", "pytorch_model-2.bin"]
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: names[at % 2] for at, name in enumerate(state)}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for at, file in enumerate(names):
        torch.save({name: x for n, (name, x) in enumerate(state.items()) if n % 2 == at}, folder / file)
    load(folder)
    torch.save({name: x for n, (name, x) in enumerate(state.items()) if n % 2 or n == 0}, folder / names[1])
    assert "'transformer.wte.weight' is in pytorch_model-2.bin and in a file before it" in refusal(folder)


def test_shards_are_the_same_model(tmp_path: Path) -> None:
    model = gpt2()
    whole = load(saved(model, tmp_path / "whole"))
    model.save_pretrained(tmp_path / "shards", max_shard_size="9KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert_same_weights(load(tmp_path / "shards"), whole)

    save(whole, tmp_path / "ours", format="hf", shard_bytes=9_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    assert_same_weights(load(tmp_path / "ours"), whole)
    assert_same_weights(GPT2LMHeadModel.from_pretrained(tmp_path / "ours"), model)


def test_generation_defaults_are_saved(tmp_path: Path) -> None:
    """generation_config.json takes precedence over config.json; both layouts keep the values."""
    folder = saved(gpt2(), tmp_path / "theirs", pad_token_id=3)
    generation = dict(eos_token_id=[2, 5], max_length=17, suppress_tokens=[7, 11], begin_suppress_tokens=[13])
    (folder / "generation_config.json").write_text(json.dumps(generation))
    model = load(folder)
    said = model.generation
    assert (said.bos, said.eos, said.pad, said.max_length) == (1, (2, 5), 3, 17)
    assert (said.suppress, said.begin_suppress) == ((7, 11), (13,))
    for layout in ("hf", "clearhead"):
        assert load(save(model, tmp_path / layout, format=layout)).generation == said
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "hf").generation_config
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.suppress_tokens) == ([2, 5], 3, [7, 11])


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "mistral-7b"])
def test_no_generation_defaults_stay_none(tmp_path: Path, name: str) -> None:
    """transformers' own defaults are ids of another vocabulary: a text would end at every token 2."""
    sizes = dict(n_layers=1, d_model=24, n_heads=3, n_kv_heads=3, d_ff=37, vocab_size=53, max_len=19)
    save(ch.build(ch.preset(name, **sizes)), tmp_path, format="hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert (theirs.bos_token_id, theirs.eos_token_id) == (None, None)
    assert load(tmp_path).generation == Generation()


def test_numbers_that_float16_can_not_hold_are_refused(tmp_path: Path) -> None:
    """They would be infinite. Those that the file itself has infinite are loaded, for `clearhead check` to name."""
    theirs = gpt2()
    with torch.no_grad():
        theirs.transformer.h[0].mlp.c_fc.weight[0, 0] = 1e6
    load(saved(theirs, tmp_path), dtype=torch.bfloat16)
    with pytest.raises(
        ch.CheckpointError, match=r"mlp.c_fc.weight' has numbers up to 1e\+06, and float16 ends at 65,504"
    ):
        load(tmp_path, dtype=torch.float16)
    with torch.no_grad():
        theirs.transformer.h[0].mlp.c_fc.weight[0, 0] = torch.inf
    load(saved(theirs, tmp_path), dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_weights_of_whole_numbers_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Quantised weights without their scales have the right names and shapes."""
    folder = saved(gpt2(), tmp_path)
    state = load_file(folder / "model.safetensors")
    name = "transformer.h.0.mlp.c_fc.weight"
    save_file({**state, name: (100 * state[name]).to(dtype)}, folder / "model.safetensors")
    assert f"'{name}' holds whole numbers ({dtype})" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_requested_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = gpt2()
    model = load(saved(theirs, tmp_path), dtype=dtype)
    assert {x.dtype for x in model.parameters()} == {dtype}
    assert_same_weights(load(save(model, tmp_path / "hf", format="hf")), model)
    assert torch.equal(model.get_parameter("tokens.weight"), theirs.transformer.wte.weight.to(dtype))
