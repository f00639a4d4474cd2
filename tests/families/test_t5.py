"""T5's checkpoints: versions 1.0 and 1.1, of current and older transformers, and the encoder alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention, T5LayerNorm

import clearhead as ch
from clearhead.checkpoint import load, save
from clearhead.config import Generation
from clearhead.errors import CheckpointError
from tests.families.compare import FP64, assert_near, refusal, saved, sides, there_and_back, tiny, tokens
from tests.families.seq2seq import aligned, greedy, to_bin, writes

# Distinct primes, and more encoder than decoder layers: transformers' generate fails where the decoder has more.
SIZES: dict[str, Any] = dict(
    vocab_size=53,
    d_model=23,
    d_kv=5,
    num_heads=3,
    d_ff=37,
    num_layers=3,
    num_decoder_layers=2,
    relative_attention_num_buckets=6,
    relative_attention_max_distance=7,
    decoder_start_token_id=0,
)
# In current transformers tie_word_embeddings=False only removes the scaling; `head` makes an untied head, as in real files.
V10: dict[str, Any] = dict(feed_forward_proj="relu")
V11: dict[str, Any] = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, head=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "1.0": V10,
    "1.1": V11,
    "gated silu": dict(V11, feed_forward_proj="gated-silu"),
    "exact gelu": dict(V10, feed_forward_proj="gelu"),
    "tied but unscaled": dict(V11, head=False),
    "scaled but untied": dict(V10, head=True),
}
SOURCE, TARGET = tokens(length=13), tokens(seed=3)

# Their norm computes in float32 in a float64 model too: errors of 6e-8 each, which grow through the layers.
THEIR_NORM = 1e-5


def t5(
    kind: Any = T5ForConditionalGeneration,
    *,
    head: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields: Any,
) -> Any:
    model = tiny(kind, T5Config(**SIZES | fields), dtype=dtype, seed=seed)
    if head:
        model.lm_head.weight = nn.Parameter(torch.randn(53, 23, dtype=dtype) / math.sqrt(23))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(
                module, T5Attention
            ):  # its scores are not divided by sqrt(d_kv), so its queries must be small
                module.q.weight /= math.sqrt(5)
    return model


def run_theirs(model: Any) -> Tensor:
    return aligned(model)(input_ids=SOURCE, decoder_input_ids=TARGET).logits


def run_ours(model: Any) -> Tensor:
    return model(SOURCE, TARGET)


@contextmanager
def exact_norm() -> Iterator[None]:
    """Their norm in the model's precision."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T5LayerNorm, "forward", forward)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(variant: str) -> None:
    ours = there_and_back(t5(**VARIANTS[variant]), run_theirs, run_ours)
    assert ours.config.tie_embeddings == (variant in ("1.0", "exact gelu", "tied but unscaled"))
    assert ours.config.head_scale == (variant in ("1.0", "exact gelu", "scaled but untied"))


@pytest.mark.slow
@pytest.mark.parametrize("fields", [V10, V11], ids=["1.0", "1.1"])
def test_in_float64(fields: dict[str, Any]) -> None:
    theirs = t5(dtype=torch.float64, **fields)
    there_and_back(theirs, run_theirs, run_ours, within=THEIR_NORM)
    with exact_norm():
        there_and_back(theirs, run_theirs, run_ours, within=FP64)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=10)
def test_any_config(data: st.DataObject) -> None:
    draw = data.draw
    fields: dict[str, Any] = dict(
        d_kv=draw(st.integers(1, 7)),
        num_heads=draw(st.integers(1, 4)),
        num_layers=draw(st.integers(1, 3)),
        num_decoder_layers=draw(st.integers(1, 3)),
        relative_attention_num_buckets=draw(st.sampled_from([4, 6, 8])),
        relative_attention_max_distance=draw(st.integers(9, 20)),
        feed_forward_proj=draw(st.sampled_from(["", "gated-"]))
        + draw(st.sampled_from(["relu", "gelu", "gelu_new", "silu"])),
        tie_word_embeddings=draw(st.booleans()),
        layer_norm_epsilon=draw(st.sampled_from([1e-6, 1e-3])),
    )
    theirs = t5(head=draw(st.booleans()), dtype=torch.float64, **fields)
    with exact_norm():
        there_and_back(theirs, run_theirs, run_ours, within=FP64)


def test_gated_exact_gelu() -> None:
    """ "gated-gelu" means the tanh version; the exact one needs `dense_act_fn`."""
    ours = there_and_back(t5(**V11 | dict(dense_act_fn="gelu")), run_theirs, run_ours)
    assert (ours.config.feedforward, ours.config.gated) == ("gelu", True)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding(side: str) -> None:
    source, target = sides(3, 13)[side], sides(3, 11)[side]

    def theirs(model: Any) -> Tensor:
        masks = dict(attention_mask=source.long(), decoder_attention_mask=target.long())
        return aligned(model)(input_ids=SOURCE, decoder_input_ids=TARGET, **masks).logits[target]

    there_and_back(t5(**V11), theirs, lambda m: m(SOURCE, TARGET, source, target_mask=target)[target])


