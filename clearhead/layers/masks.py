"""Masks: which query may attend to which key. True = may attend, everywhere.

A mask holds facts (causal, a window, a sparse pattern, the position of each key, its document). attention.py lowers them to what a
kernel takes, so no T x T tensor exists for a causal model. Combine masks with `&`:

    causal() & padding(real)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead.errors import InputError
from clearhead.layers.positions import Bias
from clearhead.sparsity import Pattern

ALL = slice(None)
Index = slice | Int[Tensor, " n"]  # of some queries, or some keys
ABSENT = -1  # the position of a key that is not there: padding, or an empty slot of a cache


@dataclass(frozen=True, eq=False)
class Spans:
    """Where each of several texts starts in the one row that holds them all, and where the last one ends."""

    starts: Int[Tensor, " n"]
    longest: int  # tokens of the longest text, or more
    keys: Spans | None = None  # those of the keys, where these are other tokens than the queries


@dataclass(frozen=True, eq=False)
class Mask:
    """The facts about T queries and S keys.

    Keys have positions 0 .. S - 1 unless `keys` is given, and the queries are the last T of them unless `queries` is given.
    Positions count real tokens only, so that a padded row and the same row without padding are one computation.
    """

    causal: bool = False
    window: int = 0  # 0: none; n: only keys at a distance below n
    patterns: tuple[Pattern, ...] = ()  # only pairs of places that each of these keeps
    keys: Int[Tensor, "_ S"] | None = None  # positions; ABSENT where no key is
    queries: Int[Tensor, "_ T"] | None = None
    documents: tuple[Int[Tensor, "_ S"], ...] = ()  # only keys with the query's own number, in each of these
    asking: tuple[Int[Tensor, "_ T"], ...] = ()  # the queries' numbers in each; (): the queries are the last T keys
    spans: Spans | None = None  # where the texts of `documents` start, if they are packed one after the other

    def __and__(self, other: Mask) -> Mask:
        """Both must allow. A key that is absent in one of them is absent."""
        if self.queries is not None or other.queries is not None:
            raise InputError(
                "a mask with its own query positions belongs to one cache; got another beside it; combine first"
            )
        if self.asking or other.asking:
            raise InputError(
                "a mask of across() belongs to two packed rows and does not combine; got another beside it"
            )
        keys = self.keys if other.keys is None else other.keys
        if self.keys is not None and other.keys is not None:
            keys = positions_of((self.keys != ABSENT) & (other.keys != ABSENT))
        return Mask(
            causal=self.causal or other.causal,
            window=min(self.window, other.window) or max(self.window, other.window),
            patterns=self.patterns + other.patterns,
            keys=keys,
            documents=self.documents + other.documents,
            spans=self.spans if not other.documents else other.spans if not self.documents else None,
        )

    @property
    def batch(self) -> int | None:
        """For how many rows of the batch this mask differs; None: for none."""
        sizes = [t.shape[0] for t in (self.keys, self.queries, *self.documents, *self.asking) if t is not None]
        return max(sizes) if sizes else None

    @property
    def is_ordered(self) -> bool:
        """Whether keys stand in the order of their index, none absent: then parts can be cut out by index alone."""
        return self.keys is None and self.queries is None

    def check(self, B: int, T: int, S: int) -> None:
        """Refuse a mask made for other queries or keys."""
        for name, given, length in [
            *(("queries", t, T) for t in (self.queries, *self.asking)),
            *(("keys", t, S) for t in (self.keys, *self.documents)),
        ]:
            # Written out, since `in` compares by identity first, and a compiler's symbolic sizes have none.
            if given is not None and (given.shape[1] != length or (given.shape[0] != 1 and given.shape[0] != B)):
                raise InputError(
                    f"the mask speaks of {tuple(given.shape)} {name}, but there are {(B, length)} (batch, length); "
                    f"make it from tensors of that shape"
                )
        if self.documents and not self.asking and T > S:
            raise InputError(
                f"documents need queries that are among the keys; got {T} queries and {S} keys; use padding"
            )

    def simplify(self, T: int, S: int) -> Mask:
        """The same mask without the facts that forbid nothing at this size."""
        if not self.is_ordered:
            return self
        window = 0 if self.window >= max(T, S) else self.window
        causal = self.causal and T > 1
        return replace(self, window=window, causal=causal)

    def positions(self, T: int, S: int, device: torch.device) -> tuple[Int[Tensor, "_ T"], Int[Tensor, "_ S"]]:
        """The positions of the queries and of the keys."""
        keys = torch.arange(S, device=device)[None] if self.keys is None else self.keys
        queries = keys[:, S - T :] if T <= S else torch.arange(S - T, S, device=device)[None]
        return queries if self.queries is None else self.queries, keys

    def numbers(self, T: int, S: int) -> list[tuple[Int[Tensor, "_ T"], Int[Tensor, "_ S"]]]:
        """Document numbers of the queries and of the keys, for each of `documents`."""
        asking = self.asking or tuple(ids[:, S - T :] for ids in self.documents)
        return list(zip(asking, self.documents, strict=True))

    def places(self, T: int, S: int, device: torch.device) -> tuple[Int[Tensor, "_ T"], Int[Tensor, "_ S"]]:
        """What patterns speak of: positions, counted anew in each document (in each of its parts, where it is in parts)."""
        queries, keys = self.positions(T, S, device)
        if len(self.patterns) == 0 or len(self.documents) == 0:
            return queries, keys
        keys = _count_anew(keys != ABSENT, self.documents)
        return _count_anew(torch.ones_like(queries).bool(), self.asking) if self.asking else keys[:, S - T :], keys

    def distances(self, T: int, S: int, rows: slice, cols: Index, device: torch.device) -> Int[Tensor, "_ t s"]:
        """Key position minus query position, for the pairs asked for."""
        queries, keys = self.positions(T, S, device)
        return keys[:, None, cols] - queries[:, rows, None]

    def allowed(self, T: int, S: int, rows: slice, cols: Index, device: torch.device) -> Bool[Tensor, "_ 1 _ s"] | None:
        """The pairs asked for as booleans that broadcast over (B, H, T, S), or None when nothing is forbidden."""
        terms: list[Tensor] = []
        if self.keys is not None:
            terms.append((self.keys != ABSENT)[:, None, cols])
        if self.causal or self.window:
            distance = self.distances(T, S, rows, cols, device)
            if self.causal:
                terms.append(distance <= 0)
            if self.window:
                terms.append(distance.abs() < self.window)
        for asking, ids in self.numbers(T, S):
            terms.append(asking[:, rows, None] == ids[:, None, cols])
        if len(self.patterns):
            queries, keys = self.places(T, S, device)
            terms += [pattern.keeps(queries[:, rows, None], keys[:, None, cols]) for pattern in self.patterns]
        if not terms:
            return None
        allowed = terms[0]
        for term in terms[1:]:
            allowed = allowed & term
        return allowed[:, None]


def lower_pairs(
    mask: Mask, bias: Bias | None, T: int, S: int, rows: slice, cols: Index, device: torch.device
) -> tuple[Tensor | None, Bool[Tensor, "_ 1 _ 1"] | None]:
    """These pairs as a fused kernel takes them, True = may attend or numbers to add, and the queries that may attend to nothing."""
    allowed = mask.allowed(T, S, rows, cols, device)
    empty = None
    # Only these facts can leave a row empty; such a row attends to everything, and its result is then zeroed.
    if allowed is not None and (mask.keys is not None or mask.documents or T > S):
        empty = ~allowed.any(-1, keepdim=True)
        allowed = allowed | empty
    if bias is None:
        return allowed, empty
    added = bias_of(bias, mask, T, S, rows, cols, device)
    return added if allowed is None else added.masked_fill(~allowed, float("-inf")), empty


def bias_of(bias: Bias, mask: Mask, T: int, S: int, rows: slice, cols: Index, device: torch.device) -> Tensor:
    """What is added to the scores of these pairs."""
    return bias[:, :, rows, cols] if isinstance(bias, Tensor) else bias.dense(mask.distances(T, S, rows, cols, device))


def causal() -> Mask:
    """A token sees itself and what came before it."""
    return Mask(causal=True)


def window(width: int) -> Mask:
    """A token sees only keys nearer than `width`: itself and width - 1 to each side allowed by the other masks."""
    if width < 1:
        raise InputError(
            f"a window must hold at least the token itself; got width={width}; use 1 or more, or no window"
        )
    return Mask(window=width)


def padding(real: Bool[Tensor, "B S"]) -> Mask:
    """Only real tokens are seen. `real` is True for a real token, False for padding."""
    return Mask(keys=positions_of(check_real(real)))


def documents(ids: Int[Tensor, "B S"]) -> Mask:
    """Several documents packed into one row: a token sees only tokens of its own document."""
    if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError(
            f"documents are numbered by whole numbers of shape (batch, length); got {ids.dtype} of shape {tuple(ids.shape)}; "
            f"give each token its document's number"
        )
    return Mask(documents=(ids,))


def sparse(pattern: Pattern | str) -> Mask:
    """Only pairs that a pattern keeps, such as "block=64, window=2, n_global=1, n_random=3" (see clearhead/sparsity.py)."""
    return Mask(patterns=(Pattern.parse(pattern) if isinstance(pattern, str) else pattern,))


def _count_anew(real: Bool[Tensor, "_ S"], documents: tuple[Int[Tensor, "_ S"], ...]) -> Int[Tensor, "_ S"]:
    """Each real token's index among those since a number last changed; ABSENT for padding."""
    counted, start = positions_of(real), torch.zeros_like(real)
    for ids in documents:
        start = start | F.pad(ids.diff() != 0, (1, 0))
    return torch.where(real, counted - torch.where(start, real.cumsum(-1) - real.long(), 0).cummax(-1).values, ABSENT)


def positions_of(real: Bool[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """Each real token's index among the real tokens of its row; ABSENT for padding."""
    return torch.where(real, real.cumsum(-1) - 1, ABSENT)


def check_real(real: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Refuse anything but a boolean (B, S) tensor, and say the convention."""
    if real.dtype != torch.bool:
        raise InputError(
            f"a mask is boolean, True = a real token that may be attended to; got {real.dtype}; "
            f"write mask=(tokens != pad), or mask=(additive == 0) for an additive mask"
        )
    if real.ndim != 2 or (shape is not None and tuple(real.shape) != shape):
        wanted = "(batch, length)" if shape is None else str(shape)
        raise InputError(
            f"a padding mask has shape {wanted}, one value a token; got {tuple(real.shape)}; pass mask=real"
        )
    return real
