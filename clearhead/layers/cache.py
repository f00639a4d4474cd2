"""The KV cache: keys and values of the tokens so far, so that each new token costs one step.

The caller owns it: `cache = model.new_cache(batch=2, max_len=64)`, then pass `cache=cache` to each call. Memory is taken once.
A real token's slot is its position in its own row, so padding takes no room; with a sliding window, its position modulo the
window, so memory is bounded by the window. Writing past `max_len` is an error; nothing is ever dropped in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.errors import InputError
from clearhead.layers.masks import ABSENT, Mask


@runtime_checkable
class StoredKeys(Protocol):
    """Keys or values that a cache keeps in memory of another layout."""

    def gather(self) -> Tensor:
        """A copy in the usual layout, (B, K, S, E)."""
        ...

    def attend(self, q: Tensor, values: StoredKeys, scale: float, window: int) -> Tensor | None:
        """Attention of one query a row over all keys of the row, without that copy; None: gather."""
        ...


Keys = Float[Tensor, "B K S E"] | StoredKeys


@runtime_checkable
class AnyLayerCache(Protocol):
    """What attention needs of a cache, for one layer."""

    @property
    def cross(self) -> tuple[Keys, Keys] | None:
        """Keys and values of the source, once it was read."""

    @cross.setter
    def cross(self, read: tuple[Tensor, Tensor]) -> None: ...

    def extend(self, k: Tensor, v: Tensor) -> tuple[Keys, Keys]:
        """Store these; return all keys and values that their queries may attend to."""
        ...


@runtime_checkable
class AnyCache(Protocol):
    """What a model needs of a cache. `Cache` is memory of its own for each row; the engine has one in blocks."""

    length: int  # tokens so far, padding included

    @property
    def memory_mask(self) -> Mask | None:
        """Of the cross-attention."""

    @memory_mask.setter
    def memory_mask(self, mask: Mask | None) -> None: ...

    @property
    def layers(self) -> Sequence[AnyLayerCache]: ...

    def check(self, batch: int, T: int) -> None:
        """Refuse what does not fit, before anything is written."""

    def place(self, T: int, real: Bool[Tensor, "B T"] | None) -> tuple[Int[Tensor, "*B T"], Mask]:
        """Positions of the next T tokens, and a mask with the positions of the keys that `extend` returns."""
        ...

    def advance(self, queries: Int[Tensor, "*B T"]) -> None:
        """The tokens that `place` put at these positions are read."""


@dataclass(frozen=True)
class Placement:
    """Where the T tokens of one call are written: from slot `start` on in every row, or one by one where rows differ."""

    start: int = 0
    rows: Int[Tensor, " n"] | None = None  # for each token written: its row, its index in the call, its position
    cols: Int[Tensor, " n"] | None = None
    positions: Int[Tensor, " n"] | None = None


class LayerCache:
    """One layer: keys and values of its self-attention, and, once read, those of its cross-attention."""

    def __init__(self, k: Float[Tensor, "B K slots E"], v: Float[Tensor, "B K slots E"]) -> None:
        self.k, self.v = k, v
        self.step = Placement()
        self.cross: tuple[Tensor, Tensor] | None = None

    def extend(
        self, k: Float[Tensor, "B K T E"], v: Float[Tensor, "B K T E"]
    ) -> tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S E"]]:
        """Store these; return all keys and values that their queries may attend to, themselves included."""
        start, slots, T = self.step.start, self.k.shape[2], k.shape[2]
        if start + T <= slots or T == 1:
            self._write(k, v)
            used = min(start + T, slots)
            return self.k[:, :, :used], self.v[:, :, :used]
        # Several tokens past the ring's end: the first of them still attend to keys that the last of them replace.
        used = min(start, slots)
        seen = torch.cat([self.k[:, :, :used], k], 2), torch.cat([self.v[:, :, :used], v], 2)
        self._write(k, v)
        return seen

    def _write(self, k: Tensor, v: Tensor) -> None:
        step, slots, T = self.step, self.k.shape[2], k.shape[2]
        if step.rows is not None and step.cols is not None and step.positions is not None:
            at = step.positions % slots
            self.k[step.rows, :, at] = k[step.rows, :, step.cols]
            self.v[step.rows, :, at] = v[step.rows, :, step.cols]
        elif step.start + T <= slots:
            self.k[:, :, step.start : step.start + T] = k
            self.v[:, :, step.start : step.start + T] = v
        else:
            kept = min(T, slots)
            at = torch.arange(step.start + T - kept, step.start + T, device=k.device) % slots
            self.k[:, :, at] = k[:, :, T - kept :]
            self.v[:, :, at] = v[:, :, T - kept :]


class Cache:
    """All layers' keys and values, and the length of each row."""

    def __init__(
        self,
        *,
        batch: int,
        max_len: int,
        n_layers: int,
        n_kv_heads: int | Sequence[int],
        d_head: int,
        window: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if batch < 1 or max_len < 1:
            raise InputError(
                f"a cache needs batch and max_len of at least 1; got batch={batch}, max_len={max_len}; raise them"
            )
        self.max_len, self.length = max_len, 0
        self.slots = min(window, max_len) if window else max_len
        each = [n_kv_heads] * n_layers if isinstance(n_kv_heads, int) else n_kv_heads
        shapes = [(batch, n, self.slots, d_head) for n in each]
        self.layers = [LayerCache(*(torch.zeros(shape, device=device, dtype=dtype) for _ in "kv")) for shape in shapes]
        self.counts: Int[Tensor, " B"] | None = None  # real tokens so far; None: `length` in every row
        self.memory_mask: Mask | None = None  # of the cross-attention

    @property
    def batch(self) -> int:
        return self.layers[0].k.shape[0]

    @property
    def nbytes(self) -> int:
        """Memory held, cross-attention included."""
        held = [t for layer in self.layers for t in (layer.k, layer.v, *(layer.cross or ()))]
        return sum(t.numel() * t.element_size() for t in held)

    def check(self, batch: int, T: int) -> None:
        """Refuse what does not fit, before anything is written."""
        if batch != self.batch:
            raise InputError(f"the cache holds {self.batch} rows, the input {batch}; use new_cache(batch={batch}, ...)")
        if self.length + T > self.max_len:
            raise InputError(
                f"the cache is full: {self.length} tokens held + {T} new > max_len={self.max_len}; "
                f"make it with new_cache(max_len={self.length + T}) or more"
            )

    def place(self, T: int, real: Bool[Tensor, "B T"] | None) -> tuple[Int[Tensor, "*B T"], Mask]:
        """Positions of the next T tokens, and a mask with the positions of the keys that `extend` returns.

        Sets where the layers write; `advance` then counts the tokens as read.
        """
        start, device = self.length, self.layers[0].k.device
        if real is None and self.counts is None:
            self._set(Placement(start))
            queries = torch.arange(start, start + T, device=device)
            if start + T <= self.slots:
                return queries, Mask()
            before, after = torch.tensor([[start], [start + T]], device=device)
            return queries, self._mask(queries[None], before, after)
        real = torch.ones(self.batch, T, dtype=torch.bool, device=device) if real is None else real
        before = torch.full((self.batch,), start, device=device) if self.counts is None else self.counts
        after = before + real.sum(-1)
        queries = torch.where(real, before[:, None] + real.cumsum(-1) - 1, ABSENT)
        # Of more tokens than slots only the last survive; writing each slot once keeps the result defined.
        rows, cols = (real & (queries >= after[:, None] - self.slots)).nonzero(as_tuple=True)
        self._set(Placement(start, rows, cols, queries[rows, cols]))
        return queries, self._mask(queries, before, after)

    def advance(self, queries: Int[Tensor, "*B T"]) -> None:
        """The tokens that `place` put at these positions are read."""
        if queries.ndim == 2:
            before = queries.new_full((self.batch,), self.length) if self.counts is None else self.counts
            self.counts = before + (queries != ABSENT).sum(-1)
        self.length += queries.shape[-1]

    def _set(self, step: Placement) -> None:
        for layer in self.layers:
            layer.step = step

    def _mask(self, queries: Int[Tensor, "_ T"], before: Int[Tensor, " _"], after: Int[Tensor, " _"]) -> Mask:
        """The positions of the keys, in the order in which `LayerCache.extend` returns them."""
        start, T = self.length, queries.shape[1]
        if start + T <= self.slots or T == 1:
            return Mask(queries=queries, keys=self._ring(after)[:, : min(start + T, self.slots)])
        return Mask(queries=queries, keys=torch.cat([self._ring(before)[:, : min(start, self.slots)], queries], 1))

    def _ring(self, counts: Int[Tensor, " _"]) -> Int[Tensor, "_ slots"]:
        """The position of the key in each slot of a row that has read `counts` tokens."""
        slot, last = torch.arange(self.slots, device=counts.device), counts[:, None] - 1
        latest = last - (last - slot) % self.slots
        return torch.where(latest >= 0, latest, ABSENT)
