"""Marian's checkpoints (OPUS-MT): one embedding or two, tied or not, current files and older ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

import clearhead as ch
from clearhead.checkpoint import load, save
from clearhead.config import Generation
from clearhead.errors import CheckpointError
from tests.families.compare import FP32, FP64, assert_near, refusal, saved, sides, there_and_back, tiny, tokens
from tests.families.seq2seq import aligned, greedy, to_bin, writes

# More encoder than decoder layers: transformers' generate fails where the decoder has more.
SIZES: dict[str, Any] = dict(
    vocab_size=53,
    d_model=22,
    encoder_layers=3,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=37,
    decoder_ffn_dim=37,
    max_position_embeddings=31,
    activation_function="swish",
    scale_embedding=True,
    pad_token_id=52,
    decoder_start_token_id=52,
    eos_token_id=0,
    forced_eos_token_id=0,
)
TWO_EMBEDDINGS: dict[str, Any] = dict(share_encoder_decoder_embeddings=False, decoder_vocab_size=59)
VARIANTS: dict[str, dict[str, Any]] = {
    "opus-mt": {},
    "relu, unscaled": dict(activation_function="relu", scale_embedding=False),
    "gelu": dict(activation_function="gelu"),
    "two embeddings": TWO_EMBEDDINGS,
    "two embeddings and a head": dict(TWO_EMBEDDINGS, tie_word_embeddings=False),
}
SOURCE, TARGET = tokens(length=13), tokens(seed=3)


def marian(*, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any) -> Any:
    model = tiny(MarianMTModel, MarianConfig(**SIZES | fields), dtype=dtype, seed=seed)
    for stack in (model.model.encoder, model.model.decoder):  # sinusoids, which are not saved
        stack.embed_positions.weight.data = stack.embed_positions.create_weight()
    for module in model.model.modules():
        if isinstance(module, torch.nn.Linear):  # otherwise a tied head after a norm repeats the last token
            module.weight.data *= 2
    model.final_logits_bias.normal_(std=0.3)
    model.generation_config.bad_words_ids = [[52]]
    return model


def run_theirs(model: Any) -> Tensor:
    return aligned(model)(input_ids=SOURCE, decoder_input_ids=TARGET).logits


def run_ours(model: Any) -> Tensor:
    return model(SOURCE, TARGET)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(variant: str, dtype: torch.dtype) -> None:
    """Their table of positions is rounded to float32 in a float64 model too. So is ours, because models were trained with it."""
    theirs = marian(dtype=dtype, **VARIANTS[variant])
    ours = there_and_back(theirs, run_theirs, run_ours, within=FP32 if dtype == torch.float32 else FP64)
    assert ours.config.source_vocab_size == (53 if "two" in variant else 0)
    assert not isinstance(ours.head.bias, torch.nn.Parameter)  # fixed: loaded and saved, not trained


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=10)
def test_any_config(data: st.DataObject) -> None:
    draw = data.draw
    heads = draw(st.integers(1, 4))
    two, tied = draw(st.booleans()), draw(st.booleans())
    theirs = marian(
        dtype=torch.float64,
        d_model=heads * draw(st.sampled_from([2, 6, 10])),
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_layers=draw(st.integers(1, 3)),
        decoder_layers=draw(st.integers(1, 3)),
        activation_function=draw(st.sampled_from(["silu", "swish", "gelu", "gelu_new", "relu"])),
        scale_embedding=draw(st.booleans()),
        share_encoder_decoder_embeddings=not two,
        decoder_vocab_size=59 if two else 53,
        tie_word_embeddings=tied or not two,
    )
    there_and_back(theirs, run_theirs, run_ours, within=FP64)


def test_padding_on_the_right() -> None:
    source, target = sides(3, 13)["right"], sides(3, 11)["right"]

    def theirs(model: Any) -> Tensor:
        masks = dict(attention_mask=source.long(), decoder_attention_mask=target.long())
        return aligned(model)(input_ids=SOURCE, decoder_input_ids=TARGET, **masks).logits[target]

    there_and_back(marian(), theirs, lambda m: m(SOURCE, TARGET, source, target_mask=target)[target])


@torch.no_grad()
def test_padding_on_the_left(tmp_path: Path) -> None:
    """transformers counts padding as positions, so our padded batch is compared with its unpadded rows."""
    theirs, source, target = marian(), sides(3, 13)["left"], sides(3, 11)["left"]
    ours = load(saved(theirs, tmp_path))
    logits = ours(SOURCE, TARGET, source, target_mask=target)
    for row in range(3):
        alone = dict(input_ids=SOURCE[row, source[row]][None], decoder_input_ids=TARGET[row, target[row]][None])
        assert_near(logits[row, target[row]], theirs(**alone).logits[0])


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["opus-mt", "two embeddings and a head"])
def test_greedy(variant: str) -> None:
    real = sides(3, 13)["right"]
    inputs = dict(input_ids=SOURCE, attention_mask=real.long())
    theirs, text = writes(lambda seed: marian(**VARIANTS[variant], seed=seed), **inputs)
    ours = there_and_back(theirs, run_theirs, run_ours)
    assert greedy(ours, SOURCE, real).tolist() == text.tolist()


def test_generation_defaults(tmp_path: Path) -> None:
    theirs = marian()
    theirs.generation_config.max_length = 17
    expected = Generation(eos=(0,), pad=52, decoder_start=52, forced_eos=0, max_length=17, suppress=(52,))
    assert load(saved(theirs, tmp_path)).generation == expected


@torch.no_grad()
def test_old_files(tmp_path: Path) -> None:
    """Files of OPUS-MT: every name of the tied tensor, the sinusoids, old fields, and no generation_config.json."""
    theirs = marian()
    old = dict(normalize_before=False, normalize_embedding=False, add_final_layer_norm=False, add_bias_logits=False)
    fields = dict(bad_words_ids=[[52]], max_length=17, static_position_embeddings=True, num_beams=6)
    absent = dict.fromkeys(["decoder_vocab_size", "share_encoder_decoder_embeddings", "tie_word_embeddings"])
    saved(theirs, tmp_path, **old, **fields, **absent)
    (tmp_path / "generation_config.json").unlink()
    shared, sinusoids = theirs.model.shared.weight, theirs.model.encoder.embed_positions.weight
    to_bin(
        tmp_path,
        **{f"model.{side}.embed_tokens.weight": shared for side in ("encoder", "decoder")},
        **{f"model.{side}.embed_positions.weight": sinusoids for side in ("encoder", "decoder")},
        **{"lm_head.weight": shared},
    )
    with pytest.warns(UserWarning, match="asks for num_beams=6 .* pass beams=6 for it"):
        ours = load(tmp_path)
    assert (ours.generation.suppress, ours.generation.max_length) == ((52,), 17)
    assert_near(run_ours(ours), run_theirs(theirs))


@torch.no_grad()
def test_an_untied_head_unties_the_embeddings(tmp_path: Path) -> None:
    """Without a tied head, current transformers shares nothing: there are three tables, and `shared` is not used."""
    theirs = marian(tie_word_embeddings=False)
    ours = load(saved(theirs, tmp_path))
    assert (ours.config.tie_embeddings, ours.config.source_vocab_size) == (False, 53)
    assert_near(run_ours(ours), run_theirs(theirs))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("decoder_attention_heads", 11, "encoder_attention_heads=2, decoder_attention_heads=11"),
        ("decoder_attention_heads", None, "encoder_attention_heads=2, decoder_attention_heads=None"),
        ("decoder_layers", 0, "decoder_layers=0"),
        ("decoder_ffn_dim", 41, "encoder_ffn_dim=37, decoder_ffn_dim=41"),
        ("activation_function", "tanh", "activation_function='tanh'"),
        ("normalize_before", True, "normalize_before=True"),
        ("normalize_embedding", True, "normalize_embedding=True"),
        ("add_final_layer_norm", True, "add_final_layer_norm=True"),
        ("add_bias_logits", True, "add_bias_logits=True"),
        ("static_position_embeddings", False, "static_position_embeddings=False"),
        ("is_encoder_decoder", False, "is_encoder_decoder=False"),
        ("encoder_layers", None, "no 'encoder_layers'"),
        ("d_model", 21, "d_model=21"),
    ],
)
def test_refused_fields(field: str, value: object, words: str, tmp_path: Path) -> None:
    assert words in refusal(saved(marian(), tmp_path, **{field: value}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        dict(positions="learned"),
        dict(norm="rms"),
        dict(norm_first=True),
        dict(norm_eps=1e-6),
        dict(embedding_norm=True),
        dict(attention_bias="qkvo", bias=False),
        dict(attention_bias="qvo"),
        dict(qk_norm=True),
        dict(n_kv_heads=1),
        dict(d_head=10),
        dict(attention_scale=0.3),
        dict(window=5),
        dict(gated=True),
        dict(head_transform=True),
        dict(head_scale=True),
        dict(tie_embeddings=False),
    ],
    ids=str,
)
def test_refused_to_write(change: dict[str, Any], tmp_path: Path) -> None:
    config = ch.preset("opus-mt-en-de", d_model=22, n_heads=2, n_layers=1, d_ff=37, vocab_size=53, **change)
    with pytest.raises(CheckpointError, match=f"Marian's layout.* has no place for {list(change)[-1]}="):
        save(ch.build(config), tmp_path / "hf", format="hf")
    assert not (tmp_path / "hf").exists()


def test_alternating_sinusoids_are_written_as_halves(tmp_path: Path) -> None:
    """The layout has none that alternate; its names reorder the channels instead, and the model computes the same."""
    config = ch.preset(
        "opus-mt-en-de", d_model=22, n_heads=2, n_layers=1, d_ff=37, vocab_size=53, sinusoid_halves=False
    )
    model: Any = ch.build(config)
    again: Any = ch.load(save(model, tmp_path / "hf", format="hf"))
    source, target = torch.randint(0, 53, (2, 7)), torch.randint(0, 53, (2, 5))
    # fp32, one layer: sums run over the channels in another order
    torch.testing.assert_close(again(source, target), model(source, target), rtol=0, atol=1e-5)
