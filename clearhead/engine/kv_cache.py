"""The paged KV cache: keys and values in blocks of one pool, found by a block table (Kwon et al. 2023, "PagedAttention").

A plain `Cache` reserves the longest text for each row. Here memory is given out a block of some tokens at a time: a row's token at
position p lies in block `table[row, p // block]`, at slot `p % block`. Two rows whose tables name the same block share it (a common
prefix, the beams of a search). allocator.py owns the blocks. Beams on a GPU share token by token: each writes to blocks of its own,
and a path names the slot of each token of its text.

Block 0 is scratch: what must not be kept is written there.

In the plain forward a single query a row reads the blocks by a kernel; otherwise keys are gathered, as a `Cache` would hold them.
The fast steps (native_step.py, gpu_step.py) read the pool themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead import kernels
from clearhead.engine.kept_blocks import NONE
from clearhead.layers.cache import Keys, StoredKeys
from clearhead.layers.masks import ABSENT, Mask

SCRATCH = 0


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Each row's blocks in the order of its tokens, and how many tokens it has. With `block=1` the table names each token's slot:
    block * slots + slot."""

    table: Int[Tensor, "B m"]
    counts: Int[Tensor, " B"]
    block: int  # tokens for one entry of the table


class Pool:
    """The memory of all layers: (block, layer, k or v, head, slot, width), so that a block is one piece, copied at once.

    `n_cross_heads` are the key heads of each layer's cross-attention; those of pruned layers use the first part of the room.
    """

    def __init__(
        self,
        *,
        n_blocks: int,
        block: int,
        n_layers: int,
        n_kv_heads: int,
        d_head: int,
        n_cross_heads: Sequence[int] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.block = block
        self.memory = _zeros((n_blocks, n_layers, 2, n_kv_heads, block, d_head), device, dtype)
        self.layers = [(self.memory[:, layer, 0], self.memory[:, layer, 1]) for layer in range(n_layers)]
        self.n_cross_heads = list(n_cross_heads) or [n_kv_heads] * n_layers

    def copy(self, sources: Int[Tensor, " n"], targets: Int[Tensor, " n"]) -> None:
        self.memory.index_copy_(0, targets, self.memory.index_select(0, sources))


class PagedCache:
    """Some rows of a pool, for one call of a model.

    `counts` are the tokens that each row holds before the call. With `fresh`, none holds any: attention then takes the call's own
    keys, and they are only stored. With several tokens a row, the call's `mask` says which are real; padding is at the end. Only
    `live` rows (1, not 0) gain a token: the others pad a batch to a recorded size. `paths`, if given, name the slot of each token
    of a row; the table then only says where the next one is written. `packed` is the mask of prompts that the call reads in one row
    without padding: tables and counts are then those of each token. `kept`, if given, are the entries of each row's table that are
    read (KeptBlocks).
    """

    length = 0  # the engine has checked lengths

    def __init__(
        self,
        pool: Pool,
        table: Int[Tensor, "B m"],
        counts: Int[Tensor, " B"],
        *,
        fresh: bool = False,
        live: Int[Tensor, " B"] | None = None,
        paths: Int[Tensor, "B L"] | None = None,
        packed: Mask | None = None,
        kept: Int[Tensor, "B w"] | None = None,
    ) -> None:
        self.pool, self.table, self.counts, self.fresh, self.live = pool, table, counts, fresh, live
        self.paths, self.packed, self.kept = paths, packed, kept
        self.source: BlockTable | None = None  # an encoder-decoder's source
        self.reads = False  # whether this call reads the source
        self.layers = [PagedLayer(self, k, v, n) for (k, v), n in zip(pool.layers, pool.n_cross_heads, strict=True)]
        self.held: BlockTable | None = None  # the keys of this call, once placed
        self.blocks: Int[Tensor, "B T"] = table[:, :0]
        self.slots: Int[Tensor, "B T"] = table[:, :0]
        self._memory_mask: Mask | None = None

    def attach_source(self, source: BlockTable) -> None:
        """The source is already in these blocks."""
        self.source = source

    def read_source(self, source: BlockTable) -> None:
        """This call reads the source, and stores it in these blocks."""
        self.source, self.reads = source, True

    @property
    def memory_mask(self) -> Mask | None:
        if self._memory_mask is None and self.source is not None and not self.reads:
            self._memory_mask = Mask(keys=key_positions(self.source))
        return self._memory_mask

    @memory_mask.setter
    def memory_mask(self, mask: Mask | None) -> None:
        self._memory_mask = mask

    def check(self, batch: int, T: int) -> None:
        assert len(self.table) == (batch if self.packed is None else T), (
            "one row of the table for each row of the batch"
        )

    def place(self, T: int, real: Bool[Tensor, "B T"] | None) -> tuple[Int[Tensor, "*B T"], Mask]:
        """Positions of the next T tokens, and a mask with the positions of the keys that `extend` returns."""
        if self.packed is not None:
            blocks, slots = find(self.table, self.counts[:, None], self.pool.block, None)
            self.blocks, self.slots = blocks.T, slots.T
            return self.counts[None], self.packed
        at = self.counts[:, None] + torch.arange(T, device=self.counts.device)
        self.blocks, self.slots = find(self.table, at, self.pool.block, real)
        if self.fresh:
            return at[0], Mask()
        self.held = self.append(T)
        keys = key_positions(self.held)
        if self.kept is not None:
            self.held, keys = select(self.held, keys, self.kept)
        return at, Mask(queries=at, keys=keys)

    def append(self, T: int) -> BlockTable:
        """The block table with the next T tokens; where there are paths, the new tokens' slots are added to them."""
        after = self.counts + (T if self.live is None else self.live)
        if self.paths is None:
            return BlockTable(self.table, after, self.pool.block)
        at = self.counts[:, None] + torch.arange(T, device=self.counts.device)
        blocks, slots = find(self.table, at, self.pool.block, None)
        self.paths.scatter_(1, at.long(), (blocks * self.pool.block + slots).int())
        return BlockTable(self.paths, after, 1)

    def advance(self, queries: Int[Tensor, "*B T"]) -> None:
        """Nothing: the caller counts."""


class BlockKeys:
    """One layer's keys, or values, of some rows: where they lie in the pool."""

    def __init__(self, pool: Float[Tensor, "n K b E"], where: BlockTable) -> None:
        self.pool, self.where = pool, where

    def gather(self) -> Float[Tensor, "B K S E"]:
        return gather(self.pool, self.where)

    def attend(
        self, q: Float[Tensor, "B H 1 E"], values: StoredKeys, scale: float, window: int
    ) -> Float[Tensor, "B H 1 E"] | None:
        assert isinstance(values, BlockKeys)
        table, counts, each = self.where.table, self.where.counts, self.where.block == 1
        out = kernels.paged_attention(q[:, :, 0], self.pool, values.pool, table, counts, scale, window, each=each)
        return None if out is None else out[:, :, None]


class PagedLayer:
    """One layer's keys and values, in the blocks of the pool."""

    def __init__(
        self, call: PagedCache, k: Float[Tensor, "n K b E"], v: Float[Tensor, "n K b E"], n_cross_heads: int
    ) -> None:
        self.call, self.k, self.v, self.n_cross_heads = call, k, v, n_cross_heads

    def extend(self, k: Float[Tensor, "B K T E"], v: Float[Tensor, "B K T E"]) -> tuple[Keys, Keys]:
        """Store these; return the keys and values that their queries may attend to: these alone, or all of the row."""
        call, (pool_k, pool_v) = self.call, self.heads(k.shape[1])
        one = k.shape[2] == 1 and call.packed is None
        if not (one and kernels.store(k[:, :, 0], v[:, :, 0], pool_k, pool_v, call.table, call.counts)):
            pool_k[call.blocks, :, call.slots] = k.transpose(1, 2).to(pool_k.dtype)
            pool_v[call.blocks, :, call.slots] = v.transpose(1, 2).to(pool_v.dtype)
        if call.held is None:
            return k, v
        return BlockKeys(pool_k, call.held), BlockKeys(pool_v, call.held)

    def heads(self, n: int) -> tuple[Float[Tensor, "n K b E"], Float[Tensor, "n K b E"]]:
        """The pool's room for n key heads: all, if none was pruned."""
        return (self.k, self.v) if n == self.k.shape[1] else (self.k[:, :n], self.v[:, :n])

    @property
    def cross(self) -> tuple[Keys, Keys] | None:
        """The source's keys and values, once read."""
        if self.call.reads or self.call.source is None:
            return None
        k, v = self.heads(self.n_cross_heads)
        return BlockKeys(k, self.call.source), BlockKeys(v, self.call.source)

    @cross.setter
    def cross(self, read: tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S E"]]) -> None:
        source, S = self.call.source, read[0].shape[2]
        assert source is not None, "a source is read into blocks of its own"
        at = torch.arange(S, device=source.counts.device).expand(len(source.counts), -1)
        blocks, slots = find(source.table, at, self.call.pool.block, at < source.counts[:, None])
        for pool, x in zip(self.heads(read[0].shape[1]), read, strict=True):
            pool[blocks, :, slots] = x.transpose(1, 2).to(pool.dtype)


def _zeros(shape: tuple[int, ...], device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """Zeros: memory that was never written is multiplied by a weight of 0, which must not meet a NaN.

    On the CPU the operating system gives them out as they are used; torch would write them all at once.
    """
    if torch.device(device or "cpu").type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    n_bytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    return torch.from_numpy(np.zeros(n_bytes, np.uint8)).view(dtype or torch.get_default_dtype()).view(shape)


def find(
    table: Int[Tensor, "B m"], at: Int[Tensor, "B T"], block: int, real: Bool[Tensor, "B T"] | None
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """The block and the slot of each position; the scratch block for tokens that are not real."""
    at = at.long()
    blocks = table.gather(1, (at // block).clamp(max=table.shape[1] - 1)).long()
    return blocks if real is None else torch.where(real, blocks, SCRATCH), at % block


def gather(held: Float[Tensor, "n K b E"], where: BlockTable) -> Float[Tensor, "B K S E"]:
    """Each row's blocks side by side, as a `Cache` would hold them."""
    if where.block == 1:
        at, slots = where.table.long(), held.shape[2]
        return held[at // slots, :, at % slots].transpose(1, 2)
    return held[where.table.long()].transpose(1, 2).flatten(2, 3)


def key_positions(where: BlockTable) -> Int[Tensor, "B S"]:
    """The positions of the keys that `gather` returns; ABSENT after the last token of a row."""
    at = torch.arange(where.table.shape[1] * where.block, device=where.table.device)
    return torch.where(at < where.counts[:, None], at, ABSENT)


def select(
    where: BlockTable, keys: Int[Tensor, "B S"], kept: Int[Tensor, "B w"]
) -> tuple[BlockTable, Int[Tensor, "B s"]]:
    """Some entries of each row's table, and the positions of the keys in them; NONE stands for no entry."""
    at = kept.clamp(min=0).long()
    places = keys.unflatten(1, (-1, where.block)).gather(1, at[..., None].expand(-1, -1, where.block))
    places = torch.where(kept[..., None] == NONE, ABSENT, places).flatten(1)
    return BlockTable(where.table.gather(1, at), where.counts, where.block), places
