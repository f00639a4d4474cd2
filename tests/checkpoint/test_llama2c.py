"""llama2.c's .bin, written from transformers' models as its exporter does, and files of other kinds."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from families.compare import assert_near, tiny, tokens
from transformers import LlamaConfig, LlamaForCausalLM

import clearhead as ch
from clearhead.checkpoint import load

SIZES: dict[str, Any] = dict(vocab_size=53, num_hidden_layers=3, intermediate_size=37, max_position_embeddings=31)
SIZES |= dict(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, rms_norm_eps=1e-5)


def permute(x: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rotary pairs as neighbours, as in Meta's weights and llama2.c."""
    return x.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).reshape(x.shape)


def write(theirs: Any, path: Path) -> Path:
    config, state = theirs.config, theirs.state_dict()
    tied = config.tie_word_embeddings
    vocab_size = config.vocab_size if tied else -config.vocab_size
    n_heads, n_kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = (config.hidden_size, config.intermediate_size, config.num_hidden_layers, n_heads, n_kv_heads, vocab_size)

    def layers(name: str, heads: int | None = None) -> list[torch.Tensor]:
        found = [state[f"model.layers.{i}.{name}.weight"] for i in range(config.num_hidden_layers)]
        return [permute(x, heads) for x in found] if heads else found

    tables = torch.zeros(2, config.max_position_embeddings, config.hidden_size // n_heads // 2)
    parts = [
        state["model.embed_tokens.weight"],
        *layers("input_layernorm"),
        *layers("self_attn.q_proj", n_heads),
        *layers("self_attn.k_proj", n_kv_heads),
        *layers("self_attn.v_proj"),
        *layers("self_attn.o_proj"),
        *layers("post_attention_layernorm"),
        *layers("mlp.gate_proj"),
        *layers("mlp.down_proj"),
        *layers("mlp.up_proj"),
        state["model.norm.weight"],
        tables,
        *([] if tied else [state["lm_head.weight"]]),
    ]
    header = struct.pack("<7i", *sizes, config.max_position_embeddings)
    path.write_bytes(header + b"".join(part.float().contiguous().numpy().tobytes() for part in parts))
    return path


def model(**changes: Any) -> Any:
    return tiny(LlamaForCausalLM, LlamaConfig(**SIZES | changes))


def refusal(path: Path) -> str:
    with pytest.raises(ch.CheckpointError) as error:
        load(path)
    return str(error.value)


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_llama2c(tmp_path: Path, tied: bool) -> None:
    theirs, x = model(tie_word_embeddings=tied), tokens()
    ours = load(write(theirs, tmp_path / "model.bin"))
    assert_near(ours(x), theirs(x).logits)
    assert ours.config.tie_embeddings is tied
    assert ours.config.max_len == 31
    assert (ours.generation.bos, ours.generation.eos) == (1, (2, 1))


def test_sizes_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    path = write(model(), tmp_path / "model.bin")
    whole = path.read_bytes()
    draw = random.Random(0)
    for size in range(7):
        for value in (0, -1, 1, 2, 2**31 - 1, -(2**31), draw.randrange(2**31)):
            lying = bytearray(whole)
            lying[4 * size : 4 * size + 4] = struct.pack("<i", value)
            path.write_bytes(lying)
            if bytes(lying) != whole:
                assert "starts with" in refusal(path)
    for length in (0, 27, 28, 1000, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert str(path) in refusal(path)
    path.write_bytes(whole + b"\0")
    assert f"has {len(whole) + 1:,} bytes" in refusal(path)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(2)}, path)
    assert "no dims and model_state_dict" in refusal(path)
    path.write_bytes(struct.pack("<I", 0x616B3432) + bytes(300))
    assert "--version 0" in refusal(path)
    other = tmp_path / "notes.txt"
    other.write_text("hello")
    assert "no file of weights that is known (it starts with b'hell')" in refusal(other)
    other = tmp_path / "model.safetensors"
    other.write_bytes(bytes(8))
    assert f"give the folder that holds it and config.json: {tmp_path}" in refusal(other)
    assert "such as 'pytorch_model.bin'" in refusal(tmp_path)
