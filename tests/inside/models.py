"""Models of transformers with ours beside them, and the tiny models that have logits."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from families.compare import tiny as theirs_tiny
from models.tiny import EVERY, tiny
from torch import nn

import clearhead as ch
from clearhead.models import Model

SCORED = [name for name in EVERY if tiny(name).config.head != "none"]
SUMS = [name for name in SCORED if tiny(name).config.norm_first and not tiny(name).config.head_transform]
FP32 = 1e-5  # transformers runs in float32: a few layers of sums of order 1


def of_transformers(kind: type, config: object, folder: Path) -> tuple[nn.Module, Model]:
    theirs = theirs_tiny(kind, config)
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(folder)
    return theirs, ch.load(folder).eval()


def gpt2s(folder: Path) -> tuple[nn.Module, Model]:
    sizes = dict(vocab_size=53, n_positions=19, n_layer=3, n_embd=21, n_head=3, bos_token_id=1, eos_token_id=2)
    return of_transformers(transformers.GPT2LMHeadModel, transformers.GPT2Config(**sizes), folder)


TOKENS = torch.randint(0, 53, (3, 11), generator=torch.Generator().manual_seed(5))
