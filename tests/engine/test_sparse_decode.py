"""Decode steps of sparse models read the blocks that the pattern keeps, and compute what the plain equations do."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.engine import kv_cache
from clearhead.engine.allocator import BLOCK_SIZE
from clearhead.engine.engine import Engine
from clearhead.engine.kept_blocks import NONE, KeptBlocks
from clearhead.engine.request import Request
from clearhead.engine.runner import ModelRunner
from clearhead.kernels import native
from clearhead.kernels.decode_step import DecodeStep, Table
from clearhead.sparsity import Pattern

WHOLE = [  # the cache's blocks are kept whole or not at all
    "block=16, window=2",
    "block=32, window=2, n_global=1, n_random=2",
    "block=48, window=1, stride=3",
    "block=16, window=3, dilation=2, n_random=1, seed=5",
]
PARTS = ["window=19, n_global=3", "block=5, window=2, n_random=2", "block=24, window=2", "window=1, stride=37"]
SIZES = dict(n_layers=2, d_model=24, n_heads=4, vocab_size=53, max_len=331)
PROMPTS = [[i * 7 % 53 for i in range(151)], [2, 41, 17], [i * 11 % 53 for i in range(29)]]
NEW = 37


@pytest.mark.parametrize("pattern", WHOLE + PARTS)
def test_the_blocks_found_are_those_with_a_kept_place(pattern: str) -> None:
    rule = Pattern.parse(pattern)
    blocks = KeptBlocks(rule, BLOCK_SIZE)
    for lengths in ([0, 15, 16], [17, 300, 47], [301, 5, 48], [302, 6, 49]):  # the last changes no block: found again
        found = blocks.find(np.array(lengths, np.int32))
        for row, length in zip(found, lengths, strict=True):
            expected = sorted({place // BLOCK_SIZE for place in range(length + 1) if rule.keeps(length, place)})
            assert [at for at in row if at != NONE] == expected


def test_the_kept_table_ends_with_the_block_of_the_new_token() -> None:
    blocks = KeptBlocks(Pattern.parse("block=16, window=2, n_global=1"), 16)
    own = Table(np.arange(40, dtype=np.int32).reshape(2, 20) + 100, np.array([165, 3], np.int32))
    table = blocks.table(own)
    assert table.blocks.tolist() == [[100, 109, 110], [120, 0, 0]]
    assert table.counts.tolist() == [2 * 16 + 5, 3]


class Steps:
    """The logits of each decode step, how many of them native.cpp computed, and the most keys that a plain one gathered."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.logits: list[Tensor] = []
        self.n_native = self.n_gathered = 0
        decode, native_run, gather = ModelRunner.decode, DecodeStep.run, kv_cache.gather

        def record(runner: ModelRunner, *given: object) -> Tensor:
            self.logits.append(decode(runner, *given).clone())
            return self.logits[-1]

        def count(step: DecodeStep, *given: object) -> Tensor:
            self.n_native += 1
            return native_run(step, *given)

        def measure(held: Tensor, where: kv_cache.BlockTable) -> Tensor:
            keys = gather(held, where)
            self.n_gathered = max(self.n_gathered, keys.shape[2])
            return keys

        patch.setattr(ModelRunner, "decode", record)
        patch.setattr(DecodeStep, "run", count)
        patch.setattr(kv_cache, "gather", measure)


@pytest.mark.parametrize(
    ("pattern", "positions"),
    [*((pattern, "rotary") for pattern in WHOLE + PARTS), (WHOLE[0], "learned"), (WHOLE[1], "t5"), (PARTS[1], "t5")],
)
@torch.no_grad()
def test_steps_compute_what_the_whole_text_does(pattern: str, positions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ch.Config(shape="decoder", n_kv_heads=2, positions=positions, sparsity=pattern, **SIZES)
    model = ch.build(config, seed=1).eval()
    wide = copy.deepcopy(model).double()
    steps = Steps(monkeypatch)
    engine = Engine(model, max_tokens=1024, max_rows=3)
    tickets = [engine.submit(Request(prompt=prompt, max_new_tokens=NEW, eos=())) for prompt in PROMPTS]
    engine.run()
    for row, (prompt, ticket) in enumerate(zip(PROMPTS, tickets, strict=True)):
        text = [*prompt, *ticket.ids]
        expected = wide(torch.tensor([text[:-1]]))[0, len(prompt) :]
        got = torch.stack([logits[row] for logits in steps.logits])
        # float32 against float64, two layers
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=3e-5)
    if pattern in WHOLE and positions != "t5" and native.is_there():
        assert steps.n_native == NEW - 1
    else:
        assert steps.n_native == 0
        (rule,) = config.patterns
        lengths = np.array([len(prompt) + step for prompt in PROMPTS for step in range(NEW)], np.int32)
        most = KeptBlocks(rule, BLOCK_SIZE).find(lengths).shape[1] * BLOCK_SIZE
        assert 0 < steps.n_gathered <= most < 151 + NEW
