"""A model whose logits are a hash of the tokens before, and a runner that keeps numbers where keys and values would be.

Such a key is a hash of its token and all before it, and logits are a hash of all keys: whatever the engine does wrong with blocks
shows in the text. The text that a request gets alone is computed from its tokens, without an engine.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.engine.request import Request
from clearhead.engine.runner import DeviceTables, ModelRunner
from clearhead.engine.scheduler import Scheduler
from clearhead.engine.sequence import Sequence
from clearhead.sampling.beam_search import Beams, BeamSearchParams
from clearhead.sampling.grammar import Constraint
from clearhead.sampling.logits_processors import LogitsProcessor
from tests.engine.test_engine import MAX_LEN, model_of

Keys = NDArray[np.uint64]
V = 53  # tokens of the tiny models
NAN_EVERY = 503  # one in so many histories has no logits

_draw = np.random.default_rng(0)
# Of tokens at each place of a source and of a text, then of keys there.
SALTS = _draw.integers(0, 2**63, (2, 2, 128), np.int64).astype(np.uint64) | np.uint64(1)
TOKEN_SALTS = _draw.integers(0, 2**63, V, np.int64).astype(np.uint64)


class ViolationError(AssertionError):
    """An invariant of the engine does not hold."""


class InjectedError(RuntimeError):
    """A failure of the model that the simulation asked for."""


def keys_of(tokens: abc.Sequence[int] | NDArray[np.int64], places: NDArray[np.int64], kind: int) -> Keys:
    """What each token adds to the key before it. `kind`: 0 for sources, 1 for texts."""
    return (np.asarray(tokens, np.int64) + 1).astype(np.uint64) * SALTS[kind, 0, places]


def hashes(keys: Keys, counts: NDArray[np.int64], kind: int) -> Keys:
    """One number for the first `counts` keys of each row."""
    width = keys.shape[1]
    return np.where(np.arange(width) < counts[:, None], keys * SALTS[kind, 1, :width], 0).sum(1, np.uint64)


def logits_of(hashed: Keys) -> Tensor:
    """Logits from 0 to 6 for each row; in one of NAN_EVERY rows some are NaN, or all."""
    x = hashed[:, None] + TOKEN_SALTS
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    logits = (x >> np.uint64(11)).astype(np.float64) * (6 / 2**53)
    broken = np.flatnonzero(hashed % np.uint64(NAN_EVERY) == 0)
    for row, bits in zip(broken, (hashed[broken] >> np.uint64(20)).tolist(), strict=True):
        logits[row, bits % V : V if bits % 2 else bits % V + 1] = math.nan
    return torch.from_numpy(logits)


class FakeRunner(ModelRunner):
    """Rows, block tables and paths are the real ones. With `on_gpu` the tables are read from their copies on the device."""

    def __init__(self, *args: Any, on_gpu: bool, has_argmax: bool, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self.memory = np.zeros((self.n_blocks, self.block_size), np.uint64)
        self.is_written = np.zeros(self.memory.shape, bool)  # since the block was allocated
        self.has_paths, self.native_step, self.finds_argmax = on_gpu, None, has_argmax
        self.device_tables = DeviceTables(self) if on_gpu else None
        self.fails_in = math.inf  # calls
        self.scheduler: Scheduler | None = None

    def watch(self, scheduler: Scheduler) -> None:
        """Blocks are forgotten when they are allocated, so that nobody reads what an earlier text left there."""
        self.scheduler, allocator = scheduler, scheduler.allocator
        allocate = allocator.allocate

        def allocate_empty(reservations: Any) -> Any:
            blocks = allocate(reservations)
            if len(set(blocks.tolist())) < len(blocks) or (blocks == 0).any():
                raise ViolationError(f"a block is allocated twice, or block 0 is: {blocks}")
            self.is_written[blocks] = False
            return blocks

        allocator.allocate = allocate_empty

    def prefill(self, sequences: abc.Sequence[Sequence], T: int) -> Tensor:
        self._fail_in_time()
        self.has_argmax = False
        hashed: list[Keys] = []
        for s in sequences:
            start, end = s.n_prefilled, min(s.n_prefilled + T, len(s.prompt))
            self._write_pieces(s.blocks, start, s.prompt[start:end], 1)
            source: Any = s.ticket.request.source or ()
            if start == 0:
                self._write_pieces(s.source_blocks, 0, list(source), 0)
            own = self._read(s.blocks[None], np.array([end]), 1)
            hashed.append(own + self._read(s.source_blocks[None], np.array([len(source)]), 0))
        return logits_of(np.concatenate(hashed))

    def decode(self, search: BeamSearchParams | None = None) -> Tensor:
        self._fail_in_time()
        n, lengths = self.n, self.lengths[: self.n].astype(np.int64)
        table, source_table = self.block_table[:n], self.source_table[:n]
        if self.device_tables is not None:
            tables = self.device_tables
            tables.update(self)
            table, source_table = tables.blocks[:n].numpy(), tables.source_blocks[:n].numpy()
            if (tables.lengths[:n].numpy() != lengths).any():
                raise ViolationError("the device's lengths are not the host's")
            tables.lengths[:n] += 1
        assert self.scheduler is not None
        rows, size = np.arange(n), self.block_size
        slots = table * size  # of each token of each row
        slots = (slots[:, :, None] + np.arange(size)).reshape(n, -1)
        new = slots[rows, lengths]
        ended = [row for row in self.scheduler.over if new[row] < size]  # they write to block 0, and nobody reads it
        rows = np.setdiff1d(rows, ended)
        if self.paths is not None:
            self.paths[:n].scatter_(1, torch.from_numpy(lengths)[:, None], torch.from_numpy(new)[:, None].int())
            slots = self.paths[:n].numpy()
        added = keys_of(self.tokens[:n].numpy(), lengths, 1)
        # A drafted token's row continues the row before it.
        for some in np.split(rows, rows[1:]) if self.has_drafts else [rows]:
            before = self._keys_at(slots[some, lengths[some] - 1])
            self._write(new[some] // size, lengths[some], before + added[some])
        width = int(lengths.max()) + 1
        hashed = np.zeros(n, np.uint64)
        hashed[rows] = hashes(self._keys_at(slots[rows, :width], lengths[rows] + 1), lengths[rows] + 1, 1)
        logits = logits_of(hashed + self._read(source_table, self.source_lengths[:n].astype(np.int64), 0))
        self.lengths[:n] += 1
        self.has_argmax = self.finds_argmax and search is None
        if self.has_argmax:
            self.tokens[:n] = logits.argmax(-1)
        return logits if search is None else self._extend_beams(logits, search)

    def keep_rows(self, rows: abc.Sequence[int], *, has_beams: bool) -> None:
        """Also forgets what drafts that were rejected left: the next tokens take their places."""
        had_drafts = self.has_drafts
        super().keep_rows(rows, has_beams=has_beams)
        for table, length in zip(self.block_table[: self.n], self.lengths[: self.n], strict=True) if had_drafts else ():
            later = np.arange(len(table) * self.block_size).reshape(len(table), -1) >= length
            used = table > 0
            self.is_written[table[used]] &= ~later[used]

    def copy_blocks(self, sources: Any, targets: Any) -> None:
        self.memory[targets], self.is_written[targets] = self.memory[sources], self.is_written[sources]

    def _fail_in_time(self) -> None:
        self.fails_in -= 1
        if self.fails_in < 0:
            raise InjectedError("the model failed")

    def _write_pieces(self, blocks: NDArray[np.int32], start: int, tokens: list[int], kind: int) -> None:
        """Some tokens of one row, after those before `start`."""
        places = start + np.arange(len(tokens))
        before = np.uint64(0)
        if start:
            before = self._keys_at(
                blocks[[(start - 1) // self.block_size]] * self.block_size + (start - 1) % self.block_size
            )[0]
        added = np.cumsum(keys_of(tokens, places, kind), dtype=np.uint64)
        self._write(blocks[places // self.block_size], places, before + added)

    def _write(self, blocks: NDArray[np.int32], places: NDArray[np.int64], keys: Keys) -> None:
        assert self.scheduler is not None
        slots = places % self.block_size
        if (blocks == 0).any() or (self.scheduler.allocator.ref_counts[blocks] != 1).any():
            raise ViolationError(f"a row writes to a block that others have, or nobody: {blocks}")
        if self.is_written[blocks, slots].any() or len({*zip(blocks, slots, strict=True)}) < len(blocks):
            raise ViolationError(f"a slot is written twice: blocks {blocks}, slots {slots}")
        self.memory[blocks, slots], self.is_written[blocks, slots] = keys, True

    def _keys_at(self, slots: NDArray[Any], counts: NDArray[np.int64] | None = None) -> Keys:
        """The keys in these slots, numbered through all blocks; with `counts`, only so many of each row must be there."""
        is_read = True if counts is None else np.arange(slots.shape[1]) < counts[:, None]
        if (is_read & ~self.is_written.ravel()[slots]).any():
            raise ViolationError("a slot is read that was not written since its block was allocated")
        return self.memory.ravel()[slots]

    def _read(self, tables: NDArray[np.int32], counts: NDArray[np.int64], kind: int) -> Keys:
        used = -(-int(counts.max(initial=0)) // self.block_size)
        slots = tables[:, :used, None] * self.block_size + np.arange(self.block_size)
        return hashes(self._keys_at(slots.reshape(len(tables), -1), counts), counts, kind)


@dataclass
class Expected:
    """What a request gets alone: its text, why it ended, and the tokens of a search's hypotheses."""

    ids: list[int]
    reason: str
    hypotheses: list[tuple[list[int], bool]]