@pytest.mark.slow
@pytest.mark.parametrize("fields", [V10, V11], ids=["1.0", "1.1"])
def test_greedy(fields: dict[str, Any]) -> None:
    real = sides(3, 13)["left"]
    theirs, text = writes(lambda seed: t5(**fields, seed=seed), input_ids=SOURCE, attention_mask=real.long())
    ours = there_and_back(theirs, run_theirs, run_ours)
    assert greedy(ours, SOURCE, real).tolist() == text.tolist()


def test_encoder_alone() -> None:
    theirs = t5(T5EncoderModel, **{k: v for k, v in V11.items() if k != "head"})
    real = sides(3, 13)["left"]
    ours = there_and_back(
        theirs,
        lambda m: aligned(m)(input_ids=SOURCE, attention_mask=real.long()).last_hidden_state[real],
        lambda m: m(SOURCE, real)[real],
    )
    assert isinstance(ours, ch.Encoder)


def test_generation_defaults(tmp_path: Path) -> None:
    theirs = t5()
    theirs.generation_config.max_length = 17
    theirs.save_pretrained(tmp_path)
    assert load(tmp_path).generation == Generation(eos=(1,), pad=0, decoder_start=0, max_length=17)


OLD: dict[str, Any] = dict.fromkeys(["scale_decoder_outputs", "dense_act_fn", "is_gated_act", "num_decoder_layers"])


@torch.no_grad()
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_old_files(version: str, tmp_path: Path) -> None:
    """Before version 5, one field defined the head; before safetensors, files had every name of a tied tensor."""
    theirs = t5(**VARIANTS[version] | dict(num_decoder_layers=3))
    saved(theirs, tmp_path, **OLD, tie_word_embeddings=None if version == "1.0" else False, n_positions=19)
    shared = theirs.shared.weight
    duplicates = {"encoder.embed_tokens.weight": shared, "decoder.embed_tokens.weight": shared}
    unused = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.zeros(6, 3)}
    to_bin(tmp_path, **duplicates, **unused, **({"lm_head.weight": shared} if version == "1.0" else {}))
    ours = load(tmp_path)
    assert ours.config.max_len == 19
    assert_near(ours(SOURCE, TARGET), run_theirs(theirs))


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    saved(t5(num_decoder_layers=3), tmp_path, **OLD)
    to_bin(tmp_path, **{"lm_head.weight": torch.zeros(53, 23)})
    message = refusal(tmp_path)
    assert "'lm_head.weight' and 'shared.weight' are one tensor in this model, but differ" in message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("feed_forward_proj", "gated-tanh", "feed_forward_proj='tanh'"),
        ("feed_forward_proj", "glu-gelu", "feed_forward_proj='glu-gelu'"),
        ("dense_act_fn", "mish", "dense_act_fn='mish'"),
        ("is_decoder", True, "is_decoder=True"),
        ("quantization_config", {"bits": 4}, "quantization_config="),
        ("architectures", ["T5Model"], "architectures=['T5Model'] is a T5 without its head"),
        ("d_kv", None, "no 'd_kv'"),
        ("relative_attention_num_buckets", 7, "t5_buckets=7"),
        ("is_gated_act", "yes", "gated"),
        ("num_decoder_layers", 5, "decoder.blocks.2."),
        ("num_decoder_layers", 0, "num_decoder_layers=0"),
    ],
)
def test_refused_fields(field: str, value: object, words: str, tmp_path: Path) -> None:
    assert words in refusal(saved(t5(), tmp_path, **{"dense_act_fn": None, field: value}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        dict(shape="decoder"),
        dict(d_head=6, positions="rotary"),
        dict(norm="layer"),
        dict(norm_first=False),
        dict(attention_bias="", bias=True),
        dict(attention_bias="q"),
        dict(attention_scale=0.0),
        dict(n_kv_heads=1),
        dict(qk_norm=True),
        dict(window=5),
        dict(source_vocab_size=59),
        dict(embedding_scale=True),
        dict(embedding_norm=True),
        dict(head_bias="learned"),
        dict(head_transform=True),
        dict(shape="encoder", head="tokens"),
        dict(shape="encoder", pooler=True),
        dict(shape="encoder", n_segments=2),
        dict(shape="encoder", dropped_token=7),
    ],
    ids=str,
)
def test_refused_to_write(change: dict[str, Any], tmp_path: Path) -> None:
    config = ch.preset("t5-v1.1-small", d_model=23, n_heads=3, n_layers=1, d_ff=37, vocab_size=53, **change)
    with pytest.raises(CheckpointError, match=f"T5's layout has no place for {list(change)[-1]}="):
        save(ch.build(config), tmp_path / "hf", format="hf")
    assert not (tmp_path / "hf").exists()
