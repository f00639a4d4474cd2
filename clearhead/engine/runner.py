"""One model and its memory, run step by step for the rows of a batch. Which rows, and what they write, is the engine's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from clearhead.engine import gpu_step
from clearhead.engine.batches import send
from clearhead.engine.cuda_graphs import Recordings, padded
from clearhead.engine.kv_cache import BlockTable, PagedCache, Pool
from clearhead.engine.native_step import NativeStep
from clearhead.engine.prefill import Reader
from clearhead.engine.sequence import Member, Numbers
from clearhead.kernels.decode_step import Table
from clearhead.models import Decoder, EncoderDecoder
from clearhead.sampling.beam_search import Search, go_on, likeliest


class Runner:
    """Rows 0 .. n - 1 of a batch: where their keys and values lie (`table`, `counts`; of a source likewise), and their last
    tokens. The engine writes the tables here, on the CPU; what changed follows to the device before the next step.

    On a GPU a step is recorded once for each of a few numbers of rows and replayed: thousands of small kernels then cost no time
    of the CPU. Rows that pad the batch to such a number are not `live`: they look at nothing and write to nobody's block.

    There a search goes on without the CPU, too (`has_paths`): each beam writes to blocks of its own, and its path names the
    place of each of its tokens, so that a beam goes on from another by copying a path. Without paths beams share blocks, and
    the engine copies one before a beam writes to it.
    """

    def __init__(
        self,
        model: Decoder | EncoderDecoder,
        *,
        n_blocks: int,
        block: int,
        max_rows: int,
        width: int,
        source_width: int,
    ) -> None:
        self.model, self.block, self.max_rows, self.n = model, block, max_rows, 0
        config, weight = model.config, next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        stack = model if isinstance(model, Decoder) else model.decoder
        self.pool = Pool(
            n_blocks=n_blocks,
            block=block,
            n_layers=config.n_layers if isinstance(model, Decoder) else config.n_decoder_layers,
            n_kv_heads=config.n_kv_heads,
            d_head=config.d_head,
            n_cross_heads=[block.cross.n_kv_heads for block in stack.layers if block.cross is not None],
            device=self.device,
            dtype=precision(weight),
        )
        self.table = np.zeros((max_rows, width), np.int32)
        self.counts = np.zeros(max_rows, np.int32)
        self.source_table = np.zeros((max_rows, source_width), np.int32)
        self.source_counts = np.zeros(max_rows, np.int32)
        self.tokens = torch.zeros(max_rows, dtype=torch.long, device=self.device)
        self.has_paths = self.device.type == "cuda"
        self.paths: Int[Tensor, "R L"] | None = None  # while there are beams
        self.path_memory: Int[Tensor, "R L"] | None = None  # the same; recordings know it by its address
        wide = torch.promote_types(precision(weight), torch.float32)
        self.scores = torch.zeros(max_rows, dtype=wide, device=self.device)  # of beams
        self.is_stale = self.has_moved = True  # tables; who stands where
        self.is_greedy = False  # whether `write` has put each row's likeliest next token in `tokens`
        # A bias needs the distance of every pair, for lengths that a recording does not know.
        records = self.device.type == "cuda" and stack.positions.bias is None
        self.recordings = Recordings(model, self.device) if records else None
        self.mirror = Mirror(self) if records else None
        self.reader = Reader(model, self.pool, max_rows, self.recordings)
        self.native_step = NativeStep(model)  # on a CPU

    def keep(self, rows: Sequence[int], *, beams: bool) -> None:
        """Only these rows stay, in this order; whether there are beams among them."""
        n, at = len(rows), np.array(rows, np.int64)
        for held in (self.table, self.counts, self.source_table, self.source_counts):
            held[:n] = held[at]
            held[n : self.n] = 0
        stay = send(at, self.device)
        for held in (self.tokens, self.scores, *([] if self.paths is None else [self.paths])):
            held[:n] = held[stay]
        self.n = n
        self.paths = self.paths if beams else None
        self.is_stale = self.has_moved = True

    def join(self, members: Sequence[Member]) -> None:
        """New rows, as many for each as it has beams, whose prompts were read."""
        for member in members:
            rows = slice(self.n, self.n + member.width)
            self.table[rows, : len(member.row)] = member.row
            self.counts[rows] = len(member.prompt)
            self.source_table[rows, : len(member.source)] = member.source
            self.source_counts[rows] = member.n_source
            self.n = rows.stop
        self.is_stale = self.has_moved = True
        if self.paths is not None:
            self._lay_paths(self.n - sum(member.width for member in members))
        elif self.has_paths and any(member.width > 1 for member in members):
            if self.path_memory is None:
                shape = self.max_rows, self.table.shape[1] * self.block
                self.path_memory = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.paths = self.path_memory
            self._lay_paths(0)

    def _lay_paths(self, first: int) -> None:
        """The rows from this one on are where the table says."""
        assert self.paths is not None
        at = np.arange(int(self.counts[first : self.n].max()))
        laid = self.table[first : self.n][:, at // self.block] * self.block + at % self.block
        self.paths[first : self.n, : len(at)] = send(laid.astype(np.int32), self.device)

    def follow(self, rows: NDArray[np.int64], sources: NDArray[np.int64]) -> None:
        """These rows go on from the texts of those."""
        assert self.paths is not None
        to, of = send(np.stack([rows, sources]), self.device)
        self.paths[to] = self.paths[of]

    def copy(self, sources: Numbers, targets: Numbers) -> None:
        """Whole blocks."""
        self.pool.copy(*(send(each.astype(np.int64), self.device) for each in (sources, targets)))

    def read(self, members: Sequence[Member], T: int) -> Float[Tensor, "B V"]:
        """The next T tokens of each one's prompt, or what is left of it; logits after the last of them."""
        self.is_greedy = False
        return self.reader.read(members, T)

    def write(self, search: Search | None = None) -> Tensor:
        """Each row's last token read; logits for its next. All rows those of one plain search: what its beams looked at, for
        `Beams.advance`; they go on from each other here."""
        n, recordings, mirror = self.n, self.recordings, self.mirror
        self.is_greedy = recordings is not None and not recordings.is_watched
        if self.is_greedy and recordings is not None and mirror is not None:
            mirror.follow(self)
            beams = 1 if search is None else search.beams
            size = padded(n // beams, self.max_rows // beams) * beams
            kind = self.paths is not None if search is None else (beams, search.shaper.ends)
            kept = [self.tokens, self.scores, *([] if self.paths is None else [self.paths])]
            out = recordings.run((size, kind), partial(self._step, mirror, size, search), told=mirror.live, kept=kept)
            out = out[:n] if search is None else out[:, : n // beams]
        elif search is None and self.paths is None and (found := self._run_native_step()) is not None:
            out, self.is_greedy = found, True
        else:
            self.has_moved = True  # the mirror's counts did not follow
            longest = int(self.counts[:n].max()) + 1
            used = -(-longest // self.block)
            table, counts = send(self.table[:n, :used], self.device), send(self.counts[:n], self.device)
            used = -(-int(self.source_counts[:n].max()) // self.block)
            source = send(self.source_table[:n, :used], self.device), send(self.source_counts[:n], self.device)
            paths = None if self.paths is None else self.paths[:n, :longest]
            out = self.step(self.tokens[:n], PagedCache(self.pool, table, counts, paths=paths), *source)
            out = out if search is None else self.search(out, search)
        self.counts[:n] += 1
        return out

    def _run_native_step(self) -> Float[Tensor, "n V"] | None:
        """On a CPU the whole step in one call, for models that allow it; None for others."""
        own, source = Table(self.table, self.counts), Table(self.source_table, self.source_counts)
        return self.native_step.run(self.tokens[: self.n], self.pool, own, source)

    def _step(self, mirror: Mirror, size: int, search: Search | None) -> Tensor:
        """What is recorded of a step."""
        live, paths = mirror.live[:size], None if self.paths is None else self.paths[:size]
        cache = PagedCache(self.pool, mirror.table[:size], mirror.counts[:size], live=live, paths=paths)
        out = self.step(self.tokens[:size], cache, mirror.source_table[:size], mirror.source_counts[:size])
        if search is None:
            self.tokens[:size] = out.argmax(-1)  # the greedy ones are done; the engine replaces the others
        else:
            out = self.search(out, search)
        mirror.counts[:size] += live
        return out

    def search(self, logits: Float[Tensor, "R V"], search: Search) -> Int[Tensor, "3 B n"]:
        """The first rows' beams go on."""
        assert self.paths is not None
        R, n = len(logits), search.n_candidates
        grouped = (-1, search.beams)
        values, ids = (each.unflatten(0, grouped) for each in likeliest(logits, n))
        scores, tokens, parents, seen = go_on(values, ids, self.scores[:R].unflatten(0, grouped), search.shaper.ends)
        self.scores[:R], self.tokens[:R] = scores.flatten(), tokens.flatten()
        firsts = torch.arange(0, R, search.beams, device=self.device)
        self.paths[:R] = self.paths[(firsts[:, None] + parents).flatten()]
        return seen

    def start(self, logits: Float[Tensor, "B V"], search: Search, rows: NDArray[np.int64]) -> Int[Tensor, "3 B n"]:
        """The same for the first tokens of beams in these rows: all of a request go on from its prompt."""
        values, ids = (each[:, None].expand(-1, search.beams, -1) for each in likeliest(logits, search.n_candidates))
        scores = torch.full(values.shape[:2], -math.inf, dtype=self.scores.dtype, device=self.device)
        scores[:, 0] = 0
        scores, tokens, _, seen = go_on(values, ids, scores, search.shaper.ends)
        at = send(rows, self.device)
        self.scores[at], self.tokens[at] = scores.flatten(), tokens.flatten()
        return seen

    def step(
        self, tokens: Int[Tensor, " n"], cache: PagedCache, source: Int[Tensor, "n s"], source_counts: Int[Tensor, " n"]
    ) -> Float[Tensor, "n V"]:
        """One token a row through the model, by the GPU's step where it fits, else by the plain forward."""
        model = self.model
        if isinstance(model, EncoderDecoder):
            cache.attach_source(BlockTable(source, source_counts, self.block))
        states = gpu_step.run_model(model, tokens[:, None], cache)
        if states is None:
            memory: Any = (None,) if isinstance(model, EncoderDecoder) else ()
            states = model.states(tokens[:, None], *memory, cache=cache)
        return model.project(states)[:, 0]


class Mirror:
    """The tables as the device has them, for a recorded step: it raises the counts of `live` rows itself."""

    def __init__(self, runner: Runner) -> None:
        self.device, self.block = runner.device, runner.block
        held = (runner.table, runner.counts, runner.source_table, runner.source_counts)
        self.table, self.counts, self.source_table, self.source_counts = (
            torch.zeros(each.shape, dtype=torch.int32, device=self.device) for each in held
        )
        self.live = torch.zeros(runner.max_rows, dtype=torch.int32, device=self.device)

    def follow(self, runner: Runner) -> None:
        """What changed is sent; rows that are no longer there are not live."""
        n = runner.n
        if runner.has_moved:
            pairs = (self.table, runner.table), (self.source_table, runner.source_table)
            for ours, theirs in (*pairs, (self.counts, runner.counts), (self.source_counts, runner.source_counts)):
                ours.zero_()
                ours[:n] = send(theirs[:n], self.device)
            self.live.zero_()
            self.live[:n] = 1
        elif runner.is_stale:
            used = -(-int(runner.counts[:n].max() + 1) // self.block)
            self.table[:n, :used] = send(runner.table[:n, :used], self.device)
        runner.is_stale = runner.has_moved = False


def precision(weight: Tensor) -> torch.dtype:
    """Under autocast, keys and values come in the autocast type, not in the weights'."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
