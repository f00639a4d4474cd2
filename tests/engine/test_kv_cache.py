"""Keys and values in blocks: a model that finds them by a table says what it says with a `Cache`, and without either."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import clearhead as ch
from clearhead.engine.kv_cache import SCRATCH, BlockTable, PagedCache, Pool, find, gather, key_positions
from clearhead.layers.masks import ABSENT
from clearhead.models import EncoderDecoder
from clearhead.models.encoder_decoder import source_mask
from tests.models.drawn import Fields, fields
from tests.models.tiny import built, tiny

BLOCK, SOURCE = 4, 11
LENGTHS = [13, 5, 16, 1]  # of the rows; with and without a block that is not full
# float64: the same sums over the same keys, padded to another length
TIGHT: dict[str, Any] = dict(rtol=0, atol=1e-12)

NAMES = ["gpt2", "llama", "mistral", "qwen2", "alibi", "original", "t5", "marian"]


class Paged:
    """Texts, one a row, read through blocks that lie anywhere; what it says of each token is kept."""

    def __init__(self, model: Any, texts: list[list[int]], sources: list[list[int]], *, seed: int = 0) -> None:
        self.model, self.texts, self.sources = model, texts, sources
        config, weight = model.config, next(model.parameters())
        is_pair = isinstance(model, EncoderDecoder)
        n = [-(-len(text) // BLOCK) for text in texts]
        n_source = [-(-len(source) // BLOCK) if is_pair else 0 for source in sources]
        free = list(range(1, 1 + sum(n) + sum(n_source) + 3))
        random.Random(seed).shuffle(free)
        self.rows = [[free.pop() for _ in range(each)] for each in n]
        self.source_rows = [[free.pop() for _ in range(each)] for each in n_source]
        self.unused = free
        self.pool = Pool(
            n_blocks=1 + sum(n) + sum(n_source) + 3,
            block=BLOCK,
            n_layers=config.n_decoder_layers if is_pair else config.n_layers,
            n_kv_heads=config.n_kv_heads,
            d_head=config.d_head,
            dtype=weight.dtype,
        )
        self.n_read = [0] * len(texts)
        self.logits: list[list[Tensor]] = [[] for _ in texts]

    @torch.no_grad()
    def read(self, sizes: dict[int, int]) -> Tensor:
        """So many tokens of these rows in one call."""
        at = list(sizes)
        pieces = [self.texts[row][self.n_read[row] : self.n_read[row] + n] for row, n in sizes.items()]
        T = max(map(len, pieces))
        tokens = torch.tensor([[*piece, *[0] * (T - len(piece))] for piece in pieces])
        real = torch.arange(T) < torch.tensor([[len(piece)] for piece in pieces])
        counts = torch.tensor([self.n_read[row] for row in at])
        cache = PagedCache(self.pool, table(self.rows, at), counts, fresh=not counts.any())
        mask = None if bool(real.all()) else real
        if isinstance(self.model, EncoderDecoder):
            blocks = BlockTable(
                table(self.source_rows, at), torch.tensor([len(self.sources[row]) for row in at]), BLOCK
            )
            if counts.any():
                cache.attach_source(blocks)
                logits = self.model.decode(tokens, None, mask=mask, cache=cache)
            else:
                cache.read_source(blocks)
                width = max(len(self.sources[row]) for row in at)
                source = torch.tensor([[*self.sources[row], *[0] * (width - len(self.sources[row]))] for row in at])
                there = torch.arange(width) < blocks.counts[:, None]
                memory = self.model.encode(source, there)
                logits = self.model.decode(tokens, memory, source_mask(there), mask=mask, cache=cache)
        else:
            logits = self.model(tokens, mask, cache=cache)
        for place, (row, piece) in enumerate(zip(at, pieces, strict=True)):
            self.logits[row] += logits[place, : len(piece)]
            self.n_read[row] += len(piece)
        return logits

    def check(self, within: dict[str, Any]) -> None:
        """What it said of every token is what a cache says, and what the text read at once does."""
        for row, (text, said) in enumerate(zip(self.texts, self.logits, strict=True)):
            n = self.n_read[row]
            with torch.no_grad():
                source = (torch.tensor([self.sources[row]]),) if isinstance(self.model, EncoderDecoder) else ()
                expected = self.model(*source, torch.tensor([text]))
            torch.testing.assert_close(torch.stack(said), expected[0, :n], **within)
            torch.testing.assert_close(torch.stack(said), self.cached(row)[:n], **within)

    def cached(self, row: int) -> Tensor:
        cache, said = self.model.new_cache(batch=1, max_len=len(self.texts[row])), list[Tensor]()
        source = torch.tensor([self.sources[row]])
        for token in self.texts[row]:
            step = torch.tensor([[token]])
            if not isinstance(self.model, EncoderDecoder):
                said.append(self.model(step, cache=cache)[0, 0])
            else:
                said.append(self.model(source if not said else None, step, cache=cache)[0, 0])
        return torch.stack(said)


def table(rows: list[list[int]], at: list[int]) -> Tensor:
    width = max(len(rows[row]) for row in at)
    return torch.tensor([[*rows[row], *[SCRATCH] * (width - len(rows[row]))] for row in at], dtype=torch.int32)


def ids(seed: int, n: int) -> list[int]:
    return torch.randint(0, 53, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def paged(model: Any, *, seed: int = 0) -> Paged:
    texts = [ids(seed + row, n) for row, n in enumerate(LENGTHS)]
    return Paged(model, texts, [ids(50 + row, n) for row, n in enumerate([SOURCE, 8, 1, 7])], seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_prompts_at_once_then_token_by_token(name: str) -> None:
    """A fresh batch with padding, then steps of rows of many lengths, some of which end."""
    run = paged(tiny(name))
    run.read({0: 5, 1: 3, 2: 9, 3: 1})
    while left := {row: 1 for row, text in enumerate(run.texts) if run.n_read[row] < len(text)}:
        run.read(left)
    run.check(TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_prompts_in_pieces(name: str) -> None:
    """A piece alone, pieces of several rows at different places, padding after the shorter ones, a first piece of one token."""
    run = paged(tiny(name), seed=7)
    run.read({2: 6})
    run.read({2: 3})
    run.read({0: 1, 1: 1})
    run.read({1: 4, 0: 7, 2: 2})
    run.read({3: 1})
    run.read({2: 5, 0: 3})
    run.read({0: 2})
    assert run.n_read == LENGTHS
    run.check(TIGHT)


@pytest.mark.slow
@given(
    drawn=fields(shapes=("decoder", "encoder-decoder"), only_tokens=True),
    sizes=st.lists(st.dictionaries(st.integers(0, 3), st.integers(1, 7), min_size=1), min_size=1, max_size=7),
)
@settings(max_examples=25)
def test_any_config_in_any_pieces(drawn: Fields, sizes: list[dict[int, int]]) -> None:
    config = ch.Config(**drawn)
    run = paged(built(config))
    run.read({row: min(3, n) for row, n in enumerate(LENGTHS)})
    for asked in sizes:
        left = {row: min(n, LENGTHS[row] - run.n_read[row]) for row, n in asked.items()}
        if any(left.values()):
            run.read({row: n for row, n in left.items() if n})
    run.check(dict(rtol=1e-9, atol=1e-9))  # some of these have no norm, and large numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "alibi", "original", "t5"])
def test_float32(name: str) -> None:
    """With the kernel that stores single tokens, where there is one."""
    run = paged(tiny(name, dtype=torch.float32))
    run.read({0: 5, 1: 3, 2: 9, 3: 1})
    while left := {row: 1 for row, text in enumerate(run.texts) if run.n_read[row] < len(text)}:
        run.read(left)
    run.check(dict(rtol=0, atol=1e-4))  # logits of about 10, of 7 digits


@pytest.mark.parametrize("name", ["llama", "original"])
def test_only_its_own_blocks_are_written(name: str) -> None:
    """Padding and rows of other lengths leave everybody else's blocks alone."""
    run = paged(tiny(name))
    run.read({0: 5, 2: 9})
    run.read({0: 3, 2: 1})
    written = {block for row in (0, 2) for block in (*run.rows[row], *run.source_rows[row])}
    others = [block for block in range(1, len(run.pool.memory)) if block not in written]
    assert set(run.rows[1] + run.unused) <= set(others)
    assert not run.pool.memory[others].any()
    # and of its own no slot after its last token
    at = run.rows[2][10 // BLOCK]
    assert run.pool.memory[at, :, :, :, : 10 % BLOCK].all()
    assert not run.pool.memory[at, :, :, :, 10 % BLOCK :].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "alibi", "original", "t5"])
