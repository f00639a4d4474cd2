"""Prefill: prompts, and the sources of an encoder-decoder, go through the model into blocks of the KV cache.

Whole prompts are computed in one of three ways. Small ones on a GPU are padded to one of a few sizes, and a CUDA graph is
replayed. Large ones of a decoder are packed into one row, where attention goes from text to text. The others are padded to the
longest. A long prompt may also come in several pieces (chunked prefill).
"""

from __future__ import annotations

from collections import abc
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from clearhead.engine import gpu_step
from clearhead.engine.cuda_graphs import CudaGraphs, round_up
from clearhead.engine.kv_cache import BlockTable, PagedCache, Pool
from clearhead.engine.request import Memory
from clearhead.engine.sequence import Sequence
from clearhead.engine.transfer import to_device
from clearhead.layers.masks import Mask
from clearhead.layers.packing import packed_at
from clearhead.models import Decoder, EncoderDecoder
from clearhead.models.encoder_decoder import source_mask
from clearhead.quantization.model_weights import example_weight
from clearhead.sampling.token_ids import pad

# Numbers of the residual stream. Up to here a GPU computes faster than the CPU starts its kernels, so that graphs pay.
MAX_GRAPH_NUMBERS = 2**22

Writer = Decoder | EncoderDecoder


class Prefill:
    """Computes at most `max_rows` prompts at once into a pool. The model is passed in, and not kept."""

    def __init__(self, model: Writer, pool: Pool, max_rows: int, graphs: CudaGraphs | None) -> None:
        self.pool, self.block_size, self.max_rows, self.graphs = pool, pool.block, max_rows, graphs
        weight = example_weight(model)
        self.device, self.dtype = weight.device, weight.dtype
        self.inputs: dict[tuple[int, int, int], Tensor] = {}  # the memory that graphs read from
        self.recorded: list[tuple[int, int]] = []  # numbers and lengths of prompts, if no others are to be recorded
        self.packs = (
            isinstance(model, Decoder)
            and self.device.type == "cuda"
            and pool.memory.dtype == self.dtype
            and self.dtype in (torch.bfloat16, torch.float16)
            and model.positions.bias is None
            and model.positions.max_len is None
            and not (model.config.window or model.config.sparsity)
            and model.config.kernel in ("auto", "fused")
        )

    def run(self, model: Writer, sequences: abc.Sequence[Sequence], T: int) -> Float[Tensor, "B V"]:
        """Compute the next T tokens of each prompt, or what is left of it; returns the logits after the last of them."""
        if any(
            s.n_prefilled or s.n_to_prefill > T or isinstance(s.ticket.request.source, Tensor | Memory)
            for s in sequences
        ):
            return self._run_chunks(model, sequences, T)
        longest, S = max(s.n_to_prefill for s in sequences), max(s.n_source for s in sequences)
        if self.graphs is not None and not self.graphs.is_hooked:
            size = self._graph_size(model, len(sequences), longest, S)
            if size is not None:
                return self._replay(self.graphs, model, sequences, *size)
        if self.packs:
            return self._run_packed(model, sequences)
        inputs = to_device(stack_inputs(sequences, len(sequences), longest, S, self.block_size), self.device)
        return self._run_padded(model, inputs, longest, S, all(s.n_source == S for s in sequences))

    def _graph_size(self, model: Writer, n: int, longest: int, S: int) -> tuple[int, int, int] | None:
        """The rows, tokens and source tokens that n prompts are padded to; None: no graph is worth it, or none is recorded."""
        if self.recorded:
            fitting = [(R, T) for R, T in self.recorded if n <= R and longest <= T]
            return (*min(fitting, key=lambda size: size[0] * size[1]), 0) if fitting else None
        config, R = model.config, round_up(n, self.max_rows)
        width, source_width = min(_round_length(longest), config.max_len), min(_round_length(S), config.max_source_len)
        is_small = R * max(width, source_width) * config.d_model <= MAX_GRAPH_NUMBERS
        return (R, width, source_width) if is_small else None

    def _replay(
        self, graphs: CudaGraphs, model: Writer, sequences: abc.Sequence[Sequence], R: int, T: int, S: int
    ) -> Float[Tensor, "B V"]:
        array = stack_inputs(sequences, R, T, S, self.block_size)
        if (R, T, S) not in self.inputs:
            self.inputs[R, T, S] = torch.zeros(array.shape, dtype=torch.int32, device=self.device)
        inputs, is_even = self.inputs[R, T, S], all(s.n_source == S for s in sequences)
        inputs.copy_(to_device(array, self.device))
        work = partial(self._run_padded, model, inputs, T, S, is_even)
        return graphs.run(("prefill", R, T, S, is_even), work, switch=inputs)[: len(sequences)]

    def _run_padded(
        self, model: Writer, inputs: Int[Tensor, "B _"], T: int, S: int, is_even: bool
    ) -> Float[Tensor, "B V"]:
        """Whole prompts, from `stack_inputs`; `is_even`: all sources are S long."""
        tokens, table, counts, source, source_table, n_source = inputs.split(_widths(T, S, self.block_size), 1)
        real = torch.arange(T, device=self.device) < counts
        cache = PagedCache(self.pool, table, torch.zeros_like(counts[:, 0]), fresh=True)
        if isinstance(model, EncoderDecoder):
            cache.read_source(BlockTable(source_table, n_source[:, 0], self.block_size))
            # Rows of padding have no source. They attend to one token all the same: no row may attend to nothing.
            there = None if is_even else torch.arange(S, device=self.device) < n_source.clamp(min=1)
            memory = model.encode(source.long(), there)
            states = model.states(tokens.long(), memory, source_mask(there), mask=real, cache=cache)
        else:
            states = model.states(tokens.long(), real, cache=cache)
        last = (counts[:, 0] - 1).clamp(min=0)  # rows of padding have no token
        return model.project(states[torch.arange(len(inputs), device=self.device), last][:, None])[:, 0]

    def _run_packed(self, model: Writer, sequences: abc.Sequence[Sequence]) -> Float[Tensor, "B V"]:
        """Whole prompts one after the other in one row; each token has its own row of the block table."""
        assert isinstance(model, Decoder)
        lengths = np.array([s.n_to_prefill for s in sequences])
        numbers = np.array([*(token for s in sequences for token in s.prompt), 0, *lengths.cumsum()], np.int32)
        total = int(lengths.sum())
        tokens, starts = to_device(numbers, self.device).split([total, len(sequences) + 1])
        mask, positions = packed_at(starts, total, int(lengths.max()))
        table = self._block_table([s.blocks for s in sequences])
        cache = PagedCache(self.pool, table[mask.documents[0][0]], positions.int(), fresh=True, packed=mask)
        states = gpu_step.run_model(model, tokens[None].long(), cache)
        if states is None:
            states = model.states(tokens[None].long(), cache=cache)
        return model.project(states[0, starts[1:] - 1][:, None])[:, 0]

    def _run_chunks(self, model: Writer, sequences: abc.Sequence[Sequence], T: int) -> Float[Tensor, "B V"]:
        """The next T tokens of prompts that are partly computed, or whose source is sound."""
        starts = [s.n_prefilled for s in sequences]
        rows = [s.prompt[start : start + T] for s, start in zip(sequences, starts, strict=True)]
        tokens, real = self._pad(rows)
        table = self._block_table([s.blocks for s in sequences])
        cache = PagedCache(self.pool, table, to_device(np.array(starts), self.device), fresh=not any(starts))
        if isinstance(model, EncoderDecoder):
            counts = to_device(np.array([s.n_source for s in sequences]), self.device)
            cache.read_source(
                BlockTable(self._block_table([s.source_blocks for s in sequences]), counts, self.block_size)
            )
            memory, memory_mask = self._encode(model, sequences)
            states = model.states(tokens, memory, memory_mask, mask=real, cache=cache)
        else:
            states = model.states(tokens, real, cache=cache)
        last = to_device(np.array([len(row) - 1 for row in rows]), self.device)
        states = states[torch.arange(len(rows), device=self.device), last]
        return model.project(states[:, None])[:, 0]

    def _encode(self, model: EncoderDecoder, sequences: abc.Sequence[Sequence]) -> tuple[Float[Tensor, "B S D"], Mask]:
        """The encoder's output for their sources, and its mask."""
        sound: list[Tensor] = []
        read: list[Tensor] = []
        texts: list[list[int]] = []
        for sequence in sequences:
            source = sequence.ticket.request.source
            if isinstance(source, Tensor):
                sound.append(source)
            elif isinstance(source, Memory):
                read.append(source.states)
            elif source is not None:
                texts.append(list(source))
        if sound:
            return model.encode(torch.stack(sound).to(self.device, self.dtype)), source_mask(None)
        if read:
            return torch.stack(read).to(self.device, self.dtype), source_mask(None)
        source, real = self._pad(texts)
        return model.encode(source, real), source_mask(real)

    def _pad(self, rows: list[list[int]]) -> tuple[Tensor, Tensor | None]:
        """The rows padded on the device, and which tokens are real; None: all."""
        tokens, real = pad(rows)
        return to_device(tokens, self.device), None if real.all() else to_device(real, self.device)

    def _block_table(self, rows: list[NDArray[np.int32]]) -> Int[Tensor, "B m"]:
        return to_device(pad(rows)[0].astype(np.int32), self.device)


def stack_inputs(sequences: abc.Sequence[Sequence], R: int, T: int, S: int, block_size: int) -> NDArray[np.int32]:
    """All inputs of whole prompts in one array, which is one copy to the device: for each its tokens, blocks and their number,
    then those of its source. Padded to R rows, T tokens and S source tokens."""
    widths = _widths(T, S, block_size)
    inputs = np.zeros((R, sum(widths)), np.int32)
    starts = np.cumsum([0, *widths]).tolist()
    for row, s in zip(inputs, sequences, strict=False):
        source = s.ticket.request.source
        assert not isinstance(source, Memory)  # computed in chunks
        parts = (s.prompt, s.blocks, [len(s.prompt)], source, s.source_blocks, [s.n_source])
        for start, numbers in zip(starts, parts, strict=False):
            if numbers is not None and len(numbers):
                row[start : start + len(numbers)] = numbers
    return inputs


def _widths(T: int, S: int, block_size: int) -> list[int]:
    return [T, -(-T // block_size), 1, S, -(-S // block_size), 1]


def _round_length(n: int) -> int:
    """The length that is captured for n: n itself up to 1, then at least 16, rounded up as numbers of rows are."""
    return n if n <= 1 else max(16, round_up(n, 2 * n))
