"""Every generating family through the engine against transformers' generate; and one real text with every kind of cache."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.generation import GenerationMixin

import clearhead as ch
from clearhead.checkpoint import load
from clearhead.generation import Engine, Request, generate
from tests.families.compare import tiny
from tests.families.test_whisper import whisper
from tests.generation.models import ENDS, cut, texts
from tests.shared_data import shared_data

SIZES: dict[str, Any] = dict(
    vocab_size=53,
    num_hidden_layers=2,
    intermediate_size=37,
    max_position_embeddings=64,
    hidden_size=24,
    num_attention_heads=6,
    num_key_value_heads=2,
    eos_token_id=ENDS,
    bos_token_id=1,
    pad_token_id=0,
)
KINDS: dict[str, tuple[Any, Any]] = {
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=5)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
}


@functools.cache
def pair(name: str, seed: int) -> tuple[Any, Any]:
    theirs = whisper(seed=seed) if name == "whisper" else tiny(*KINDS[name], seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, load(Path(folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_decoders_as_transformers(name: str) -> None:
    """Greedy with penalties; texts are longer than the window."""
    lengths: set[int] = set()
    for seed in range(3):
        theirs, ours = pair(name, seed)
        prompts = texts(5, seed=seed)
        found = generate(ours, prompts, max_new_tokens=17, repetition_penalty=1.2, min_new_tokens=2)
        for prompt, text in zip(prompts, found, strict=True):
            told: dict[str, Any] = dict(do_sample=False, repetition_penalty=1.2, min_new_tokens=2)
            whole = theirs.generate(torch.tensor([prompt]), max_new_tokens=17, **told)
            assert text == cut(whole[0, len(prompt) :])
            lengths.add(len(text))
    assert len(lengths) > 2


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_whisper_as_transformers(beams: int) -> None:
    """Sound through the engine, several at once; theirs one by one, by the generate of all their models."""
    told: set[tuple[int, ...]] = set()
    for seed in range(3):
        theirs, ours = pair("whisper", seed)
        sounds = torch.randn(4, 5, 26, generator=torch.Generator().manual_seed(seed))
        engine = Engine(ours, max_tokens=4096, max_rows=16)
        common: dict[str, Any] = dict(prompt=[50, 7], max_new_tokens=11, beams=beams, eos=ENDS)
        tickets = [engine.submit(Request(source=sound, **common)) for sound in sounds]
        engine.run()
        for sound, ticket in zip(sounds, tickets, strict=True):
            asked: dict[str, Any] = dict(max_new_tokens=11, num_beams=beams, do_sample=False)
            asked |= dict(suppress_tokens=[5, 6, 52], begin_suppress_tokens=[3, 51], eos_token_id=ENDS)
            prompt = torch.tensor([[50, 7]])
            shared: Any = GenerationMixin
            whole = shared.generate(theirs, sound[None], decoder_input_ids=prompt, **asked)
            assert ticket.ids == cut(whole[0, 2:])
            told.add(tuple(ticket.ids))
    assert len(told) > 1  # not all alike


@pytest.mark.slow
def test_stories260k_in_every_memory() -> None:
    """llama2.c's text: without a cache, with a plain one, a paged one, chunked prefill, and a cached prefix."""
    folder = shared_data("stories260K")
    model: Any = load(folder / "stories260K.bin").eval()
    start = ch.load_tokenizer(folder / "tok512.bin").encode("")
    plain: list[int] = list(start)
    with torch.no_grad():
        while len(plain) < 120:
            plain.append(int(model(torch.tensor([plain]))[0, -1].argmax()))
        cache, owned = model.new_cache(batch=1, max_len=120), list(start)
        new = torch.tensor([start])
        while len(owned) < 120:
            new = model(new, cache=cache)[:, -1:].argmax(-1)
            owned.append(int(new))
    assert owned == plain
    assert generate(model, [start], max_new_tokens=120 - len(start), eos=()) == [plain[len(start) :]]
    engine = Engine(model, max_tokens=1024, max_rows=2, prefill_tokens=7)
    for cut_at in (60, 60, 90):  # read in pieces of 7; then found in memory; then as what was written
        ticket = engine.submit(Request(prompt=plain[:cut_at], max_new_tokens=120 - cut_at, eos=()))
        engine.run()
        assert ticket.ids == plain[cut_at:]
    assert ticket.n_cached == 80