def test_shared_blocks_and_copies(name: str) -> None:
    """Two rows go on from one text: whole blocks shared, the last one copied; each says what it says alone."""
    model = tiny(name)
    common, ends = ids(3, 10), [ids(4, 5), ids(5, 5)]
    source = ids(6, SOURCE)
    run = Paged(model, [common + end for end in ends], [source, source])
    run.read({0: 10})
    run.logits[1], run.n_read[1] = list(run.logits[0]), 10
    run.source_rows[1] = run.source_rows[0]
    run.rows[1][:2] = run.rows[0][:2]
    run.pool.copy(torch.tensor([run.rows[0][2]]), torch.tensor([run.rows[1][2]]))
    while run.n_read[0] < 15:
        run.read({0: 1, 1: 1})
    run.check(TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "alibi", "original", "t5"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_probe_sees_the_same_weights(name: str, dtype: torch.dtype) -> None:
    """Of a step in blocks and of one with a `Cache`: the same weights, and none where no key is."""
    model = tiny(name, dtype=dtype)
    run = paged(model)
    within: dict[str, Any] = TIGHT if dtype == torch.float64 else dict(rtol=0, atol=1e-5)
    for sizes in ({0: 7, 1: 3}, {0: 1, 1: 1}, {0: 4, 1: 1}):
        starts = list(run.n_read)
        with ch.probe(model, "*.weights", "*.q", "*.out") as seen:
            run.read(sizes)
        with torch.no_grad():
            for place, (row, n) in enumerate(sizes.items()):
                start, text = starts[row], torch.tensor([run.texts[row]])
                source = (torch.tensor([run.sources[row]]),) if isinstance(model, EncoderDecoder) else ()
                with ch.probe(model, "*.weights", "*.q", "*.out") as expected:
                    model(*source, text)
                for site in (site for site in seen if not site.startswith("encoder.")):
                    ours, theirs = seen[site][place][:, :n], expected[site][0][:, start : start + n]
                    if site.endswith("weights"):
                        S = ours.shape[-1]
                        theirs = torch.nn.functional.pad(theirs, (0, max(0, S - theirs.shape[-1])))
                        assert not theirs[..., S:].any()
                        theirs = theirs[..., :S]
                    torch.testing.assert_close(ours, theirs, **within)


def test_find() -> None:
    rows = torch.tensor([[3, 7, 0], [5, 2, 9]], dtype=torch.int32)
    at = torch.tensor([[3, 4, 5], [8, 9, 12]])
    real = torch.tensor([[True, True, False], [True, True, False]])
    blocks, slots = find(rows, at, BLOCK, real)
    assert blocks.tolist() == [[3, 7, SCRATCH], [9, 9, SCRATCH]]
    assert slots[real].tolist() == [3, 0, 0, 1]


def test_gathered_blocks_and_their_positions() -> None:
    """Each row's blocks side by side, and where no token is, ABSENT."""
    held = torch.arange(6.0)[:, None, None, None].expand(6, 2, BLOCK, 3) * 10 + torch.arange(BLOCK)[:, None]
    blocks = BlockTable(torch.tensor([[4, 2], [1, 0]], dtype=torch.int32), torch.tensor([6, 3]), BLOCK)
    laid = gather(held, blocks)
    assert laid.shape == (2, 2, 8, 3)
    assert laid[0, 0, :, 0].tolist() == [40, 41, 42, 43, 20, 21, 22, 23]
    assert laid[1, 1, :3, 2].tolist() == [10, 11, 12]
    assert key_positions(blocks).tolist() == [[0, 1, 2, 3, 4, 5, ABSENT, ABSENT], [0, 1, 2, *[ABSENT] * 5]]
