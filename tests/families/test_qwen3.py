"""Qwen3, Apertus and Arcee: checkpoints loaded, compared, saved; models of our own recipes in their layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    ArceeConfig,
    ArceeForCausalLM,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import clearhead as ch
from clearhead.checkpoint import load, save
from clearhead.training.recipe import SHIPPED

from .compare import assert_near, positions_of, refusal, saved, sides, there_and_back, tiny, tokens

SIZES: dict[str, Any] = {
    **dict(vocab_size=53, num_hidden_layers=2, intermediate_size=37, max_position_embeddings=31, pad_token_id=0),
    **dict(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-3),
    **dict(rope_parameters=dict(rope_type="default", rope_theta=33.0)),
}
KINDS: dict[type[PreTrainedConfig], Any] = {
    Qwen3Config: Qwen3ForCausalLM,
    ApertusConfig: ApertusForCausalLM,
    ArceeConfig: ArceeForCausalLM,
}
ACTS = {Qwen3Config: "silu", ApertusConfig: "gelu", ArceeConfig: "relu2"}
WINDOWED = dict(use_sliding_window=True, sliding_window=4, max_window_layers=0)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.model_type)


def make(kind: Any, **changes: Any) -> Any:
    return tiny(KINDS[kind], kind(**SIZES | dict(hidden_act=ACTS[kind]) | changes))


@pytest.mark.slow
@given(
    kind=st.sampled_from(list(KINDS)),
    eps=st.sampled_from([1e-6, 1e-2]),
    tied=st.booleans(),
    bias=st.booleans(),
    act=st.sampled_from(["silu", "gelu", "relu2"]),
    seed=st.integers(0, 9),
)
@settings(max_examples=15)
def test_any_qwen3(kind: Any, eps: float, tied: bool, bias: bool, act: str, seed: int) -> None:
    changes = dict(rms_norm_eps=eps, tie_word_embeddings=tied, attention_bias=bias, hidden_act=act)
    x = tokens()
    there_and_back(
        tiny(KINDS[kind], kind(**SIZES | changes), seed=seed), lambda m: m(x).logits, lambda m: m(x)
    )  # fmt: skip


@kinds
def test_padding(kind: Any) -> None:
    x, real = tokens(), sides(3, 11)["left"]
    there_and_back(
        make(kind),
        lambda m: m(x, attention_mask=real, position_ids=positions_of(real)).logits[real],
        lambda m: m(x, real)[real],
    )


def test_a_sliding_window() -> None:
    x = tokens()
    assert there_and_back(make(Qwen3Config, **WINDOWED), lambda m: m(x).logits, lambda m: m(x)).config.window == 4


@kinds
def test_attention_both_ways(kind: Any) -> None:
    """`is_causal=false`, as masked language models have it: every token sees every other."""
    x, real = tokens(), sides(3, 11)["right"]
    model = there_and_back(
        make(kind, is_causal=False), lambda m: m(x, attention_mask=real).logits[real], lambda m: m(x, real)[real]
    )
    assert (model.config.shape, model.config.head) == ("encoder", "tokens")


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        (ApertusConfig, dict(hidden_act="xielu"), "xielu"),
        (ApertusConfig, dict(layer_types=["sliding_attention"] * 2), "layer_types"),
        # Where these are missing, transformers has 1e-5, and for Apertus another base and LLaMA 3's scaling.
        (ApertusConfig, dict(rms_norm_eps=None), "no 'rms_norm_eps'"),
        (ArceeConfig, dict(rms_norm_eps=None), "no 'rms_norm_eps'"),
        (ApertusConfig, dict(rope_parameters=None), "no 'rope_parameters'"),
        (ApertusConfig, dict(rope_parameters=None, rope_scaling=dict(type="linear", factor=2.0)), "no 'rope_theta'"),
        (Qwen3Config, WINDOWED | dict(is_causal=False, layer_types=["sliding_attention"] * 2), "sliding_window=4"),
        (Qwen3Config, dict(rope_scaling=dict(rope_type="yarn", factor=2.0)), "yarn"),
        (Qwen3Config, dict(num_experts=8), "num_experts"),
    ],
)
def test_refused_fields(tmp_path: Path, kind: Any, changes: dict[str, Any], named: str) -> None:
    assert named in refusal(saved(make(kind), tmp_path, **changes))


def test_an_encoder_without_a_head_is_refused(tmp_path: Path) -> None:
    assert "is_causal=false" in refusal(saved(make(Qwen3Config, is_causal=False).model, tmp_path))


# Models of our recipes.


RECIPES = sorted(file.stem for file in SHIPPED.glob("*.toml"))
# What stands in the way of the others: transformers has no such model.
MISFITS = {
    "classify": "head='classes'",
    "dates": "positions='rotary'.*qk_norm=True",
    "digits": "norm='rms'.*qk_norm=True.*pool='mean'",
    "pictures": "norm='rms'.*qk_norm=True.*pool='mean'",
    "translate": "positions='rotary'.*qk_norm=True",
}


def of_recipe(name: str, **changes: Any) -> Any:
    """A small random model with the architecture of a recipe's."""
    recipe = ch.find_recipe(name)
    fields: dict[str, Any] = {**recipe.model, "n_layers": 2, "d_model": 24, "n_heads": 2, "d_ff": 37}
    fields.pop("n_decoder_layers", None)
    fields |= {} if fields.get("inputs") == "patches" else dict(vocab_size=53, max_len=31)
    heads: dict[str, Any] = {"mask": dict(head="tokens"), "classify": dict(head="classes", n_classes=3)}
    torch.manual_seed(0)
    model = ch.build(ch.Config.from_dict({**fields, **heads.get(recipe.task, {}), **changes})).eval()
    for p in model.parameters():  # the recipes begin with zeros, which would hide mistakes
        torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.3)
    return model