def logits_after(source: list[int], texts: list[list[int]]) -> Tensor:
    """The logits after each of these texts, which are equally long."""
    hashed = np.zeros(1, np.uint64)
    for kind, rows in enumerate(([source], texts)):
        places = np.arange(len(rows[0]))
        keys = np.cumsum(keys_of(np.array(rows, np.int64), places, kind), 1, np.uint64)
        hashed = hashed + hashes(keys, np.full(len(rows), len(places)), kind)
    return logits_of(hashed)


def expect(model: Any, request: Request) -> Expected:
    """Token by token, without blocks, batches or an engine."""
    processor = LogitsProcessor(model, request.eos, request.strategy)
    prompt, source = list(request.prompt) or [1], list(request.source) if request.source is not None else []
    return (expect_text if request.beams == 1 else expect_search)(processor, request, prompt, source)


def expect_text(processor: LogitsProcessor, request: Request, prompt: list[int], source: list[int]) -> Expected:
    written: list[int] = []
    constraint = None if request.grammar is None else request.grammar.start()
    while True:
        raw = logits_after(source, [prompt + written])
        facts = [torch.tensor([n]) for n in (len(prompt), len(written), request.max_new_tokens)]
        history = torch.tensor([prompt + written]) if processor.needs_history else None
        logits = processor(raw, history, *facts)
        if constraint is not None:
            logits = logits.masked_fill(~constraint.allowed(), -math.inf)
        if logits.isnan().any() or not (logits > -math.inf).any():
            return Expected(written, "failed", [])
        token = int(request.strategy.choose(logits, torch.tensor([request.seed]), facts[1]))
        written.append(token)
        if token in processor.ends:
            return Expected(written[:-1], "end", [(written[:-1], True)])
        stops = [len(stop) for stop in request.stop if written[-len(stop) :] == list(stop)]
        if stops:
            ids = written[: -max(stops)]
            return Expected(ids, "stop", [(ids, True)])
        if constraint is not None:
            constraint.push(token)
        is_complete = constraint is not None and constraint.is_done
        if is_complete or len(written) == request.max_new_tokens:
            return Expected(written, "end" if is_complete else "length", [(written, is_complete)])


