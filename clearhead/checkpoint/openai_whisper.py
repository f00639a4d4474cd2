"""OpenAI's own Whisper .pt: its sizes as `dims`, its tensors as `model_state_dict`, read without ever running a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.checkpoint.checkpoint import Checkpoint, make_config
from clearhead.checkpoint.tensor_names import expand
from clearhead.checkpoint.weight_files import MemoryWeights, load_torch_file
from clearhead.config import Config, Generation
from clearhead.errors import CheckpointError
from clearhead.families import whisper
from clearhead.families.config_translation import NameRow, both, same, take


def _attention(theirs: str, ours: str) -> list[NameRow]:
    return [
        *both(f"{theirs}_ln", f"{ours}_norm"),
        *both(f"{theirs}.query", f"{ours}.q_proj"),
        (f"{theirs}.key.weight", f"{ours}.k_proj.weight"),
        *both(f"{theirs}.value", f"{ours}.v_proj"),
        *both(f"{theirs}.out", f"{ours}.o_proj"),
    ]


def _block(side: str) -> list[NameRow]:
    return [
        *_attention(f"{side}.blocks.{{i}}.attn", f"{side}.blocks.{{i}}.attention"),
        *both(f"{side}.blocks.{{i}}.mlp_ln", f"{side}.blocks.{{i}}.feedforward_norm"),
        *both(f"{side}.blocks.{{i}}.mlp.0", f"{side}.blocks.{{i}}.feedforward.up"),
        *both(f"{side}.blocks.{{i}}.mlp.2", f"{side}.blocks.{{i}}.feedforward.down"),
    ]


NAMES: list[NameRow] = [
    *both("encoder.conv1", "source.conv1"),
    *both("encoder.conv2", "source.conv2"),
    ("encoder.positional_embedding", "encoder.positions.weight"),
    *_block("encoder"),
    *both("encoder.ln_post", "encoder.norm"),
    ("decoder.token_embedding.weight", "tokens.weight"),
    ("decoder.positional_embedding", "decoder.positions.weight"),
    *_block("decoder"),
    *_attention("decoder.blocks.{i}.cross_attn", "decoder.blocks.{i}.cross"),
    *both("decoder.ln", "decoder.norm"),
]

# Tokens that are no speech, such as brackets and musical notes, in the English vocabulary (GPT-2's) and in the multilingual one.
# They are `non_speech_tokens` of OpenAI's tokenizer, which also has the hyphen and the apostrophe at the start of a word.
SIGNS = "1 2 7 8 9 10 14 25 26 27 28 29 31 58 59 60 61 62 63 90 91 92 93 "
ENGLISH_SIGNS = SIGNS + (
    "357 366 438 532 685 705 796 930 1058 1220 1267 1279 1303 1343 1377 1391 1635 1782 1875 2162 2361 2488 3467 4008 4211 4600 "
    "4808 5299 5855 6329 7203 9609 9959 10563 10786 11420 11709 11907 13163 13697 13700 14808 15306 16410 16791 17992 19203 "
    "19510 20724 22305 22935 27007 30109 30420 33409 34949 40283 40493 40549 47282 49146"
)
MULTILINGUAL_SIGNS = SIGNS + (
    "359 503 522 542 873 893 902 918 922 931 1350 1853 1982 2460 2627 3246 3253 3268 3536 3846 3961 4183 4667 6585 6647 7273 9061 "
    "9383 10428 10929 11938 12033 12331 12562 13793 14157 14635 15265 15618 16553 16604 18362 18956 20075 21675 22520 26130 26161 "
    "26435 28279 29464 31650 32302 32470 36865 42863 47425 49870 50254"
)
FIRST_MULTILINGUAL = 51_865  # the smallest vocabulary with languages other than English

# The heads of cross-attention that show when a word is said, layer.head, by layers of the decoder, width and vocabulary. OpenAI's
# files do not name them; its code does, for the models that it published. large-v1 and large-v2 have equal sizes and unlike heads.
ALIGNMENT_HEADS: dict[tuple[int, int, int], str] = {
    # tiny.en
    (4, 384, 51_864): "1.0 2.0 2.5 3.0 3.1 3.2 3.3 3.4",
    # tiny
    (4, 384, 51_865): "2.2 3.0 3.2 3.3 3.4 3.5",
    # base.en
    (6, 512, 51_864): "3.3 4.7 5.1 5.5 5.7",
    # base
    (6, 512, 51_865): "3.1 4.2 4.3 4.7 5.1 5.2 5.4 5.6",
    # small.en
    (12, 768, 51_864): "6.6 7.0 7.3 7.8 8.2 8.5 8.7 9.0 9.4 9.8 9.10 10.0 10.1 10.2 10.3 10.6 10.11 11.2 11.4",
    # small
    (12, 768, 51_865): "5.3 5.9 8.0 8.4 8.7 8.8 9.0 9.7 9.9 10.5",
    # medium.en
    (
        24,
        1024,
        51_864,
    ): "11.4 14.1 14.12 14.14 15.4 16.0 16.4 16.9 17.12 17.14 18.7 18.10 18.15 20.0 20.3 20.9 20.14 21.12",
    # medium
    (24, 1024, 51_865): "13.15 15.4 15.15 16.1 20.0 23.4",
    # large-v3
    (32, 1280, 51_866): "7.0 10.17 12.18 13.12 16.1 17.14 19.11 21.4 24.1 25.6",
    # turbo
    (4, 1280, 51_866): "2.4 2.11 3.3 3.6 3.11 3.14",
}


def open_checkpoint(path: Path) -> Checkpoint:
    content = load_torch_file(path)
    dims, state = (content.get("dims"), content.get("model_state_dict")) if isinstance(content, dict) else (None, None)
    if not isinstance(dims, dict) or not isinstance(state, dict):
        raise CheckpointError(
            f"{path} is not OpenAI's Whisper: it has no dims and model_state_dict; weights without sizes are read from the "
            f"folder that holds them and a config.json"
        )
    if not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()):
        raise CheckpointError(f"{path} holds more than named tensors in its model_state_dict; fetch it again")
    weights = MemoryWeights(state)
    config = make_config(path, {"family": "whisper", **whisper.BASE, **_read(dims)}, weights)
    keys = {name: name for name in state}
    return Checkpoint(config, weights, expand(NAMES, config), keys, _generation(config))


def _read(dims: Mapping[str, Any]) -> dict[str, Any]:
    return dict(
        n_mels=take(dims, "n_mels"),
        vocab_size=take(dims, "n_vocab"),
        d_model=same(dims, "n_audio_state", "n_text_state"),
        n_heads=same(dims, "n_audio_head", "n_text_head"),
        n_layers=take(dims, "n_audio_layer"),
        n_decoder_layers=take(dims, "n_text_layer"),
        max_source_len=take(dims, "n_audio_ctx"),
        max_len=take(dims, "n_text_ctx"),
    )


def _generation(config: Config) -> Generation:
    """The special tokens. They are counted from the end of the vocabulary, which is 1,501 timestamps."""
    vocab_size = config.vocab_size
    heads = ALIGNMENT_HEADS.get((config.n_decoder_layers, config.d_model, vocab_size), "")
    multilingual = vocab_size >= FIRST_MULTILINGUAL
    end = 50_257 if multilingual else 50_256
    start, no_timestamps = end + 1, vocab_size - 1502
    translate, transcribe, start_of_lm, previous, no_speech = range(no_timestamps - 5, no_timestamps)
    if no_timestamps - 6 <= start:  # too small for OpenAI's vocabulary
        return Generation()
    signs = MULTILINGUAL_SIGNS if multilingual else ENGLISH_SIGNS
    return Generation(
        bos=end,
        eos=(end,),
        pad=end,
        decoder_start=start,
        forced_start=(None, transcribe, no_timestamps) if multilingual else (no_timestamps,),
        suppress=(*map(int, signs.split()), start, translate, transcribe, start_of_lm, previous, no_speech),
        begin_suppress=(220, end),  # a space; an empty text
        alignment_heads=tuple(
            (int(layer), int(head)) for layer, _, head in (each.partition(".") for each in heads.split())
        ),
    )
