"""The config: refusals and their messages, derived fields, conversion to JSON and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.drawn import Fields, fields

import clearhead as ch
from clearhead.config import nearest_divisor
from clearhead.errors import did_you_mean

# The config checks types itself, and accepts some that its annotations do not allow: 1 for 1.0, lists for tuples.
pytestmark = pytest.mark.usefixtures("unchecked")

GPT = dict(shape="decoder", d_model=22, n_layers=3, n_heads=2, vocab_size=53, max_len=31)
BERT = GPT | dict(shape="encoder")
T5 = GPT | dict(shape="encoder-decoder")
VIT = dict(shape="encoder", inputs="patches", d_model=22, n_layers=3, n_heads=2, image_size=15, patch_size=5)
LLAMA3 = GPT | dict(positions="rotary", d_head=10, rotary_scaling="llama3", rotary_factor=8.0)
SOUND = T5 | dict(inputs="frames", positions="learned")

REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    # the config, its changes, and words of the error message
    ("heads", GPT | dict(d_model=22, n_heads=5), ["d_model=22", "n_heads=5", "nearest that does: n_heads=2", "d_head"]),
    ("groups", GPT | dict(n_heads=11, n_kv_heads=5), ["n_heads=11", "n_kv_heads=5", "nearest", "n_kv_heads=1"]),
    ("many heads", GPT | dict(n_heads=10**9, d_head=2), ["n_heads=1000000000", "too large", "n_heads=65536"]),
    ("many layers", GPT | dict(n_layers=10**9), ["n_layers=1000000000", "too large", "n_layers=10000"]),
    ("many decoder layers", T5 | dict(n_decoder_layers=10**9), ["n_decoder_layers=1000000000", "too large"]),
    ("many classes", BERT | dict(head="classes", n_classes=10**9), ["n_classes=1000000000", "too large"]),
    ("layers", GPT | dict(n_layers=0), ["n_layers=0", "too small", "n_layers=1"]),
    ("width", GPT | dict(d_model=-22), ["d_model=-22", "too small", "d_model=1"]),
    ("no heads", GPT | dict(n_heads=0), ["n_heads=0", "n_heads=1"]),
    ("negative groups", GPT | dict(n_kv_heads=-1), ["n_kv_heads=-1", "n_kv_heads=1"]),
    ("negative head", GPT | dict(d_head=-5), ["d_head=-5", "d_head=1"]),
    ("negative feed-forward", GPT | dict(d_ff=-5), ["d_ff=-5", "d_ff=1"]),
    ("no length", GPT | dict(max_len=0), ["max_len=0", "max_len=1"]),
    ("negative source", T5 | dict(max_source_len=-1), ["max_source_len=-1", "max_source_len=1"]),
    ("negative decoder", T5 | dict(n_decoder_layers=-1), ["n_decoder_layers=-1"]),
    ("a decoder's decoder", GPT | dict(n_decoder_layers=2), ["n_decoder_layers=2", "encoder-decoder", "decoder"]),
    ("negative window", GPT | dict(window=-1), ["window=-1", "window=0"]),
    ("negative vocabulary", GPT | dict(vocab_size=-1), ["vocab_size=-1"]),
    ("rotary pairs", GPT | dict(positions="rotary", d_head=11), ["rotary", "d_head=11", "odd", "12"]),
    ("sinusoid pairs", GPT | dict(d_model=23, n_heads=1), ["sinusoidal", "d_model=23", "odd", "24"]),
    ("sound pairs", SOUND | dict(d_model=23, n_heads=1), ["d_model=23", "odd", "24"]),
    ("llama3's step", LLAMA3 | dict(rotary_low=4.0), ["rotary_low=4.0", "rotary_high=4.0"]),
    ("llama3's length", LLAMA3 | dict(rotary_original_len=0), ["rotary_original_len=0", "rotary_original_len=1"]),
    ("odd buckets", T5 | dict(positions="t5", t5_buckets=7), ["t5_buckets", "even", "got t5_buckets=7", "32 and 128"]),
    ("few buckets", T5 | dict(positions="t5", t5_buckets=2), ["at least 4", "got t5_buckets=2"]),
    ("near buckets", T5 | dict(positions="t5", t5_max_distance=32), ["t5_max_distance=32", "below t5_max_distance"]),
    ("bias letters", GPT | dict(attention_bias="qkx"), ["attention_bias='qkx'", "q k v o", "'qkvo'"]),
    ("dropout of all", GPT | dict(dropout=1.0), ["dropout=1.0", "probability below 1", "0.1"]),
    ("negative dropout", GPT | dict(attention_dropout=-0.1), ["attention_dropout=-0.1", "probability"]),
    ("nan dropout", GPT | dict(dropout=float("nan")), ["dropout=nan"]),
    ("eps", GPT | dict(norm_eps=0.0), ["norm_eps=0.0", "above 0", "1e-05"]),
    ("base", GPT | dict(rotary_base=-1.0), ["rotary_base=-1.0", "10000.0"]),
    ("factor", GPT | dict(rotary_factor=0.0), ["rotary_factor=0.0", "1.0"]),
    ("std", GPT | dict(init_std=-0.02), ["init_std=-0.02", "0.02"]),
    ("a decoder of pictures", VIT | dict(shape="decoder", vocab_size=53), ["inputs='patches'", "shape='encoder'", "'decoder'"]),
    ("patches", VIT | dict(image_size=16), ["image_size=16", "patches of 5", "nearest: 15"]),
    ("a picture below a patch", VIT | dict(image_size=3), ["image_size=3", "patches of 5", "nearest: 5"]),
    ("no patch", VIT | dict(patch_size=0), ["patch_size=0", "patch_size=1"]),
    ("length of patches", VIT | dict(max_len=9), ["max_len=9", "9 patches", "10", "leave max_len out"]),
    ("no channels", VIT | dict(n_channels=0), ["n_channels=0"]),
    ("an encoder of sound", SOUND | dict(shape="encoder"), ["inputs='frames'", "encoder-decoder", "shape='encoder'"]),
    ("no bands", SOUND | dict(n_mels=0), ["n_mels=0"]),
    ("no vocabulary", GPT | dict(vocab_size=0), ["vocab_size=0", "tokenizer"]),
    ("no vocabulary to write", VIT | dict(head="tokens"), ["vocab_size=0"]),
    ("a decoder's source", GPT | dict(source_vocab_size=59), ["source_vocab_size=59", "encoder-decoder", "'decoder'"]),
    ("a sound's source", SOUND | dict(source_vocab_size=59), ["source_vocab_size=59", "inputs='frames'"]),
    ("a decoder's head", GPT | dict(head="classes", n_classes=7), ["shape='decoder'", "head='tokens'", "'classes'"]),
    ("no classes", BERT | dict(head="classes"), ["head='classes'", "n_classes", "got 0"]),
    ("labels", BERT | dict(head="classes", n_classes=3, labels=("no", "yes")), ["n_classes=3", "2 labels: no, yes"]),
    ("no labels", BERT | dict(head="classes", labels=(1, 2)), ["labels=(1, 2)", "texts"]),
    ("a token dropped by a decoder", GPT | dict(dropped_token=5), ["dropped_token=5", "encoders", "'decoder'"]),
    ("a token that is not there", BERT | dict(dropped_token=53), ["dropped_token=53", "vocab_size=53"]),
    ("tied to nothing", BERT | dict(tie_embeddings=True), ["tie_embeddings", "head='none'"]),
    ("tied to pictures", VIT | dict(head="tokens", vocab_size=53, tie_embeddings=True), ["tie_embeddings", "'patches'"]),
    ("a decoder's segments", GPT | dict(n_segments=2), ["n_segments=2", "encoder", "'decoder'"]),
    ("two encoders' segments", T5 | dict(n_segments=2), ["n_segments=2", "encoder", "'encoder-decoder'"]),
    # values of the wrong type, and unknown words
    ("a text", GPT | dict(d_model="22"), ["d_model='22'", "str", "int"]),
    ("a fraction", GPT | dict(d_model=22.0), ["d_model=22.0", "float", "int"]),
    ("a truth", GPT | dict(n_layers=True), ["n_layers=True", "bool", "int"]),
    ("nothing", GPT | dict(max_len=None), ["max_len=None", "NoneType", "int"]),
    ("no truth", GPT | dict(gated=1), ["gated=1", "int", "bool"]),
    ("no number", GPT | dict(dropout="0.1"), ["dropout='0.1'", "str", "number such as 0.0"]),
    ("a truth for a number", GPT | dict(norm_eps=True), ["norm_eps=True", "bool"]),
    ("shape", GPT | dict(shape="decodr"), ["shape='decodr'", "did you mean 'decoder'"]),
    ("positions", GPT | dict(positions="rope"), ["positions='rope'", "rotary"]),
    ("norm", GPT | dict(norm="rmsnorm"), ["norm='rmsnorm'", "did you mean 'rms'"]),
    ("feed-forward", GPT | dict(feedforward="gelutanh"), ["feedforward='gelutanh'", "did you mean 'gelu_tanh'"]),
    ("kernel", GPT | dict(kernel="flash"), ["kernel='flash'", "flex", "fused"]),
    ("head", BERT | dict(head="token"), ["head='token'", "did you mean 'tokens'"]),
    ("a word of nowhere", GPT | dict(init="zzz"), ["init='zzz'", "choose one of: fan_in, normal, truncated, xavier"]),
]  # fmt: skip


@pytest.mark.parametrize(("values", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refusals(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ch.ConfigError) as caught:
        ch.Config(**values)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("values", [GPT, BERT, T5, VIT, SOUND, LLAMA3])
def test_the_plain_configs_are_accepted(values: dict[str, Any]) -> None:
    """The configs that REFUSED changes are valid."""
    config = ch.Config(**values)
    assert config.shape == values["shape"]


def test_sizes_of_zero_are_derived() -> None:
    config = ch.Config(**GPT)
    assert (config.d_head, config.n_kv_heads, config.d_ff, config.max_source_len) == (11, 2, 88, 31)
    assert (config.head, config.attention_bias, config.n_decoder_layers) == ("tokens", "qkvo", 0)
    assert ch.Config(**GPT, bias=False).attention_bias == ""
    assert ch.Config(**GPT, bias=False, attention_bias="qkv").attention_bias == "qkv"
    assert ch.Config(**BERT).head == "none"
    both = ch.Config(**T5, max_source_len=37)
    assert (both.n_decoder_layers, both.max_source_len) == (3, 37)
    assert ch.Config(**T5, n_decoder_layers=2).n_decoder_layers == 2
    assert ch.Config(**BERT, head="classes", labels=("no", "yes")).n_classes == 2
    pictures = ch.Config(**VIT)
    assert (pictures.n_patches, pictures.max_len) == (9, 10)


def test_given_sizes_are_kept() -> None:
    config = ch.Config(
        **GPT | dict(n_heads=3), d_head=5, n_kv_heads=1, d_ff=7
    )  # 3 x 5 is not 22: allowed if d_head is given
    assert (config.d_head, config.n_kv_heads, config.d_ff) == (5, 1, 7)


def test_integers_are_numbers() -> None:
    config = ch.Config(**GPT, rotary_base=10_000, dropout=0)
    assert type(config.rotary_base) is float
    assert type(config.dropout) is float


def test_a_config_does_not_change() -> None:
    config = ch.Config(**GPT)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 3
    assert hash(config) == hash(ch.Config(**GPT))
    assert config == ch.Config(**GPT)
    assert config != ch.Config(**GPT | dict(n_layers=2))


def test_fields_have_names_only() -> None:
    with pytest.raises(TypeError):
        ch.Config("decoder", 22, 3, 2)


@given(drawn=fields())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])  # `unchecked` holds for all
def test_json_and_back_is_the_same(drawn: Fields) -> None:
    config = ch.Config(**drawn)
    assert ch.Config.from_dict(config.to_dict()) == config
    assert ch.Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert set(config.to_dict()) == {field.name for field in dataclasses.fields(ch.Config)}


@pytest.mark.parametrize("name", ch.presets())
def test_every_preset_as_json_and_back(name: str) -> None:
    config = ch.preset(name)
    assert ch.Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_unknown_field_is_named_with_the_nearest() -> None:
    with pytest.raises(ch.ConfigError, match=r"no field 'n_layer' \(value 4\); did you mean 'n_layers'"):
        ch.preset("gpt2", n_layer=4)
    with pytest.raises(ch.ConfigError, match=r"no field 'n_embd' \(value 768\)"):
        ch.Config.from_dict(GPT | dict(n_embd=768))


def test_missing_fields_are_named() -> None:
    with pytest.raises(ch.ConfigError, match=r"needs d_model, n_heads; got \['n_layers', 'shape'\]; add"):
        ch.Config.from_dict(dict(shape="decoder", n_layers=2))


@given(whole=st.integers(1, 300), wish=st.integers(-20, 400))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nearest_divisor(whole: int, wish: int) -> None:
    near = nearest_divisor(whole, wish)
    assert whole % near == 0
    closer = range(wish - abs(near - wish) + 1, wish + abs(near - wish))
    assert not [d for d in closer if d > 0 and whole % d == 0]


def test_of_two_equally_near_divisors_the_smaller() -> None:
    assert nearest_divisor(15, 4) == 3
    assert nearest_divisor(22, 5) == 2


def test_did_you_mean() -> None:
    assert did_you_mean("lama", ["gpt2", "llama"]) == "did you mean 'llama'?"
    assert did_you_mean("xyz", ["gpt2", "bert"]) == "choose one of: bert, gpt2"
    many = [f"{number:02}" for number in range(31)]
    assert did_you_mean("xyz", many) == f"choose one of: {', '.join(many[:20])} ... (31 in all)"


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        (dict(feedforward="swiglu"), "write feedforward='silu', gated=True"),
        (dict(feedforward="GEGLU"), "write feedforward='gelu', gated=True"),
        (dict(positions="rope"), "write positions='rotary'"),
        (dict(problem="regression"), "problem='regression' is for head='classes'"),
    ],
)
def test_other_names_of_a_value(changes: dict[str, Any], advice: str) -> None:
    with pytest.raises(ch.ConfigError, match=advice):
        ch.Config(shape="decoder", d_model=8, n_layers=1, n_heads=1, vocab_size=7, max_len=5, **changes)
