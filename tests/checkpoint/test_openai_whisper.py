"""OpenAI's Whisper .pt: its tensor names, its special tokens, and pickles that must not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families.compare import assert_near, tiny
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.models.whisper.configuration_whisper import NON_SPEECH_TOKENS, NON_SPEECH_TOKENS_MULTI

import clearhead as ch
from clearhead.checkpoint import load

# The inverse of transformers' own converter (convert_openai_to_hf.py).
RENAMES = {
    "layers": "blocks",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
    "final_layer_norm": "mlp_ln",
    ".self_attn.q_proj": ".attn.query",
    ".self_attn.k_proj": ".attn.key",
    ".self_attn.v_proj": ".attn.value",
    ".self_attn_layer_norm": ".attn_ln",
    ".self_attn.out_proj": ".attn.out",
    ".encoder_attn.q_proj": ".cross_attn.query",
    ".encoder_attn.k_proj": ".cross_attn.key",
    ".encoder_attn.v_proj": ".cross_attn.value",
    ".encoder_attn_layer_norm": ".cross_attn_ln",
    ".encoder_attn.out_proj": ".cross_attn.out",
    "decoder.layer_norm.": "decoder.ln.",
    "encoder.layer_norm.": "encoder.ln_post.",
    "embed_tokens": "token_embedding",
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
}


def model(vocab_size: int = 101) -> Any:
    sizes: dict[str, Any] = dict(d_model=24, encoder_layers=2, decoder_layers=3, max_source_positions=13)
    sizes |= dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=96, decoder_ffn_dim=96)
    sizes |= dict(vocab_size=vocab_size, num_mel_bins=7, max_target_positions=19, pad_token_id=0, bos_token_id=1)
    return tiny(WhisperForConditionalGeneration, WhisperConfig(**sizes, eos_token_id=2, decoder_start_token_id=3))


def held(theirs: Any) -> dict[str, Any]:
    state = {}
    for name, tensor in theirs.state_dict().items():
        if name != "proj_out.weight":
            name = name.removeprefix("model.")
            for old, new in RENAMES.items():
                name = name.replace(old, new)
            state[name] = tensor
    dims: dict[str, int] = dict(n_mels=7, n_vocab=theirs.config.vocab_size, n_audio_ctx=13, n_text_ctx=19)
    dims |= dict(n_audio_state=24, n_text_state=24, n_audio_head=2, n_text_head=2, n_audio_layer=2, n_text_layer=3)
    return {"dims": dims, "model_state_dict": state}


def refusal(path: Path) -> str:
    with pytest.raises(ch.CheckpointError) as error:
        load(path)
    return str(error.value)


@torch.no_grad()
def test_openai_whisper(tmp_path: Path) -> None:
    theirs = model()
    torch.save(held(theirs), tmp_path / "tiny.pt")
    ours = load(tmp_path / "tiny.pt")
    sound, target = torch.randn(2, 7, 26), torch.randint(0, 101, (2, 11))
    assert_near(ours(sound, target), theirs(sound, decoder_input_ids=target).logits)


@pytest.mark.parametrize(
    ("vocab_size", "end", "signs", "start"),
    [
        (51_864, 50_256, NON_SPEECH_TOKENS, (50_362,)),
        (51_865, 50_257, NON_SPEECH_TOKENS_MULTI, (None, 50_359, 50_363)),
        (51_866, 50_257, NON_SPEECH_TOKENS_MULTI, (None, 50_360, 50_364)),
    ],
)
def test_special_tokens(tmp_path: Path, vocab_size: int, end: int, signs: list[int], start: tuple[int, ...]) -> None:
    """transformers has the same lists of non-speech tokens, except for the special tokens at their end."""
    torch.save(held(model(vocab_size)), tmp_path / "m.pt")
    found = load(tmp_path / "m.pt").generation
    assert (found.eos, found.decoder_start, found.forced_start) == ((end,), end + 1, start)
    assert [id for id in found.suppress if id <= end] == [id for id in signs if id <= end]
    assert [id for id in found.suppress if id > end] == [end + 1, *range(start[-1] - 5, start[-1])]
    assert found.begin_suppress == (220, end)


class Payload:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("/tmp/clearhead-was-run"),)


def test_refusals(tmp_path: Path, unchecked: None) -> None:
    path, whole = tmp_path / "tiny.pt", held(model())
    torch.save({**whole, "dims": Payload()}, path)
    assert "only tensors are read, never code" in refusal(path)
    assert not Path("/tmp/clearhead-was-run").exists()
    torch.save(whole["model_state_dict"], path)
    assert "not OpenAI's Whisper" in refusal(path)
    torch.save([1, 2], path)
    assert "not OpenAI's Whisper" in refusal(path)
    torch.save({**whole, "model_state_dict": {"a": 1}}, path)
    assert "more than named tensors" in refusal(path)
    for change, words in {
        "n_mels": "shape",
        "n_text_state": "must be there and equal",
        "n_audio_layer": "asks for",
        "n_text_ctx": "shape",
        "n_vocab": "shape",
    }.items():
        torch.save({**whole, "dims": {**whole["dims"], change: 1000}}, path)
        assert words in refusal(path), change
    torch.save({**whole, "dims": {**whole["dims"], "n_text_head": "two", "n_audio_head": "two"}}, path)
    assert "can not be built" in refusal(path)
    for size in (10**9, 10**30):
        torch.save(
            {**whole, "dims": {**whole["dims"], "n_vocab": size, "n_text_state": size, "n_audio_state": size}}, path
        )
        assert "is too large" in refusal(path)
    path.write_bytes(path.read_bytes()[:1000])
    assert "not a file of plain tensors" in refusal(path)
