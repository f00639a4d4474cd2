"""Every mistake is answered with what is wrong, what was received and what to do, never with a wrong number.

`unchecked`: users have no shape checks, and read the messages tested here.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.layers.masks import causal, documents, padding

from .tiny import inputs, tiny

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def gpt() -> ch.Decoder:
    return tiny("gpt2", dtype=torch.float32)


@pytest.fixture(scope="module")
def bert() -> ch.Encoder:
    return tiny("bert", dtype=torch.float32)


@pytest.fixture(scope="module")
def translator() -> ch.EncoderDecoder:
    return tiny("original", dtype=torch.float32)


@pytest.fixture(scope="module")
def whisper() -> ch.EncoderDecoder:
    return tiny("whisper", dtype=torch.float32)


TOKENS = torch.arange(22).reshape(2, 11)


def refuses(*words: str):
    """An InputError whose message holds all of these words."""
    return pytest.raises(ch.InputError, match="^" + "".join(f"(?=.*{re.escape(word)})" for word in words))


@pytest.mark.parametrize("tokens", [TOKENS[0], TOKENS[None], torch.tensor(3)], ids=["1", "3", "0"])
def test_tokens_of_the_wrong_rank(gpt: ch.Decoder, tokens: Tensor) -> None:
    with refuses("(batch, length)", str(tuple(tokens.shape)), "tokens[None]"):
        gpt(tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8], ids=str)
def test_tokens_that_are_no_ids(gpt: ch.Decoder, dtype: torch.dtype) -> None:
    with refuses("whole numbers", str(dtype)):
        gpt(TOKENS.to(dtype))


@pytest.mark.parametrize("tokens", [[[1, 2]], "hello", None])
def test_tokens_that_are_no_tensor(gpt: ch.Decoder, tokens: Any) -> None:
    with refuses("a tensor of whole numbers", str(type(tokens))):
        gpt(tokens)


def test_ids_as_int32_are_fine(gpt: ch.Decoder) -> None:
    assert torch.equal(gpt(TOKENS.int()), gpt(TOKENS))


@pytest.mark.parametrize("wrong", [53, -1])
def test_ids_out_of_range(gpt: ch.Decoder, translator: ch.EncoderDecoder, wrong: int) -> None:
    tokens = TOKENS.clone()
    tokens[1, 3] = wrong
    for call in (lambda: gpt(tokens), lambda: translator(tokens, TOKENS), lambda: translator(TOKENS, tokens)):
        with refuses("0 .. 52", "vocab_size=53", f"got {min(0, wrong)} .. {max(21, wrong)}", "own"):
            call()


def test_each_side_has_its_own_vocabulary() -> None:
    model = tiny("original", dtype=torch.float32, source_vocab_size=59)
    model(TOKENS + 37, TOKENS)
    with refuses("0 .. 58", "vocab_size=59"):
        model(TOKENS + 38, TOKENS)
    with refuses("0 .. 52", "vocab_size=53"):
        model(TOKENS, TOKENS + 37)


@pytest.mark.parametrize(
    "empty", [torch.empty(2, 0, dtype=torch.long), torch.empty(0, 5, dtype=torch.long)], ids=["length", "batch"]
)
def test_empty_input(gpt: ch.Decoder, bert: ch.Encoder, translator: ch.EncoderDecoder, empty: Tensor) -> None:
    for call in (lambda: gpt(empty), lambda: bert(empty), lambda: translator(empty, TOKENS)):
        with refuses(str(tuple(empty.shape)), "at least one"):
            call()


def test_too_long_for_the_positions(gpt: ch.Decoder) -> None:
    gpt(torch.zeros(1, 31, dtype=torch.long))
    with refuses("longer than the model's positions", "32 > max_len=31", "shorten"):
        gpt(torch.zeros(1, 32, dtype=torch.long))


def test_a_source_too_long_for_its_positions(whisper: ch.EncoderDecoder) -> None:
    whisper(torch.rand(2, 5, 58), TOKENS)
    with refuses("30 > max_len=29"):
        whisper(torch.rand(2, 5, 60), TOKENS)


def test_a_cache_does_not_reach_past_the_positions(gpt: ch.Decoder) -> None:
    cache = gpt.new_cache(batch=1, max_len=37)
    gpt(torch.zeros(1, 31, dtype=torch.long), cache=cache)
    with refuses("32 > max_len=31"):
        gpt(torch.zeros(1, 1, dtype=torch.long), cache=cache)


def test_computed_positions_have_no_end() -> None:
    for name in ("original", "llama", "t5", "alibi"):
        model = tiny(name, dtype=torch.float32)
        *source, _ = inputs(model.config, batch=1)
        model(*source, torch.zeros(1, 67, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8], ids=str)
def test_a_mask_that_is_not_boolean(gpt: ch.Decoder, dtype: torch.dtype) -> None:
    with refuses("boolean, True = a real token", str(dtype), "tokens != pad"):
        gpt(TOKENS, torch.ones(2, 11, dtype=dtype))


@pytest.mark.parametrize("shape", [(2, 10), (3, 11), (11,), (2, 1, 11), (2, 11, 11), (1, 11)], ids=str)
def test_a_mask_of_the_wrong_shape(gpt: ch.Decoder, bert: ch.Encoder, shape: tuple[int, ...]) -> None:
    for model in (gpt, bert):
        with refuses("(2, 11)", str(shape)):
            model(TOKENS, torch.ones(shape, dtype=torch.bool))


def test_masks_of_the_wrong_shape_on_either_side(translator: ch.EncoderDecoder) -> None:
    wrong = torch.ones(2, 7, dtype=torch.bool)
    with refuses("(2, 11)", "(2, 7)"):
        translator(TOKENS, TOKENS, wrong)
    with refuses("(2, 11)", "(2, 7)"):
        translator(TOKENS, TOKENS, target_mask=wrong)


def test_a_mask_for_sound_counts_what_the_convolutions_make_of_it(whisper: ch.EncoderDecoder) -> None:
    with refuses("(2, 13)", "(2, 26)"):
        whisper(torch.rand(2, 5, 26), TOKENS, torch.ones(2, 26, dtype=torch.bool))


def test_a_mask_that_is_no_mask(gpt: ch.Decoder) -> None:
    with refuses("mask", "list"):
        gpt(TOKENS, [[True] * 11] * 2)


def test_an_inverted_mask(gpt: ch.Decoder, translator: ch.EncoderDecoder) -> None:
    padded = torch.arange(11) >= torch.tensor([[4], [11]])  # True for padding: no real token in the second row
    for call in (
        lambda: gpt(TOKENS, padded),
        lambda: translator(TOKENS, TOKENS, padded),
        lambda: translator(TOKENS, TOKENS, target_mask=padded),
    ):
        with refuses("row 1", "no real token", "True = a real token", "mask=~mask"):
            call()


def test_a_mask_of_the_wrong_shape_inside_a_mask(gpt: ch.Decoder) -> None:
    for mask in (documents(torch.zeros(2, 7, dtype=torch.long)), padding(torch.ones(3, 11, dtype=torch.bool))):
        with refuses("mask", "(2, 11)"):
            gpt(TOKENS, mask)


def test_a_mask_with_a_cache_is_the_padding_alone(gpt: ch.Decoder) -> None:
    with refuses("with a cache", "boolean", "got a Mask"):
        gpt(TOKENS, causal(), cache=gpt.new_cache(batch=2, max_len=11))


def test_no_source_and_no_cache_that_read_one(translator: ch.EncoderDecoder) -> None:
    for cache in (None, translator.new_cache(batch=2, max_len=11)):
        with refuses("source=None", "cache that has already read a source", "pass the source first"):
            translator(None, TOKENS, cache=cache)


def test_a_second_source_for_one_cache(translator: ch.EncoderDecoder) -> None:
    cache = translator.new_cache(batch=2, max_len=22)
    translator(TOKENS, TOKENS, cache=cache)
    with refuses("already read a source", "source=None", "new cache"):
        translator(TOKENS, TOKENS, cache=cache)


def test_a_refused_call_leaves_the_cache_as_it_was(translator: ch.EncoderDecoder, gpt: ch.Decoder) -> None:
    cache, expected = translator.new_cache(batch=2, max_len=11), translator(TOKENS, TOKENS)
    translator(TOKENS, TOKENS[:, :4], cache=cache)
    for wrong in (TOKENS, TOKENS[:1, :1], TOKENS[:, :1] + 53):
        with pytest.raises(ch.InputError):
            translator(None, wrong, cache=cache)
    # float32, three layers: only the order of summation differs
    torch.testing.assert_close(translator(None, TOKENS[:, 4:], cache=cache), expected[:, 4:], rtol=0, atol=1e-4)
    cache, expected = gpt.new_cache(batch=2, max_len=11), gpt(TOKENS)
    with pytest.raises(ch.InputError):
        gpt(TOKENS, torch.ones(2, 7, dtype=torch.bool), cache=cache)
    torch.testing.assert_close(gpt(TOKENS, cache=cache), expected, rtol=0, atol=1e-4)


def test_a_first_call_that_was_refused_has_read_no_source(translator: ch.EncoderDecoder) -> None:
    cache = translator.new_cache(batch=2, max_len=5)
    with refuses("full"):
        translator(TOKENS, TOKENS, cache=cache)
    translator(TOKENS, TOKENS[:, :5], cache=cache)


def test_a_cache_too_small(gpt: ch.Decoder) -> None:
    cache = gpt.new_cache(batch=2, max_len=13)
    gpt(TOKENS, cache=cache)
    with refuses("full", "11 tokens held + 3 new > max_len=13", "max_len=14"):
        gpt(TOKENS[:, :3], cache=cache)


def test_a_cache_for_another_batch(gpt: ch.Decoder) -> None:
    with refuses("holds 3 rows, the input 2", "batch=2"):
        gpt(TOKENS, cache=gpt.new_cache(batch=3, max_len=13))


@pytest.mark.parametrize("sizes", [dict(batch=0, max_len=5), dict(batch=2, max_len=0)], ids=str)
def test_a_cache_of_nothing(gpt: ch.Decoder, sizes: dict[str, int]) -> None:
    with refuses("at least 1", f"batch={sizes['batch']}", f"max_len={sizes['max_len']}"):
        gpt.new_cache(**sizes)


def test_source_and_target_of_different_batches(translator: ch.EncoderDecoder) -> None:
    with refuses("source", "2", "target", "1"):
        translator(TOKENS, TOKENS[:1])


def test_segments_for_a_model_without() -> None:
    model = tiny("esm", dtype=torch.float32)
    with refuses("no segments", "n_segments=0", "leave them out"):
        model(TOKENS, segments=torch.zeros_like(TOKENS))


@pytest.mark.parametrize(
    "segments",
    [torch.full((2, 11), 2), torch.full((2, 11), -1), torch.zeros(2, 7).long(), torch.zeros(2, 11)],
    ids=["above", "below", "too few", "no numbers"],
)
def test_segments_that_there_are_not(bert: ch.Encoder, segments: Tensor) -> None:
    with refuses("segments"):
        bert(TOKENS, segments=segments)


@pytest.mark.parametrize(
    "positions",
    [torch.arange(11) + 21, torch.arange(11) - 1, torch.arange(7), torch.zeros(11)],
    ids=["above", "below", "too few", "no numbers"],
)
def test_positions_that_there_are_not(gpt: ch.Decoder, positions: Tensor) -> None:
    with refuses("positions"):
        gpt(TOKENS, positions=positions)


@pytest.mark.parametrize(
    "shape", [(2, 3, 15, 16), (2, 3, 16, 16), (2, 1, 15, 15), (3, 15, 15), (2, 15, 15, 3)], ids=str
)
def test_pictures_of_the_wrong_size(shape: tuple[int, ...]) -> None:
    with refuses("(batch, 3, 15, 15)", str(shape), "resize"):
        tiny("vit", dtype=torch.float32)(torch.rand(shape))


def test_pictures_that_are_bytes() -> None:
    with refuses("pictures", "uint8"):
        tiny("vit", dtype=torch.float32)(torch.zeros(2, 3, 15, 15, dtype=torch.uint8))


@pytest.mark.parametrize("shape", [(2, 7, 26), (2, 26, 5), (5, 26), (1, 2, 5, 26)], ids=str)
def test_sound_of_the_wrong_shape(whisper: ch.EncoderDecoder, shape: tuple[int, ...]) -> None:
    with refuses("(batch, 5 mel bands, frames)", str(shape), "axis order"):
        whisper(torch.rand(shape), TOKENS)


def test_no_sound(whisper: ch.EncoderDecoder) -> None:
    with refuses("sound", "(2, 5, 0)"):
        whisper(torch.rand(2, 5, 0), TOKENS)


def test_checkpointing_with_a_cache(gpt: ch.Decoder, translator: ch.EncoderDecoder) -> None:
    with refuses("checkpointing", "cache", "leave one out"):
        gpt(TOKENS, cache=gpt.new_cache(batch=2, max_len=11), checkpointing=True)
    with refuses("checkpointing", "cache", "leave one out"):
        translator(TOKENS, TOKENS, cache=translator.new_cache(batch=2, max_len=11), checkpointing=True)


def test_build_takes_a_config() -> None:
    with pytest.raises(ch.ConfigError, match=r"takes a Config, got str.*ch\.preset"):
        ch.build("gpt2")


def test_a_head_that_is_not_there(bert: ch.Encoder) -> None:
    with refuses("head", "tokens"):
        bert.project(bert.states(TOKENS))


@pytest.mark.usefixtures("uncompiled_flex")
def test_the_flex_kernel_has_no_dropout() -> None:
    model = tiny("gpt2", kernel="flex", attention_dropout=0.1)
    with torch.no_grad():
        model(TOKENS)  # in use, nothing drops out
        with refuses("flex", "dropout=0.1", "fused"):
            model.train()(TOKENS)


def test_the_flex_kernel_has_no_gradient_on_a_cpu() -> None:
    with refuses("flex", "gradient", "fused"):
        tiny("gpt2", kernel="flex", dtype=torch.float32)(TOKENS)


def test_every_error_is_a_clearhead_error() -> None:
    for error in (ch.ConfigError, ch.InputError, ch.CheckpointError, ch.MissingExtraError):
        assert issubclass(error, ch.ClearheadError)
    assert issubclass(ch.ClearheadError, Exception)
