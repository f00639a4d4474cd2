"""LLaMA 1 to 3, Mistral, Qwen2 and SmolLM2: checkpoints loaded, compared, saved."""

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
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

import clearhead as ch
from clearhead.checkpoint import load, save

from .compare import FP32, FP64, assert_near, positions_of, refusal, saved, sides, there_and_back, tiny, tokens

SIZES: dict[str, Any] = dict(vocab_size=53, num_hidden_layers=2, intermediate_size=37, max_position_embeddings=31)
SIZES |= dict(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, pad_token_id=0)
KINDS: dict[type[PreTrainedConfig], Any] = {
    LlamaConfig: LlamaForCausalLM,
    MistralConfig: MistralForCausalLM,
    Qwen2Config: Qwen2ForCausalLM,
}

LINEAR = dict(rope_type="linear", rope_theta=10_000.0, factor=4.0)
# As in LLaMA 3.1, but with a context length that has frequencies on both sides of the transition.
LLAMA3 = dict(rope_type="llama3", rope_theta=100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=17)
WINDOWED = dict(use_sliding_window=True, sliding_window=4, max_window_layers=0)


def make(kind: type[PreTrainedConfig] = LlamaConfig, **changes: Any) -> Any:
    return tiny(KINDS[kind], kind(**SIZES | changes))


def theirs_on(x: Tensor) -> Any:
    return lambda m: m(x).logits


def ours_on(x: Tensor) -> Any:
    return lambda m: m(x)


