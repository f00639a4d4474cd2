"""Tiny generating models, of transformers and ours from the same files; with several end tokens, so that many texts end early."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from clearhead.checkpoint import load
from tests.families.compare import tiny
from tests.families.test_marian import marian
from tests.families.test_t5 import V11, t5

ENDS = [3, 11, 17, 29, 31, 41, 47]  # of a vocabulary of 53: a text has some seven tokens
DECODERS = ["gpt2", "llama"]
TRANSLATORS = ["marian", "t5"]


def _gpt2(seed: int) -> Any:
    sizes: dict[str, Any] = dict(vocab_size=53, n_positions=37, n_layer=2, n_embd=21, n_head=3, n_inner=37)
    sizes |= dict(tie_word_embeddings=False)  # a tied head repeats the token it just read
    return tiny(GPT2LMHeadModel, GPT2Config(**sizes, bos_token_id=1, eos_token_id=ENDS, pad_token_id=0), seed=seed)


def _llama(seed: int) -> Any:
    sizes: dict[str, Any] = dict(vocab_size=53, num_hidden_layers=2, intermediate_size=37, max_position_embeddings=37)
    sizes |= dict(hidden_size=24, num_attention_heads=6, num_key_value_heads=2)
    return tiny(LlamaForCausalLM, LlamaConfig(**sizes, eos_token_id=ENDS, pad_token_id=0), seed=seed)


def _marian(seed: int) -> Any:
    untied = dict(share_encoder_decoder_embeddings=False, decoder_vocab_size=53, tie_word_embeddings=False)
    return marian(seed=seed, eos_token_id=ENDS, forced_eos_token_id=11, **untied)


def _t5(seed: int) -> Any:
    theirs = t5(seed=seed, eos_token_id=ENDS, **V11)
    theirs.lm_head.weight.data *= 3  # its texts should not all be alike
    return theirs


@functools.cache
def pair(name: str, seed: int = 0) -> tuple[Any, Any]:
    """A model of transformers, and ours from the same files."""
    theirs = dict(gpt2=_gpt2, llama=_llama, marian=_marian, t5=_t5)[name](seed)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load(Path(folder))
    assert ours.generation.eos == tuple(ENDS)
    return theirs, ours


def texts(n: int, *, low: int = 1, high: int = 13, seed: int = 5) -> list[list[int]]:
    """Lists of ids of many lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (n,), generator=generator).tolist()
    return [torch.randint(1, 52, (length,), generator=generator).tolist() for length in lengths]


def cut(row: Tensor) -> list[int]:
    """Their row without the end token and padding."""
    ids = row.tolist()
    return next((ids[:at] for at, token in enumerate(ids) if token in ENDS), ids)
