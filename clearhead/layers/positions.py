"""How a model knows the order of its tokens: six kinds, one interface. ALiBi and T5's buckets: relative_positions.py.

Each kind answers three questions, and most answer only one of them: what is added to the embeddings (`enter`), by what
angles queries and keys are turned (`angles`), and what is added to the scores (`bias`).

Nothing here is kept as a buffer: tables are computed from the positions asked for. They can't go stale on another device,
can't be rounded by `model.bfloat16()`, and cost no memory on disk.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead import kernels
from clearhead.errors import ConfigError, InputError

Angles = tuple[Float[Tensor, "_ 1 T e"], Float[Tensor, "_ 1 T e"]]  # cosines and sines, e = E / 2


class Positions(nn.Module):
    """No positions at all, and the interface of the others. Positions come as (T,) for all rows alike, or (B, T)."""

    max_len: int | None = None  # the longest sequence this kind can place; None: any

    def enter(self, x: Float[Tensor, "B T D"], positions: Int[Tensor, "*B T"]) -> Float[Tensor, "B T D"]:
        return x

    def angles(self, positions: Int[Tensor, "*B T"]) -> Angles | None:
        return None

    @property
    def bias(self) -> DistanceBias | None:
        return None


class Sinusoidal(Positions):
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos of the same (section 3.5).

    i counts pairs, so the exponent is 2i/d with i up to d/2. `halves` keeps all sines before all cosines.
    """

    def __init__(self, *, d_model: int, halves: bool = False) -> None:
        super().__init__()
        self.d_model, self.halves = d_model, halves

    def enter(self, x: Float[Tensor, "B T D"], positions: Int[Tensor, "*B T"]) -> Float[Tensor, "B T D"]:
        return x + self.table(positions).to(x)

    def table(self, positions: Int[Tensor, "*B T"]) -> Float[Tensor, "*B T D"]:
        # float64: at position 1,000 a float32 angle is already wrong in the fifth digit.
        exact = kernels.to_float64(positions)
        pairs = torch.arange(self.d_model // 2, device=exact.device, dtype=torch.float64)
        angles = exact[..., None] * 10_000.0 ** (-2 * pairs / self.d_model)
        both = [angles.sin(), angles.cos()]
        table = torch.cat(both, -1) if self.halves else torch.stack(both, -1).flatten(-2)
        return table.float()


class Learned(Positions):
    """One trained vector a position."""

    def __init__(self, *, d_model: int, max_len: int) -> None:
        super().__init__()
        self.max_len = max_len
        self.weight = nn.Parameter(torch.empty(max_len, d_model).normal_(std=0.02))

    def enter(self, x: Float[Tensor, "B T D"], positions: Int[Tensor, "*B T"]) -> Float[Tensor, "B T D"]:
        return x + F.embedding(positions, self.weight)


class Rotary(Positions):
    """RoPE (Su et al. 2021): pair i of a head is turned by pos / base^(2i/E), so scores see only the distance.

    `scaling` stretches the wavelengths for longer contexts: "linear" all of them by `factor`; "llama3" only the long ones,
    with a smooth step between `original_len / low` and `original_len / high`.
    """

    def __init__(
        self,
        *,
        d_head: int,
        base: float = 10_000.0,
        interleaved: bool = False,
        scaling: str = "none",
        factor: float = 1.0,
        low: float = 1.0,
        high: float = 4.0,
        original_len: int = 8192,
        precision: str = "float32",
    ) -> None:
        super().__init__()
        if scaling not in ("none", "linear", "llama3"):
            raise ConfigError(f"rotary scaling {scaling!r} is not known; use 'none', 'linear' or 'llama3'")
        self.d_head, self.base, self.interleaved = d_head, base, interleaved
        self.scaling, self.factor, self.low, self.high, self.original_len = scaling, factor, low, high, original_len
        self.precision: torch.dtype = getattr(torch, precision)

    def frequencies(self, device: torch.device) -> Float[Tensor, " e"]:
        # A model trained with rounded ones goes on with them: float16's turns, at position 1,000, are up to 0.25 rad off.
        return self._scaled(device).to(self.precision).float()

    def _scaled(self, device: torch.device) -> Float[Tensor, " e"]:
        # float32, whatever the model's type: the precision every published rotary checkpoint was trained with.
        steps = torch.arange(0, self.d_head, 2, device=device).float() / self.d_head
        plain = 1.0 / self.base**steps
        if self.scaling == "none":
            return plain
        if self.scaling == "linear":
            return plain / self.factor
        turns = self.original_len * plain / (2 * math.pi)  # full turns within the original context
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - kept) * plain / self.factor + kept * plain

    def angles(self, positions: Int[Tensor, "*B T"]) -> Angles:
        turned = positions.float()[..., None] * self.frequencies(positions.device)  # (T, e) or (B, T, e)
        turned = turned[None, None] if turned.ndim == 2 else turned[:, None]
        if self.interleaved:  # one angle for each of the two neighbours; `rotate` tells the layouts apart by the width
            turned = turned.repeat_interleave(2, -1)
        return turned.cos(), turned.sin()


def rotate(x: Float[Tensor, "B h T E"], angles: Angles) -> Float[Tensor, "B h T E"]:
    """Turn each pair of x by its angle. Half-split pairs (i, i + E/2) have E/2 angles, interleaved pairs (2i, 2i + 1) E."""
    cos, sin = angles
    if cos.shape[-1] == x.shape[-1]:
        crossed = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
        return (x * cos + crossed * sin).to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class DistanceBias(Positions):
    """What is added to a score is a function of the head and of key position minus query position."""

    n_heads: int

    @property
    def bias(self) -> DistanceBias:
        return self

    def at(self, head: Int[Tensor, ""], distance: Int[Tensor, ""]) -> Float[Tensor, ""]:
        """One pair's bias (flex asks pair by pair)."""
        raise NotImplementedError

    def dense(self, distance: Int[Tensor, "b t s"]) -> Float[Tensor, "b h t s"]:
        """Many pairs' bias."""
        raise NotImplementedError

    def only(self, heads: tuple[int, ...]) -> DistanceBias:
        """That of some heads."""
        return SomeHeads(self, heads)


class SomeHeads(DistanceBias):
    """The bias of an attention that has lost the other heads."""

    def __init__(self, whole: DistanceBias, heads: tuple[int, ...]) -> None:
        super().__init__()
        self.whole, self.heads, self.n_heads = whole, heads, len(heads)

    def at(self, head: Int[Tensor, ""], distance: Int[Tensor, ""]) -> Float[Tensor, ""]:
        return self.whole.at(torch.tensor(self.heads, device=head.device)[head], distance)

    def dense(self, distance: Int[Tensor, "b t s"]) -> Float[Tensor, "b h t s"]:
        return self.whole.dense(distance)[:, list(self.heads)]


Bias = (
    DistanceBias | Float[Tensor, "_ _ T S"]
)  # what `attend` can add to the scores: a function of distance, or numbers


def check_length(length: int, positions: Positions) -> None:
    """Refuse a sequence longer than the table of positions."""
    if positions.max_len is not None and length > positions.max_len:
        raise InputError(
            f"the sequence is longer than the model's positions: {length} > max_len={positions.max_len}; "
            f"shorten it, or build with a larger max_len"
        )