@pytest.mark.parametrize("name", RECIPES)
def test_models_of_recipes_as_hugging_face_folders(tmp_path: Path, name: str) -> None:
    """Each is loaded by transformers with equal logits, or refused with the fields that no layout has."""
    model = of_recipe(name)
    if name in MISFITS:
        with pytest.raises(ch.CheckpointError, match=f"the nearest, has no place for {MISFITS[name]}"):
            save(model, tmp_path / "hf", format="hf")
        return
    save(model, tmp_path / "hf", format="hf")
    load_theirs: Any = AutoModelForCausalLM.from_pretrained
    theirs, report = load_theirs(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        assert_near(model(tokens()), theirs.eval()(tokens()).logits)
        assert_near(load(tmp_path / "hf")(tokens()), model(tokens()))


def test_the_tokenizer_beside_a_model(tmp_path: Path) -> None:
    """transformers' AutoTokenizer reads it, gives the same ids, and the whole folder writes the same text."""
    tokenizer = ch.train_tokenizer(texts=["the cat sat on the mat"] * 9, vocab_size=280)
    model = of_recipe("language", vocab_size=tokenizer.vocab_size)
    model.generation = ch.Generation(bos=tokenizer.bos, eos=(3,), pad=tokenizer.pad)
    (tmp_path / "chat_template.jinja").write_text("of another tokenizer")
    save(model, tmp_path, format="hf", tokenizer=tokenizer)
    theirs, text = AutoTokenizer.from_pretrained(tmp_path), "the cat, überhaupt"
    assert theirs(text).input_ids == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert theirs.pad_token_id == tokenizer.pad
    assert theirs.chat_template is None
    model_of_theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    written = model_of_theirs.eval().generate(**theirs(text, return_tensors="pt"), max_new_tokens=5, do_sample=False)
    ids = tokenizer.encode(text)
    assert written[0, len(ids) :].tolist() == ch.generate(model, [ids], max_new_tokens=5, temperature=0)[0]


def test_a_model_of_one_family_in_the_layout_of_another(tmp_path: Path) -> None:
    sizes: dict[str, Any] = dict(n_layers=1, d_model=24, n_heads=6, n_kv_heads=2, d_ff=37, vocab_size=53, max_len=19)
    for changes, kind in ((dict(qk_norm=True), "Qwen3"), (dict(gated=False), "Arcee")):
        save(ch.build(ch.preset("llama-3-8b", **sizes | changes)), tmp_path / kind, format="hf")
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path / kind)).__name__ == f"{kind}ForCausalLM"