@st.composite
def configs(draw: st.DrawFn) -> PreTrainedConfig:
    def pick(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    kind, n_kv_heads, d_head = pick(*KINDS), pick(1, 2, 3), pick(2, 6, 10)
    n_heads = n_kv_heads * pick(1, 2, 3)
    drawn: dict[str, Any] = dict(
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        head_dim=d_head,
        hidden_size=n_heads
        * pick(4, 7, 10),  # for LLaMA a multiple of the number of heads, though heads may have any width
        num_hidden_layers=pick(1, 2, 3),
        hidden_act=pick("silu", "gelu", "relu"),
        rms_norm_eps=pick(1e-6, 1e-4),
        tie_word_embeddings=draw(st.booleans()),
        rope_parameters=pick(
            dict(rope_type="default", rope_theta=1e4), dict(rope_type="default", rope_theta=33.0), LINEAR, LLAMA3
        ),
    )
    if kind is LlamaConfig:
        drawn |= dict(attention_bias=draw(st.booleans()))
    if kind is MistralConfig:
        drawn |= dict(sliding_window=pick(None, 1, 4, 100))
    if kind is Qwen2Config:
        drawn |= pick({}, WINDOWED)
    return kind(**SIZES | drawn)


@pytest.mark.slow
@given(config=configs(), seed=st.integers(0, 9))
@settings(max_examples=20)
def test_any_llama(config: PreTrainedConfig, seed: int) -> None:
    x = tokens()
    there_and_back(tiny(KINDS[type(config)], config, seed=seed), theirs_on(x), ours_on(x))


NAMED: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama-1": (LlamaConfig, dict(num_key_value_heads=6)),
    "llama-2-70b": (LlamaConfig, {}),
    "linear": (LlamaConfig, dict(rope_parameters=LINEAR)),
    "llama-3.1": (LlamaConfig, dict(rope_parameters=LLAMA3)),
    "smollm2": (
        LlamaConfig,
        dict(hidden_size=36, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    ),
    "mistral": (MistralConfig, dict(sliding_window=4)),
    "mistral-0.2": (MistralConfig, dict(sliding_window=None)),
    "qwen2": (Qwen2Config, dict(tie_word_embeddings=True)),
    "qwen2-windowed": (Qwen2Config, WINDOWED),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name: str, side: str) -> None:
    kind, changes = NAMED[name]
    x, real = tokens(), sides(3, 11)[side]
    there_and_back(
        make(kind, **changes),
        lambda m: m(x, attention_mask=real, position_ids=positions_of(real)).logits[real],
        lambda m: m(x, real)[real],
    )


def exact_norm(self: Any, x: Tensor) -> Tensor:
    """transformers' RMS norm without its conversion to float32."""
    return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' RMS norm is float32 in every model, so its output is exact to six digits.

    Freed from that they agree to the tenth, though rotary angles stay float32: both sides round them alike.
    """
    kind, changes = NAMED[name]
    x = tokens()
    there_and_back(make(kind, **changes).double(), theirs_on(x), ours_on(x), within=FP32)
    for norm in (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm):
        monkeypatch.setattr(norm, "forward", exact_norm)
    there_and_back(make(kind, **changes).double(), theirs_on(x), ours_on(x), within=FP64)


def test_names_of_the_layers_are_not_mixed_up(tmp_path: Path) -> None:
    """A test of the comparison: it notices one changed number in one layer."""
    model = make()
    expected = model(tokens()).logits.detach()
    ours = load(saved(model, tmp_path))
    with torch.no_grad():
        ours.get_parameter("blocks.1.feedforward.down.weight")[3, 5] += 0.1
    with pytest.raises(AssertionError, match="largest difference"):
        assert_near(ours(tokens()).detach(), expected)


# The fields before transformers 5.


@pytest.mark.parametrize(("rope", "legacy"), [(LINEAR, "type"), (LLAMA3, "rope_type")], ids=["linear", "llama3"])
def test_rope_as_older_files_have_it(tmp_path: Path, rope: dict[str, Any], legacy: str) -> None:
    model = make(rope_parameters=rope)
    scaling = {
        **{name: value for name, value in rope.items() if not name.startswith("rope_t")},
        legacy: rope["rope_type"],
    }
    folder = saved(model, tmp_path, rope_theta=rope["rope_theta"], rope_scaling=scaling, rope_parameters=None)
    assert "rope_parameters" not in json.loads((folder / "config.json").read_text())
    assert_near(load(folder)(tokens()).detach(), model(tokens()).logits.detach())


def test_stored_frequencies_are_not_weights(tmp_path: Path) -> None:
    """Files of 2023 have them in every layer, some in half precision; transformers computes its own, and so do we."""
    model = make()
    stored = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2).half() for i in range(2)}
    model.save_pretrained(tmp_path, state_dict={**model.state_dict(), **stored})
    assert_near(load(tmp_path)(tokens()).detach(), model(tokens()).logits.detach())


def test_the_window_of_each_model_type(tmp_path: Path) -> None:
    def window(kind: type[PreTrainedConfig], name: str, **changes: Any) -> int:
        return load(saved(make(kind), tmp_path / name, **changes)).config.window

    assert window(LlamaConfig, "llama", sliding_window=5) == 0  # transformers ignores it
    assert window(MistralConfig, "default", sliding_window=None) == 4096  # the field removed, not null
    assert window(Qwen2Config, "off", sliding_window=5) == 0
    old = dict(use_sliding_window=True, sliding_window=5, layer_types=None)
    assert window(Qwen2Config, "above", **old, max_window_layers=2) == 0  # both layers have full attention
    assert window(Qwen2Config, "all", **old, max_window_layers=0) == 5
    assert "layer_types" in refusal(saved(make(Qwen2Config), tmp_path / "mixed", **old, max_window_layers=1))


def test_rope_scaling_beside_rope_parameters(tmp_path: Path) -> None:
    """transformers reads rope_scaling where both are there; so do we."""
    folder = saved(make(), tmp_path, rope_scaling=dict(rope_type="linear", factor=4.0))
    x, theirs = tokens(), LlamaForCausalLM.from_pretrained(folder).eval()
    assert load(folder).config.rotary_factor == 4.0
    with torch.no_grad():
        assert_near(load(folder)(x), theirs(x).logits)


MIXED = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        (LlamaConfig, dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=2.0)), "yarn"),
        (LlamaConfig, dict(rope_parameters=None, rope_scaling=dict(type="dynamic", factor=2.0)), "dynamic"),
        (LlamaConfig, dict(rope_parameters=LINEAR | dict(partial_rotary_factor=0.5)), "partial_rotary_factor"),
        (LlamaConfig, dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4)), "factor"),
        (LlamaConfig, dict(rope_scaling=dict(rope_type="yarn", factor=2.0)), "yarn"),  # beside rope_parameters
        (LlamaConfig, dict(rope_scaling=dict(type="dynamic", factor=2.0)), "dynamic"),
        (LlamaConfig, dict(rope_scaling=dict(type="linear", factor=2.0), rope_theta=33.0), "33.0 beside rope_scaling"),
        (LlamaConfig, dict(is_causal=False), "is_causal"),
        (LlamaConfig, dict(rope_interleaved=True), "rope_interleaved"),
        (LlamaConfig, dict(layer_types=["sliding_attention"] * 2), "layer_types"),
        (LlamaConfig, dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
        (LlamaConfig, dict(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (LlamaConfig, dict(hidden_act="quick_gelu"), "hidden_act"),
        (LlamaConfig, dict(mlp_bias=True), "mlp_bias"),
        (LlamaConfig, dict(quantization_config=dict(bits=4)), "quantization_config"),
        (LlamaConfig, dict(num_local_experts=8), "num_local_experts"),
        (LlamaConfig, dict(num_key_value_heads=4), "n_kv_heads"),
        (LlamaConfig, dict(tie_word_embeddings=True), "lm_head.weight"),
        (Qwen2Config, WINDOWED | dict(layer_types=MIXED), "layer_types"),
        (Qwen2Config, WINDOWED | dict(layer_types=["chunked_attention"] * 2), "layer_types"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_fields(tmp_path: Path, kind: Any, changes: dict[str, Any], named: str) -> None:
    assert named in refusal(saved(make(kind), tmp_path, **changes))


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    tied = make(tie_word_embeddings=True)
    message = refusal(saved(tied, tmp_path, tie_word_embeddings=False))
    assert "1 of its tensors are not in the file (head.weight)" in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(rotary_interleaved=True), "rotary_interleaved"),
        (dict(rotary_precision="bfloat16"), "rotary_precision"),
        (dict(attention_bias="q"), "attention_bias"),
        (dict(attention_bias="qkvo", window=4), "attention_bias"),
        (dict(gated=False, window=4), "gated"),
        (dict(qk_norm=True, embedding_scale=True), "qk_norm"),
        (dict(d_model=26, d_head=4), "d_model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_to_write(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    sizes = dict(n_layers=1, d_model=24, n_heads=6, n_kv_heads=2, d_ff=37, vocab_size=53, max_len=19)
    model = ch.build(ch.preset("llama-3-8b", **sizes | changes))
    with pytest.raises(ch.CheckpointError, match=f"{named}=.*format='clearhead'"):
        save(model, tmp_path / "hf", format="hf")