def expect_search(processor: LogitsProcessor, request: Request, prompt: list[int], source: list[int]) -> Expected:
    params = BeamSearchParams(request.beams, request.length_penalty, request.early_stopping, processor)
    beams = Beams(params, [prompt], [request.max_new_tokens], torch.float64, [None])
    texts = [list(prompt) for _ in range(request.beams)]
    states: list[Constraint | None] = [None] * request.beams
    if request.grammar is not None:
        states = [request.grammar.start() for _ in texts]
    while beams.is_open[0]:
        allowed = None
        if request.grammar is not None:
            everything = torch.ones(V, dtype=torch.bool)
            allowed = torch.stack([everything if state is None else state.allowed() for state in states])
        tokens, parents = beams.extend(*beams.candidates(logits_after(source, texts), allowed))
        texts = [[*texts[parent], token] for parent, token in zip(parents[0].tolist(), tokens[0].tolist(), strict=True)]
        before, alive = states, (beams.scores[0] > -math.inf).tolist()
        states = [None] * request.beams
        for at, (parent, lives) in enumerate(zip(parents[0].tolist(), alive, strict=True)):
            parent_state = before[parent]
            if lives and parent_state is not None:
                state = states[at] = parent_state.fork()
                state.push(int(tokens[0, at]))
    found = beams.finished[0]
    if not found:
        return Expected([], "failed", [])
    hypotheses = [(one.tokens, one.finished) for one in found[: request.n_best]]
    return Expected(found[0].tokens, "end" if found[0].finished else "length", hypotheses)


def tiny_model(shape: str) -> Any:
    """A real model, of which only config and rules are used."""
    model = model_of("llama" if shape == "decoder" else "original", torch.float64)
    assert SALTS.shape[-1] > MAX_LEN
    return model
