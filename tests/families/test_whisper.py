"""Whisper's checkpoints, with random sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

import clearhead as ch
from clearhead.checkpoint import load, save
from clearhead.config import Generation
from clearhead.errors import CheckpointError
from tests.families.compare import FP32, FP64, positions_of, refusal, saved, sides, there_and_back, tiny, tokens
from tests.families.seq2seq import aligned, greedy, writes

SIZES: dict[str, Any] = dict(
    vocab_size=53,
    num_mel_bins=5,
    d_model=22,
    encoder_layers=3,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=37,
    decoder_ffn_dim=37,
    max_source_positions=13,
    max_target_positions=31,
    decoder_start_token_id=50,
    bos_token_id=51,
    eos_token_id=51,
    pad_token_id=52,
    suppress_tokens=[5, 6, 52],
    begin_suppress_tokens=[3, 51],
)
VARIANTS: dict[str, dict[str, Any]] = {
    "whisper": {},
    "untied": dict(tie_word_embeddings=False),
    "relu": dict(activation_function="relu"),
}
SOUND = torch.randn(3, 5, 26, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGET = tokens(seed=3)


def whisper(*, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any) -> Any:
    return tiny(WhisperForConditionalGeneration, WhisperConfig(**SIZES | fields), dtype=dtype, seed=seed)


def run_theirs(model: Any, **inputs: Any) -> Tensor:
    sound = SOUND.to(model.dtype)[:, : model.config.num_mel_bins]
    return aligned(model)(input_features=sound, decoder_input_ids=TARGET, **inputs).logits


def run_ours(model: Any, **inputs: Any) -> Tensor:
    return model(SOUND.to(model.tokens.weight.dtype)[:, : model.config.n_mels], TARGET, **inputs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(variant: str, dtype: torch.dtype) -> None:
    theirs = whisper(dtype=dtype, **VARIANTS[variant])
    ours = there_and_back(theirs, run_theirs, run_ours, within=FP32 if dtype == torch.float32 else FP64)
    assert ours.config.tie_embeddings == (variant != "untied")


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=10)
def test_any_config(data: st.DataObject) -> None:
    draw = data.draw
    heads = draw(st.integers(1, 4))
    theirs = whisper(
        dtype=torch.float64,
        num_mel_bins=draw(st.integers(1, 5)),
        d_model=heads * draw(st.sampled_from([4, 6, 10])),
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_layers=draw(st.integers(1, 3)),
        decoder_layers=draw(st.integers(1, 3)),
        activation_function=draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu"])),
        tie_word_embeddings=draw(st.booleans()),
    )
    there_and_back(theirs, run_theirs, run_ours, within=FP64)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_text(side: str) -> None:
    """transformers never pads sound: it must have the encoder's length."""
    real = sides(3, 11)[side]
    masks = dict(decoder_attention_mask=real.long(), decoder_position_ids=positions_of(real))
    there_and_back(whisper(), lambda m: run_theirs(m, **masks)[real], lambda m: run_ours(m, target_mask=real)[real])


@pytest.mark.slow
@pytest.mark.parametrize("forced", [None, [[1, 7], [2, 11]]], ids=["free", "forced"])
def test_greedy(forced: list[list[int]] | None) -> None:
    def make(seed: int) -> Any:
        model = whisper(tie_word_embeddings=False, seed=seed)
        model.generation_config.forced_decoder_ids = forced
        return model

    theirs, text = writes(make, input_features=SOUND.float())
    ours = there_and_back(theirs, run_theirs, run_ours)
    assert greedy(ours, SOUND.float()).tolist() == text.tolist()


def test_generation_defaults(tmp_path: Path) -> None:
    theirs = whisper()
    theirs.generation_config.max_length = 17
    theirs.generation_config.forced_decoder_ids = [[1, None], [2, 11]]  # the language is detected
    expected = Generation(
        bos=51,
        eos=(51,),
        pad=52,
        decoder_start=50,
        forced_start=(None, 11),
        max_length=17,
        suppress=(5, 6, 52),
        begin_suppress=(3, 51),
    )
    assert load(saved(theirs, tmp_path)).generation == expected


@pytest.mark.filterwarnings("ignore:the checkpoint asks for bad_words_ids")  # pairs are words of two tokens
@pytest.mark.parametrize("pairs", [7, [7], [[1]], [["1", 7]], [[2, 7]], [[1, "de"]], [[10**12, 7]]], ids=str)
def test_invalid_forced_ids(pairs: object, tmp_path: Path) -> None:
    saved(whisper(), tmp_path, forced_decoder_ids=pairs, bad_words_ids=pairs)
    assert load(tmp_path).generation.forced_start == ()


def test_sinusoids_stay_frozen(tmp_path: Path) -> None:
    fresh = ch.build(ch.preset("whisper-tiny", n_layers=1, d_model=22, n_heads=2, vocab_size=53, max_source_len=13))
    for model in (fresh, load(saved(whisper(), tmp_path))):
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        assert frozen == ["encoder.positions.weight"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("decoder_attention_heads", 11, "encoder_attention_heads=2, decoder_attention_heads=11"),
        ("decoder_attention_heads", None, "encoder_attention_heads=2, decoder_attention_heads=None"),
        ("decoder_layers", 0, "decoder_layers=0"),
        ("encoder_ffn_dim", 41, "encoder_ffn_dim=41, decoder_ffn_dim=37"),
        ("activation_function", "tanh", "activation_function='tanh'"),
        ("scale_embedding", True, "scale_embedding=True"),
        ("is_encoder_decoder", False, "is_encoder_decoder=False"),
        ("num_mel_bins", None, "no 'num_mel_bins'"),
        ("max_source_positions", 17, "(13, 22), but by its config it must be (17, 22)"),
    ],
)
def test_refused_fields(field: str, value: object, words: str, tmp_path: Path) -> None:
    assert words in refusal(saved(whisper(), tmp_path, **{field: value}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        dict(inputs="tokens"),
        dict(positions="sinusoidal"),
        dict(norm="rms"),
        dict(norm_first=False),
        dict(norm_eps=1e-6),
        dict(attention_bias="qkvo"),
        dict(attention_bias="qvo", bias=False),
        dict(embedding_scale=True),
        dict(embedding_norm=True),
        dict(qk_norm=True),
        dict(n_kv_heads=1),
        dict(d_head=10),
        dict(attention_scale=0.3),
        dict(window=5),
        dict(gated=True),
        dict(head_bias="fixed"),
        dict(head_transform=True),
        dict(head_scale=True),
    ],
    ids=str,
)
def test_refused_to_write(change: dict[str, Any], tmp_path: Path) -> None:
    config = ch.preset("whisper-tiny", d_model=22, n_heads=2, n_layers=1, d_ff=37, vocab_size=53, **change)
    with pytest.raises(CheckpointError, match=f"Whisper's layout has no place for {list(change)[-1]}="):
        save(ch.build(config), tmp_path / "hf", format="hf")
    assert not (tmp_path / "hf").exists()
