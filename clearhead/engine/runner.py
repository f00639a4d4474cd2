"""The model runner: one model, its KV cache, and the rows of the batch. It computes prompts (prefill) and decode steps.

Which rows there are, and what becomes of the logits, is decided by the engine.
"""

from __future__ import annotations

import math
import weakref
from collections import abc
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from clearhead.engine import gpu_step
from clearhead.engine.cuda_graphs import CudaGraphs, round_up
from clearhead.engine.kept_blocks import KeptBlocks
from clearhead.engine.kv_cache import BlockTable, PagedCache, Pool
from clearhead.engine.native_step import NativeStep
from clearhead.engine.prefill import Prefill
from clearhead.engine.sequence import BlockIds, Sequence
from clearhead.engine.transfer import to_device
from clearhead.kernels.decode_step import Table
from clearhead.models import Decoder, EncoderDecoder
from clearhead.quantization.model_weights import example_weight
from clearhead.sampling.beam_search import BeamSearchParams, extend_on_device, top_log_probs


class ModelRunner:
    """Rows 0 .. n - 1 of a batch: their block tables, the number of their tokens in the cache (`lengths`), and their last tokens.

    Block tables and lengths (of an encoder-decoder's source too) are written on the host. `DeviceTables` copies what changed
    before the next step.

    On a GPU a step is captured as a CUDA graph once for each of a few batch sizes, and replayed. Rows that pad the batch to such
    a size are not `live`: they attend to nothing, and write to block 0.

    On a GPU a beam search can continue without the CPU (`has_paths`): each beam writes to blocks of its own, and its path names
    the slot of each of its tokens, so that one beam continues another by copying its path. Without paths beams share blocks, and
    a block is copied before a beam writes to it.

    On a GPU the model is held weakly, so that a runner that is kept for later does not keep its model alive.
    """

    def __init__(
        self,
        model: Decoder | EncoderDecoder,
        *,
        n_blocks: int,
        block_size: int,
        max_rows: int,
        table_width: int,
        source_width: int,
    ) -> None:
        self._model = weakref.ref(model)
        self.n_blocks, self.block_size, self.max_rows, self.n = n_blocks, block_size, max_rows, 0
        config, weight = model.config, example_weight(model)
        self.device, dtype = weight.device, cache_dtype(weight)
        stack = model if isinstance(model, Decoder) else model.decoder
        self.pool = Pool(
            n_blocks=n_blocks,
            block=block_size,
            n_layers=config.n_layers if isinstance(model, Decoder) else config.n_decoder_layers,
            n_kv_heads=config.n_kv_heads,
            d_head=config.d_head,
            n_cross_heads=[block.cross.n_kv_heads for block in stack.layers if block.cross is not None],
            device=self.device,
            dtype=dtype,
        )
        self.block_table = np.zeros((max_rows, table_width), np.int32)
        self.lengths = np.zeros(max_rows, np.int32)
        self.source_table = np.zeros((max_rows, source_width), np.int32)
        self.source_lengths = np.zeros(max_rows, np.int32)
        self.tokens = torch.zeros(max_rows, dtype=torch.long, device=self.device)
        self.has_drafts = False  # whether a row may continue the row before it
        self.has_argmax = False  # whether the last call put each row's likeliest next token in `tokens`
        self.has_paths = self.device.type == "cuda"
        self.paths: Int[Tensor, "R L"] | None = None  # while there are beams
        self.path_memory: Int[Tensor, "R L"] | None = None  # the same memory each time, because graphs hold its address
        score_dtype = torch.promote_types(dtype, torch.float32)
        self.scores = torch.zeros(max_rows, dtype=score_dtype, device=self.device)  # of beams
        self.tables_changed = self.rows_changed = True  # since the last copy to the device
        # A position bias needs the distance of every pair, for lengths that a graph does not know.
        captures = self.device.type == "cuda" and stack.positions.bias is None
        self.graphs = CudaGraphs(model, self.device) if captures else None
        self.device_tables = DeviceTables(self) if captures else None
        self.prompts = Prefill(model, self.pool, max_rows, self.graphs)
        self.native_step = NativeStep(model) if self.device.type == "cpu" else None
        self.kept_blocks = KeptBlocks(config.patterns[0], block_size) if config.patterns else None

    @property
    def model(self) -> Decoder | EncoderDecoder:
        model = self._model()
        assert model is not None, "an engine holds its runner's model"
        return model

    def assume_unchanged(self) -> AbstractContextManager[None]:
        """Inside, nobody changes the model between two steps: only the first one checks it."""
        return nullcontext() if self.native_step is None else self.native_step.assume_unchanged()

    def keep_rows(self, rows: abc.Sequence[int], *, has_beams: bool) -> None:
        """Keep only these rows, in this order; one may be named several times. `has_beams`: whether some are of a search."""
        n, at = len(rows), np.array(rows, np.int64)
        for table in (self.block_table, self.lengths, self.source_table, self.source_lengths):
            table[:n] = table[at]
            table[n : self.n] = 0
        kept = to_device(at, self.device)
        for tensor in (self.tokens, self.scores, *([] if self.paths is None else [self.paths])):
            tensor[:n] = tensor[kept]
        self.n = n
        self.paths = self.paths if has_beams else None
        self.tables_changed = self.rows_changed = True
        self.has_drafts = False

    def add_drafts(self, drafts: abc.Sequence[abc.Sequence[int]]) -> None:
        """Behind each row, one for each of its drafted tokens; until `keep_rows`. The block tables have room for them."""
        counts = [1 + len(draft) for draft in drafts]
        self.keep_rows(np.repeat(np.arange(self.n), counts).tolist(), has_beams=False)
        drafted = np.concatenate([np.arange(count) for count in counts])
        self.lengths[: self.n] += drafted
        ids = np.array([token for draft in drafts for token in draft])
        self.tokens[to_device(np.flatnonzero(drafted), self.device)] = to_device(ids, self.device)
        self.has_drafts = True

    def add_rows(self, sequences: abc.Sequence[Sequence]) -> None:
        """New rows for sequences whose prompts are in the cache: one each, or one for each beam."""
        for sequence in sequences:
            rows = slice(self.n, self.n + sequence.n_rows)
            self.block_table[rows, : len(sequence.blocks)] = sequence.blocks
            self.lengths[rows] = len(sequence.prompt)
            self.source_table[rows, : len(sequence.source_blocks)] = sequence.source_blocks
            self.source_lengths[rows] = sequence.n_source
            self.n = rows.stop
        self.tables_changed = self.rows_changed = True
        if self.paths is not None:
            self._set_paths(self.n - sum(sequence.n_rows for sequence in sequences))
        elif self.has_paths and any(sequence.n_rows > 1 for sequence in sequences):
            if self.path_memory is None:
                shape = self.max_rows, self.block_table.shape[1] * self.block_size
                self.path_memory = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.paths = self.path_memory
            self._set_paths(0)

    def _set_paths(self, first: int) -> None:
        """Paths of the rows from `first` on, as their block tables say."""
        assert self.paths is not None
        at = np.arange(int(self.lengths[first : self.n].max()))
        slots = self.block_table[first : self.n][:, at // self.block_size] * self.block_size + at % self.block_size
        self.paths[first : self.n, : len(at)] = to_device(slots.astype(np.int32), self.device)

    def copy_paths(self, rows: NDArray[np.int64], sources: NDArray[np.int64]) -> None:
        """Each of `rows` continues the tokens of the row in `sources`."""
        assert self.paths is not None
        to, of = to_device(np.stack([rows, sources]), self.device)
        self.paths[to] = self.paths[of]

    def copy_blocks(self, sources: BlockIds, targets: BlockIds) -> None:
        self.pool.copy(*(to_device(each.astype(np.int64), self.device) for each in (sources, targets)))

    def prefill(self, sequences: abc.Sequence[Sequence], T: int) -> Float[Tensor, "B V"]:
        """Compute the next T tokens of each prompt, or what is left of it; returns the logits after the last of them."""
        self.has_argmax = False
        return self.prompts.run(self.model, sequences, T)

    def decode(self, search: BeamSearchParams | None = None) -> Tensor:
        """One decode step: each row's last token goes through the model. Returns the logits of its next token, valid until the
        next step.

        With `search`, which is that of all rows, the beams are extended on the device, and what returns are the candidates for
        `Beams.advance`.
        """
        n = self.n
        self.has_argmax = True
        if self.graphs is not None and not self.graphs.is_hooked:
            out = self._replay(self.graphs, search)
        elif search is None and (logits := self._run_native_step()) is not None:
            out = logits
        else:
            self.has_argmax = False
            self.rows_changed = True  # the device's lengths were not raised
            out = self._run_step(search)
        self.lengths[:n] += 1
        return out

    def _run_native_step(self) -> Float[Tensor, "n V"] | None:
        """On a CPU the whole step in one call, for models that allow it; None for others."""
        if self.native_step is None or self.paths is not None:
            return None
        own, source = Table(self.block_table, self.lengths), Table(self.source_table, self.source_lengths)
        return self.native_step.run(self.tokens[: self.n], self.pool, own, source, self.has_drafts, reuse=True)

    def _run_step(self, search: BeamSearchParams | None) -> Tensor:
        """The step without a graph."""
        n = self.n
        longest = int(self.lengths[:n].max()) + 1
        table = to_device(self.block_table[:n, : -(-longest // self.block_size)], self.device)
        lengths = to_device(self.lengths[:n], self.device)
        used = -(-int(self.source_lengths[:n].max()) // self.block_size)
        source = to_device(self.source_table[:n, :used], self.device), to_device(self.source_lengths[:n], self.device)
        paths = None if self.paths is None else self.paths[:n, :longest]
        kept = None
        if self.kept_blocks is not None and paths is None:
            kept = to_device(self.kept_blocks.find(self.lengths[:n]), self.device)
        cache = PagedCache(self.pool, table, lengths, paths=paths, kept=kept)
        logits = self.step(self.tokens[:n], cache, *source)
        return logits if search is None else self._extend_beams(logits, search)

    def _replay(self, graphs: CudaGraphs, search: BeamSearchParams | None) -> Tensor:
        """The step by a CUDA graph for this number of rows, or of beams in groups."""
        tables, n, beams = self.device_tables, self.n, 1 if search is None else search.beams
        assert tables is not None
        tables.update(self)
        size = round_up(n // beams, self.max_rows // beams) * beams
        kind = self.paths is not None if search is None else (beams, search.processor.ends)
        changed = [self.tokens, self.scores, *([] if self.paths is None else [self.paths])]
        work = partial(self._captured_step, tables, size, search)
        out = graphs.run((size, kind), work, switch=tables.live, changed=changed)
        return out[:n] if search is None else out[:, : n // beams]

    def _captured_step(self, tables: DeviceTables, size: int, search: BeamSearchParams | None) -> Tensor:
        live, paths = tables.live[:size], None if self.paths is None else self.paths[:size]
        cache = PagedCache(self.pool, tables.blocks[:size], tables.lengths[:size], live=live, paths=paths)
        out = self.step(self.tokens[:size], cache, tables.source_blocks[:size], tables.source_lengths[:size])
        if search is None:
            self.tokens[:size] = out.argmax(-1)  # the next tokens of greedy rows; the sampler replaces the others
        else:
            out = self._extend_beams(out, search)
        tables.lengths[:size] += live
        return out

    def step(
        self,
        tokens: Int[Tensor, " n"],
        cache: PagedCache,
        source: Int[Tensor, "n s"],
        source_lengths: Int[Tensor, " n"],
    ) -> Float[Tensor, "n V"]:
        """One token of each row through the model, by the GPU's step if it computes this model, else by the plain forward."""
        model = self.model
        if isinstance(model, EncoderDecoder):
            cache.attach_source(BlockTable(source, source_lengths, self.block_size))
        states = gpu_step.run_model(model, tokens[:, None], cache)
        if states is None:
            memory: Any = (None,) if isinstance(model, EncoderDecoder) else ()
            states = model.states(tokens[:, None], *memory, cache=cache)
        return model.project(states)[:, 0]

    def _extend_beams(self, logits: Float[Tensor, "R V"], search: BeamSearchParams) -> Int[Tensor, "3 B n"]:
        """Extend the beams in the first rows: their scores, tokens and paths. Returns the candidates."""
        assert self.paths is not None
        R, n = len(logits), search.n_candidates
        grouped = (-1, search.beams)
        values, ids = (each.unflatten(0, grouped) for each in top_log_probs(logits, n))
        scores, tokens, parents, candidates = extend_on_device(
            values, ids, self.scores[:R].unflatten(0, grouped), search.processor.ends
        )
        self.scores[:R], self.tokens[:R] = scores.flatten(), tokens.flatten()
        firsts = torch.arange(0, R, search.beams, device=self.device)
        self.paths[:R] = self.paths[(firsts[:, None] + parents).flatten()]
        return candidates

    def start_beams(
        self, logits: Float[Tensor, "B V"], search: BeamSearchParams, rows: NDArray[np.int64]
    ) -> Int[Tensor, "3 B n"]:
        """The first tokens of the beams in these rows, from their prompts' logits. Returns the candidates."""
        best = top_log_probs(logits, search.n_candidates)
        values, ids = (each[:, None].expand(-1, search.beams, -1) for each in best)
        scores = torch.full(values.shape[:2], -math.inf, dtype=self.scores.dtype, device=self.device)
        scores[:, 0] = 0  # all beams start from the same prompt: only one may be extended
        scores, tokens, _, candidates = extend_on_device(values, ids, scores, search.processor.ends)
        at = to_device(rows, self.device)
        self.scores[at], self.tokens[at] = scores.flatten(), tokens.flatten()
        return candidates


class DeviceTables:
    """The runner's tables on the device, for graphs. A captured step raises the lengths of `live` rows itself."""

    def __init__(self, runner: ModelRunner) -> None:
        self.device, self.block_size = runner.device, runner.block_size
        tables = (runner.block_table, runner.lengths, runner.source_table, runner.source_lengths)
        self.blocks, self.lengths, self.source_blocks, self.source_lengths = (
            torch.zeros(table.shape, dtype=torch.int32, device=self.device) for table in tables
        )
        self.live = torch.zeros(runner.max_rows, dtype=torch.int32, device=self.device)

    def update(self, runner: ModelRunner) -> None:
        """Copy what changed on the host."""
        n = runner.n
        if runner.rows_changed:
            for ours, theirs in (
                (self.blocks, runner.block_table),
                (self.source_blocks, runner.source_table),
                (self.lengths, runner.lengths),
                (self.source_lengths, runner.source_lengths),
            ):
                ours.zero_()
                ours[:n] = to_device(theirs[:n], self.device)
            self.live.zero_()
            self.live[:n] = 1
        elif runner.tables_changed:
            used = -(-int(runner.lengths[:n].max() + 1) // self.block_size)
            self.blocks[:n, :used] = to_device(runner.block_table[:n, :used], self.device)
        runner.tables_changed = runner.rows_changed = False


def cache_dtype(weight: Tensor) -> torch.dtype:
    """The type of keys and values: under autocast its own, else that of the weights."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
