"""Keys and values in blocks of one pool, found by a table: texts of any length share memory, and pieces of it.

A `Cache` is one piece of memory a row, as long as the longest text may become. Here memory is given out a block of some tokens
at a time: a row's token at position p lies in block `table[row, p // block]`, at slot `p % block`. Two rows whose tables name
the same block share it (a common beginning, the beams of a search). Who owns which block is `generation/`'s business.
Beams on a GPU share token by token: each writes to blocks of its own, and a path says where each token of its text lies.

Block 0 belongs to nobody: what must not be kept is written there.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.kernels import native
from clearhead.layers.cache import Cache, LayerCache
from clearhead.layers.linear import has_triton
from clearhead.layers.masks import ABSENT, Mask, Pages

NOBODYS = 0


class Pool:
    """The memory of all layers: (block, layer, k or v, head, slot, width), so that a block is one piece, copied at once."""

    def __init__(
        self,
        *,
        n_blocks: int,
        block: int,
        n_layers: int,
        n_kv_heads: int,
        d_head: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.block = block
        self.memory = _zeros((n_blocks, n_layers, 2, n_kv_heads, block, d_head), device, dtype)
        self.layers = [(self.memory[:, layer, 0], self.memory[:, layer, 1]) for layer in range(n_layers)]

    def copy(self, sources: Int[Tensor, " n"], targets: Int[Tensor, " n"]) -> None:
        self.memory.index_copy_(0, targets, self.memory.index_select(0, sources))


class PagedCache:
    """Some rows' share of a pool for one call of a model: what a `Cache` is to rows with memory of their own.

    `counts` are the tokens that each row holds before the call. With `fresh`, none holds any: attention then looks at the
    call's own keys, and they are only kept. Of several tokens a row the call's `mask` says which are real; padding stands at
    the end. `source` is where an encoder-decoder's source lies; after `read`, this call reads it, and keeps it there. `live`
    rows, if not all, are those that are there: the others pad a batch to a size that was prepared for. `paths`, if given, say
    where each token of a row lies, the table only where its next one is put. `packed` is the mask of texts that the call reads
    in one row, without padding: tables and counts are then each token's own.
    """

    length = 0  # the engine has checked lengths; the model need not

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
    ) -> None:
        self.pool, self.table, self.counts, self.fresh, self.live = pool, table, counts, fresh, live
        self.paths, self.packed = paths, packed
        self.source: Pages | None = None
        self.reads = False
        self.memory_mask: Mask | None = None
        self.layers = [PagedLayer(self, k, v) for k, v in pool.layers]
        self.blocks: Int[Tensor, "B T"] = table[:, :0]
        self.slots: Int[Tensor, "B T"] = table[:, :0]

    def look_at(self, source: Pages) -> None:
        """This source was read into these blocks."""
        self.source, self.memory_mask = source, Mask(pages=source)

    def read(self, source: Pages) -> None:
        """This call reads the source, and keeps it in these blocks."""
        self.source, self.reads = source, True

    def check(self, batch: int, T: int) -> None:
        assert len(self.table) == (batch if self.packed is None else T), "one row of the table a row of the batch"

    def place(self, T: int, real: Bool[Tensor, "B T"] | None) -> tuple[Int[Tensor, "*B T"], Mask]:
        """Where the next T tokens stand, and what they may look at."""
        if self.packed is not None:
            found = find(self.table, self.counts[:, None], self.pool.block, None)
            self.blocks, self.slots = found[0].T, found[1].T
            return self.counts[None], self.packed
        at = self.counts[:, None] + torch.arange(T, device=self.counts.device)
        if T > 1 or not at.is_cuda or not has_triton():  # one token on a GPU finds its place itself
            self.blocks, self.slots = find(self.table, at, self.pool.block, real)
        if self.fresh:
            return at[0], Mask()
        after = self.counts + (T if self.live is None else self.live)
        if self.paths is None:
            return at, Mask(queries=at, pages=Pages(self.table, after, self.pool.block))
        blocks, slots = find(self.table, at, self.pool.block, None)
        self.paths.scatter_(1, at.long(), (blocks * self.pool.block + slots).int())
        return at, Mask(queries=at, pages=Pages(self.paths, after, 1))

    def advance(self, queries: Int[Tensor, "*B T"]) -> None:
        """Nothing: the caller counts."""


class PagedLayer:
    """One layer's keys and values: those of all rows, in blocks."""

    def __init__(self, call: PagedCache, k: Float[Tensor, "n K b E"], v: Float[Tensor, "n K b E"]) -> None:
        self.call, self.k, self.v = call, k, v

    def extend(self, k: Float[Tensor, "B K T E"], v: Float[Tensor, "B K T E"]) -> tuple[Tensor, Tensor]:
        """Store these; return what their queries may look at: themselves, or all blocks, and the mask knows which."""
        pool_k, pool_v = self._share(k.shape[1])
        self._write(k, v, pool_k, pool_v)
        return (k, v) if self.call.fresh else (pool_k, pool_v)

    def _share(self, n_kv_heads: int) -> tuple[Tensor, Tensor]:
        """The room of an attention's heads: all, if none was pruned."""
        return (self.k, self.v) if n_kv_heads == self.k.shape[1] else (self.k[:, :n_kv_heads], self.v[:, :n_kv_heads])

    def _write(self, k: Tensor, v: Tensor, pool_k: Tensor, pool_v: Tensor) -> None:
        if k.shape[2] == 1 and k.is_cuda and has_triton():
            from clearhead.kernels.gpu import store

            store(k[:, :, 0], v[:, :, 0], pool_k, pool_v, self.call.table, self.call.counts)
        elif k.shape[2] == 1 and k.dtype == pool_k.dtype == torch.float32 and not k.is_cuda and native.is_there():
            native.store(k[:, :, 0], v[:, :, 0], pool_k, pool_v, self.call.table, self.call.counts)
        else:
            pool_k[self.call.blocks, :, self.call.slots] = k.transpose(1, 2).to(pool_k.dtype)
            pool_v[self.call.blocks, :, self.call.slots] = v.transpose(1, 2).to(pool_v.dtype)

    @property
    def cross(self) -> tuple[Tensor, Tensor] | None:
        """The source's keys and values, once read."""
        return None if self.call.reads or self.call.source is None else (self.k, self.v)

    @cross.setter
    def cross(self, read: tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S E"]]) -> None:
        pages, S = self.call.source, read[0].shape[2]
        assert pages is not None, "a source is read into blocks of its own"
        at = torch.arange(S, device=pages.counts.device).expand(len(pages.counts), -1)
        blocks, slots = find(pages.table, at, self.call.pool.block, at < pages.counts[:, None])
        for pool, x in zip(self._share(read[0].shape[1]), read, strict=True):
            pool[blocks, :, slots] = x.transpose(1, 2).to(pool.dtype)


def _zeros(shape: tuple[int, ...], device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """Zeros: what was never written is multiplied by a weight of 0, which must not meet a NaN.

    On the CPU the operating system gives them out as they are used; torch would write them all at once.
    """
    if torch.device(device or "cpu").type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    n_bytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    return torch.from_numpy(np.zeros(n_bytes, np.uint8)).view(dtype or torch.get_default_dtype()).view(shape)


def find(
    table: Int[Tensor, "B m"], at: Int[Tensor, "B T"], block: int, real: Bool[Tensor, "B T"] | None
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """The block and the slot of each position; nobody's block for what is not real."""
    at = at.long()
    blocks = table.gather(1, (at // block).clamp(max=table.shape[1] - 1)).long()
    return blocks if real is None else torch.where(real, blocks, NOBODYS), at % block


def gather(held: Float[Tensor, "n K b E"], pages: Pages) -> Float[Tensor, "B K S E"]:
    """Each row's blocks side by side, as a `Cache` would hold them."""
    if pages.block == 1:
        at, slots = pages.table.long(), held.shape[2]
        return held[at // slots, :, at % slots].transpose(1, 2)
    return held[pages.table.long()].transpose(1, 2).flatten(2, 3)


def spread(mask: Mask) -> Mask:
    """The same mask with the positions of the keys that `gather` lays out."""
    pages = mask.pages
    if pages is None or mask.keys is not None:
        return mask
    at = torch.arange(pages.table.shape[1] * pages.block, device=pages.table.device)
    return replace(mask, keys=torch.where(at < pages.counts[:, None], at, ABSENT))


def unpage(k: Tensor, v: Tensor, mask: Mask) -> tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S E"], Mask]:
    """Keys, values and mask as every kernel takes them."""
    if mask.pages is None:
        return k, v, mask
    return gather(k, mask.pages), gather(v, mask.pages), replace(spread(mask), pages=None)


AnyCache = Cache | PagedCache
AnyLayerCache = LayerCache | PagedLayer
