"""Reading prompts, and the sources of an encoder-decoder: keys and values go into blocks, and the last token's logits come back.

Whole prompts are read in one of three ways. Small ones on a GPU are padded to one of a few sizes and the work is replayed. Large
ones of a decoder are packed into one row, where a kernel goes from text to text. The others are padded to the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from clearhead.engine import gpu_step
from clearhead.engine.batches import pad, send
from clearhead.engine.cuda_graphs import Recordings, padded
from clearhead.engine.kv_cache import BlockTable, PagedCache, Pool
from clearhead.engine.sequence import Member
from clearhead.layers.masks import Mask, packed_at
from clearhead.models import Decoder, EncoderDecoder
from clearhead.models.encoder_decoder import source_mask

RECORDED = 2**22  # numbers of the residual stream: up to here the GPU is faster than the CPU that starts its kernels


class Reader:
    """A model and the pool that it reads into; at most `max_rows` prompts at once."""

    def __init__(
        self, model: Decoder | EncoderDecoder, pool: Pool, max_rows: int, recordings: Recordings | None
    ) -> None:
        self.model, self.pool, self.block, self.max_rows = model, pool, pool.block, max_rows
        weight, config = next(model.parameters()), model.config
        self.device, self.dtype = weight.device, weight.dtype
        self.recordings = recordings
        self.sheets: dict[tuple[int, int, int], Tensor] = {}  # what recordings read from
        self.packs = (
            isinstance(model, Decoder)
            and self.device.type == "cuda"
            and pool.memory.dtype == self.dtype
            and self.dtype in (torch.bfloat16, torch.float16)
            and model.positions.bias is None
            and model.positions.max_len is None
            and not config.window
            and config.kernel in ("auto", "fused")
        )

    def read(self, members: Sequence[Member], T: int) -> Float[Tensor, "B V"]:
        """The next T tokens of each one's prompt, or what is left of it; logits after the last of them."""
        if any(m.n_read or m.n_left > T or isinstance(m.ticket.request.source, Tensor) for m in members):
            return self._read_pieces(members, T)
        longest, S = max(m.n_left for m in members), max(m.n_source for m in members)
        if self.recordings is not None and not self.recordings.is_watched:
            config, R = self.model.config, padded(len(members), self.max_rows)
            wide, deep = min(_length(longest), config.max_len), min(_length(S), config.max_source_len)
            if R * max(wide, deep) * config.d_model <= RECORDED:
                return self._replay(self.recordings, members, R, wide, deep)
        if self.packs:
            return self._read_packed(members)
        sheet = send(lay_sheet(members, len(members), longest, S, self.block), self.device)
        return self._read_sheet(sheet, longest, S, all(m.n_source == S for m in members))

    def _replay(
        self, recordings: Recordings, members: Sequence[Member], R: int, T: int, S: int
    ) -> Float[Tensor, "B V"]:
        given = lay_sheet(members, R, T, S, self.block)
        if (R, T, S) not in self.sheets:
            self.sheets[R, T, S] = torch.zeros(given.shape, dtype=torch.int32, device=self.device)
        sheet, is_even = self.sheets[R, T, S], all(m.n_source == S for m in members)
        sheet.copy_(send(given, self.device))
        work = partial(self._read_sheet, sheet, T, S, is_even)
        return recordings.run(("read", R, T, S, is_even), work, told=sheet)[: len(members)]

    def _read_sheet(self, sheet: Int[Tensor, "B _"], T: int, S: int, is_even: bool) -> Float[Tensor, "B V"]:
        """Whole prompts as `lay_sheet` lays them; `is_even`: all sources are S long."""
        model, B = self.model, len(sheet)
        tokens, table, counts, source, pages, n_source = sheet.split(_widths(T, S, self.block), 1)
        real = torch.arange(T, device=self.device) < counts
        cache = PagedCache(self.pool, table, torch.zeros_like(counts[:, 0]), fresh=True)
        if isinstance(model, EncoderDecoder):
            cache.read_source(BlockTable(pages, n_source[:, 0], self.block))
            # Rows that only pad have no source; they look at one token all the same, as nothing can not be looked at.
            there = None if is_even else torch.arange(S, device=self.device) < n_source.clamp(min=1)
            memory = model.encode(source.long(), there)
            states = model.states(tokens.long(), memory, source_mask(there), mask=real, cache=cache)
        else:
            states = model.states(tokens.long(), real, cache=cache)
        last = (counts[:, 0] - 1).clamp(min=0)  # rows that only pad have no token
        return model.project(states[torch.arange(B, device=self.device), last][:, None])[:, 0]

    def _read_packed(self, members: Sequence[Member]) -> Float[Tensor, "B V"]:
        """Prompts one after the other in one row, each token with a row of the table of its own."""
        assert isinstance(self.model, Decoder)
        lengths = np.array([member.n_left for member in members])
        numbers = np.array([*(token for member in members for token in member.prompt), 0, *lengths.cumsum()], np.int32)
        total = int(lengths.sum())
        tokens, starts = send(numbers, self.device).split([total, len(members) + 1])
        mask, positions = packed_at(starts, total, int(lengths.max()))
        table = self._lay([member.row for member in members])
        cache = PagedCache(self.pool, table[mask.documents[0][0]], positions.int(), fresh=True, packed=mask)
        states = gpu_step.run_model(self.model, tokens[None].long(), cache)
        if states is None:
            states = self.model.states(tokens[None].long(), cache=cache)
        return self.model.project(states[0, starts[1:] - 1][:, None])[:, 0]

    def _read_pieces(self, members: Sequence[Member], T: int) -> Float[Tensor, "B V"]:
        """The next T tokens of prompts of which something was read, or whose source is sound."""
        starts = [member.n_read for member in members]
        rows = [member.prompt[start : start + T] for member, start in zip(members, starts, strict=True)]
        tokens, real = pad(rows, self.device)
        table = self._lay([member.row for member in members])
        cache = PagedCache(self.pool, table, send(np.array(starts), self.device), fresh=not any(starts))
        if isinstance(self.model, EncoderDecoder):
            counts = send(np.array([member.n_source for member in members]), self.device)
            cache.read_source(BlockTable(self._lay([member.source for member in members]), counts, self.block))
            memory, memory_mask = self._encode(members)
            states = self.model.states(tokens, memory, memory_mask, mask=real, cache=cache)
        else:
            states = self.model.states(tokens, real, cache=cache)
        last = send(np.array([len(row) - 1 for row in rows]), self.device)
        states = states[torch.arange(len(rows), device=self.device), last]
        return self.model.project(states[:, None])[:, 0]

    def _encode(self, members: Sequence[Member]) -> tuple[Float[Tensor, "B S D"], Mask]:
        """What the encoder makes of their sources."""
        model = self.model
        assert isinstance(model, EncoderDecoder)
        sound: list[Tensor] = []
        texts: list[list[int]] = []
        for member in members:
            source = member.ticket.request.source
            if isinstance(source, Tensor):
                sound.append(source)
            elif source is not None:
                texts.append(list(source))
        if sound:
            return model.encode(torch.stack(sound).to(self.device, self.dtype)), source_mask(None)
        source, real = pad(texts, self.device)
        return model.encode(source, real), source_mask(real)

    def _lay(self, rows: Sequence[NDArray[np.int32]]) -> Int[Tensor, "B m"]:
        """Rows of blocks, side by side."""
        table = np.zeros((len(rows), max(map(len, rows))), np.int32)
        for at, row in enumerate(rows):
            table[at, : len(row)] = row
        return send(table, self.device)


def lay_sheet(members: Sequence[Member], R: int, T: int, S: int, block: int) -> NDArray[np.int32]:
    """All that reading whole prompts takes, in one piece: of each its tokens, blocks and their number; its source's likewise."""
    widths = _widths(T, S, block)
    sheet = np.zeros((R, sum(widths)), np.int32)
    starts = np.cumsum([0, *widths]).tolist()
    for row, member in zip(sheet, members, strict=False):
        source = member.ticket.request.source
        told = (member.prompt, member.row, [len(member.prompt)], source, member.source, [member.n_source])
        for start, numbers in zip(starts, told, strict=False):
            if numbers is not None and len(numbers):
                row[start : start + len(numbers)] = numbers
    return sheet


def _widths(T: int, S: int, block: int) -> list[int]:
    return [T, -(-T // block), 1, S, -(-S // block), 1]


def _length(n: int) -> int:
    """The length that is recorded for n: of two or more 16 at least, then as numbers of rows are."""
    return n if n <= 1 else max(16, padded(n, 2 * n))
