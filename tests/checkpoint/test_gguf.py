"""GGUF files: LLaMA and Qwen2 as llama.cpp stores them, in every quantisation, and files with false lengths."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families.compare import assert_near, tiny, tokens
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import clearhead as ch
from clearhead.checkpoint import load
from clearhead.checkpoint.gguf_file import GgufWeights
from clearhead.config import Generation

gguf = pytest.importorskip("gguf")
from .gguf_files import metadata_of, tensors_of, write  # noqa: E402

SIZES: dict[str, Any] = dict(vocab_size=53, num_hidden_layers=2, intermediate_size=37, max_position_embeddings=31)
SIZES |= dict(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=False)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=8192)

# The types that the package can quantise to; for the others the blocks are random bits.
MADE = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"]
GIVEN = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ1_S", "IQ1_M", "IQ2_S", "IQ2_XS", "IQ2_XXS"]
GIVEN += ["IQ3_S", "IQ3_XXS", "MXFP4"]


def llama(**changes: Any) -> Any:
    return tiny(LlamaForCausalLM, LlamaConfig(**SIZES | changes))


def saved(theirs: Any, path: Path, *, architecture: str = "llama", **changes: Any) -> Path:
    """The model as a file, with changes of its metadata; None removes an entry."""
    metadata = {**metadata_of(theirs, architecture), **changes}
    return write(path / "model.gguf", tensors_of(theirs, architecture), metadata, architecture=architecture)


def refusal(path: Path) -> str:
    with pytest.raises(ch.CheckpointError) as error:
        load(path)
    return str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(tie_word_embeddings=True),
        dict(num_key_value_heads=6, num_hidden_layers=1),
        dict(attention_bias=True, rope_parameters=dict(rope_type="default", rope_theta=33.0)),
    ],
    ids=["grouped", "tied", "full", "biases"],
)
@torch.no_grad()
def test_llama(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs, x = llama(**changes), tokens()
    ours = load(saved(theirs, tmp_path))
    assert_near(ours(x), theirs(x).logits)
    assert ours.config.tie_embeddings is changes.get("tie_word_embeddings", False)
    assert ours.config.max_len == 31


@torch.no_grad()
def test_head_width(tmp_path: Path) -> None:
    theirs, x = llama(head_dim=10), tokens()
    widths = {"llama.attention.key_length": 10, "llama.attention.value_length": 10}
    assert_near(load(saved(theirs, tmp_path, **widths))(x), theirs(x).logits)


@torch.no_grad()
def test_qwen2(tmp_path: Path) -> None:
    theirs, x = tiny(Qwen2ForCausalLM, Qwen2Config(**SIZES)), tokens()
    ours = load(saved(theirs, tmp_path, architecture="qwen2"))
    assert_near(ours(x), theirs(x).logits)
    assert ours.config.attention_bias == "qkv"


@torch.no_grad()
def test_linear_rope(tmp_path: Path) -> None:
    theirs = llama(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))
    x = tokens()
    for scaling in ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}):
        ours = load(saved(theirs, tmp_path, **{f"llama.{key}": value for key, value in scaling.items()}))
        assert_near(ours(x), theirs(x).logits)


@torch.no_grad()
def test_llama3_rope_is_recognised(tmp_path: Path) -> None:
    # Wide heads, so that there are frequencies below, within and above the transition.
    theirs = llama(hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16, rope_parameters=LLAMA3)
    inv_freq = theirs.model.rotary_emb.inv_freq
    plain = 5e5 ** (-torch.arange(0, 16, 2).float() / 16)
    factors = {"rope_freqs.weight": (plain / inv_freq).numpy()}
    assert {1.0, 8.0} < set(
        factors["rope_freqs.weight"].round(4).tolist()
    )  # unscaled, fully scaled, and the transition between
    path = write(tmp_path / "m.gguf", {**tensors_of(theirs), **factors}, metadata_of(theirs))
    ours, x = load(path), tokens()
    assert (ours.config.rotary_scaling, ours.config.rotary_factor) == ("llama3", 8.0)
    assert_near(ours(x), theirs(x).logits)

    factors["rope_freqs.weight"][3] *= 1.5
    path = write(tmp_path / "m.gguf", {**tensors_of(theirs), **factors}, metadata_of(theirs))
    assert "table that is not LLaMA 3's" in refusal(path)


@pytest.mark.parametrize("kind", MADE + GIVEN)
def test_every_quantisation(tmp_path: Path, kind: str) -> None:
    """Dequantised in parts, also into another type, the numbers are bit for bit those of the package."""
    number = gguf.GGMLQuantizationType[kind]
    draw = np.random.default_rng(0)
    block, nbytes = gguf.GGML_QUANT_SIZES[number]
    rows, width = 17, 2 * max(block, 256)
    if kind in MADE:
        raw = gguf.quants.quantize(draw.standard_normal((rows, width), np.float32), number)
    else:
        raw = draw.integers(0, 256, (rows, width // block * nbytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with np.errstate(all="ignore"):  # some of the random scales are infinite
        expected = torch.from_numpy(gguf.quants.dequantize(raw, number))
    weights = GgufWeights(tmp_path / "x.gguf")
    assert weights.shapes == {"x": (rows, width)}
    stored = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert weights.dtypes == {"x": stored}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clearhead.checkpoint.gguf_file.CHUNK", 3 * width)  # the last part is shorter
        read = weights.read("x")
        out = torch.empty(rows, width, dtype=torch.float64)
        weights.read_into("x", out)
    assert read.dtype == stored
    torch.testing.assert_close(read.float(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out, expected.double(), rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def test_a_quantised_model(tmp_path: Path) -> None:
    """The output is that of the model with the dequantised weights."""
    sizes = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, intermediate_size=96)
    theirs, x = llama(**sizes), tokens()
    tensors = tensors_of(theirs)
    kinds = {name: "Q8_0" for name, tensor in tensors.items() if tensor.ndim == 2}
    path = write(tmp_path / "q.gguf", tensors, metadata_of(theirs), kinds=kinds)
    kind = gguf.GGMLQuantizationType.Q8_0
    for tensor in theirs.state_dict().values():
        if tensor.ndim == 2:  # blocks are within rows, so the order of rows does not matter
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)))
    ours = load(path)
    assert ours.tokens.weight.dtype == torch.float32
    assert_near(ours(x), theirs(x).logits)
    assert load(path, dtype=torch.bfloat16).tokens.weight.dtype == torch.bfloat16


def test_float16_stays_float16(tmp_path: Path) -> None:
    theirs = llama()
    tensors = tensors_of(theirs)
    kinds = {name: "F16" for name, tensor in tensors.items() if tensor.ndim == 2}
    ours = load(write(tmp_path / "h.gguf", tensors, metadata_of(theirs), kinds=kinds))
    assert ours.tokens.weight.dtype == torch.float16
    assert torch.equal(ours.tokens.weight, theirs.model.embed_tokens.weight.half())


def test_special_tokens(tmp_path: Path) -> None:
    ids = {"bos": 1, "eos": 2, "eot": 7, "eom": 2, "padding": 3}
    ours = load(saved(llama(), tmp_path, **{f"tokenizer.ggml.{role}_token_id": id for role, id in ids.items()}))
    assert (ours.generation.bos, ours.generation.eos, ours.generation.pad) == (1, (2, 7), 3)
    unset = load(saved(llama(), tmp_path, **{"tokenizer.ggml.padding_token_id": 2**32 - 1}))
    assert unset.generation == Generation()


def test_refusals(tmp_path: Path) -> None:
    theirs = llama()

    def refused(**changes: Any) -> str:
        return refusal(saved(theirs, tmp_path, **{f"llama.{key.replace('__', '.')}": v for key, v in changes.items()}))

    assert "'attention.clamp_kqv'" in refused(attention__clamp_kqv=3.0)
    assert "'expert_count' to 8" in refused(expert_count=8)
    assert "rope scaling 'yarn'" in refused(rope__scaling__type="yarn")
    assert "'rope.dimension_count' to 2" in refused(rope__dimension_count=2)
    assert "None as its 'embedding_length'" in refused(embedding_length=None)
    assert "0 as its 'attention.head_count'" in refused(attention__head_count=0)
    assert "'blk.0.attn_q.weight' of shape (24, 24)" in refused(attention__key_length=6, rope__dimension_count=6)
    assert "'blk.0.attn_k.weight'" in refused(attention__head_count_kv=3)
    assert "shape (53, 24)" in refused(embedding_length=48, rope__dimension_count=8)
    assert "do not fit" in refused(block_count=1)
    assert "n_layers=2000000000 is too large" in refused(block_count=2 * 10**9)
    assert "'one' as its 'rope.freq_base'" in refused(rope__freq_base="one")
    assert "one of 3 pieces" in refusal(saved(theirs, tmp_path, **{"split.count": 3}))
    path = write(tmp_path / "m.gguf", tensors_of(theirs), metadata_of(theirs), architecture="lama")
    assert "did you mean 'llama'?" in refusal(path)
    assert load(saved(theirs, tmp_path, **{"llama.expert_count": 0, "llama.vocab_size": 53})) is not None


FALSE_NUMBERS = {
    "keys": (16, struct.pack("<Q", 2**63)),
    "tensors": (8, struct.pack("<Q", 2**63)),
    "first string": (24, struct.pack("<Q", 2**63)),
    "first string, in the file": (24, struct.pack("<Q", 2**16)),
    "version": (4, struct.pack("<I", 9)),
    "big-endian": (4, struct.pack(">I", 3)),
    "magic": (0, b"GGML"),
}


@pytest.mark.parametrize("field", FALSE_NUMBERS)
def test_headers_with_false_numbers(tmp_path: Path, field: str) -> None:
    path = saved(llama(), tmp_path, **{"general.tags": ["a", "b"], "general.numbers": [1, 2, 3]})
    at, new = FALSE_NUMBERS[field]
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)
    started = time.monotonic()
    assert "not a whole GGUF file" in refusal(path)
    assert time.monotonic() - started < 5  # seconds; a reader that trusts the number would hang


def test_lists_and_tensors_with_false_lengths(tmp_path: Path) -> None:
    path = saved(llama(), tmp_path, **{"general.tags": ["a", "b"], "general.numbers": [7, 8, 9]})
    whole = path.read_bytes()
    strings, numbers = whole.index(b"general.tags") + 12, whole.index(b"general.numbers") + 15
    shape = whole.index(b"token_embd.weight") + 17 + 4
    offset = shape + 2 * 8 + 4
    for at, value in [(strings + 8, 2**60), (numbers + 8, 2**62), (shape, 2**40), (shape, 2**30), (offset, 2**50)]:
        lying = bytearray(whole)
        lying[at : at + 8] = struct.pack("<Q", value)
        path.write_bytes(lying)
        assert "not a whole GGUF file" in refusal(path)
    # All tensors at the same offset: a small file would need much memory.
    assert "too few for 'x'" in refusal(_overlapping(tmp_path))


def _overlapping(tmp_path: Path) -> Path:
    header = struct.pack("<4sIQQ", b"GGUF", 3, 2, 0)
    for name in (b"w", b"x"):
        header += struct.pack("<Q", 1) + name + struct.pack("<IQIQ", 1, 100, 0, 0)
    path = tmp_path / "overlapping.gguf"
    path.write_bytes(header.ljust(128, b"\0") + bytes(500))
    return path


def test_damaged_files(tmp_path: Path, unchecked: None) -> None:
    """A file that is cut, or has changed bytes, is refused or loads, and this takes little time."""
    path = saved(llama(), tmp_path, **{"tokenizer.ggml.tokens": ["a", "b", "c"], "tokenizer.ggml.bos_token_id": 1})
    whole = path.read_bytes()
    head = whole.index(b"output_norm.weight") + 60
    draw = random.Random(0)
    refused = 0
    for turn in range(150):
        data = bytearray(whole)
        if turn % 4 == 0:
            del data[draw.randrange(len(data)) :]
        else:
            for _ in range(draw.choice((1, 1, 3))):
                at = draw.randrange(head)
                data[at] = draw.choice((0, 1, 127, 255, draw.randrange(256)))
        path.write_bytes(data)
        try:
            load(path)
        except ch.CheckpointError:
            refused += 1
    assert refused > 75
