"""Contacts of a protein, from the attention of a model with a contact head (ESM-2; Rao et al. 2021, section 3).

A head's map A over the residues is made symmetric, S = A + A^T, and corrected for residues that attend, and are attended to, a
lot (APC): S - a a^T / s, where a holds the sums of the rows and s is the sum of all. The probability of a contact is a logistic
regression over these maps of all layers and heads.

The regression is linear, so no map is kept. Each layer adds the weighted sum of its heads' A to one T x T result, a few rows at a
time, and the vectors a. The model runs on its usual fast kernels; q and k of one layer at a time are read, as `probe` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.inside.evaluation_mode import eval_mode
from clearhead.inside.probe import ALL, AttentionInputs, lay_out
from clearhead.inside.sites import blocks_of, uncompiled
from clearhead.layers.attention import Attend
from clearhead.layers.masks import Mask
from clearhead.layers.packing import packed
from clearhead.models import Encoder
from clearhead.quantization.model_weights import example_weight

AT_ONCE = 2**12  # tokens computed together
WORKSPACE = 2**22  # attention weights computed at once


@dataclass(frozen=True)
class ContactHead:
    """The regression's weight for each layer and head, and its bias."""

    weight: Float[Tensor, "layers H"]
    bias: Float[Tensor, ""]


def contact_head(model: Encoder) -> ContactHead:
    """The contact head that came with the model's checkpoint; InputError if there is none, or if it was never fitted."""
    config = model.config
    found = {
        key.rpartition("contact_head.regression.")[2]: x for key, x in model.extras.items() if "contact_head" in key
    }
    if not {"weight", "bias"} <= found.keys() or not found["weight"].any():
        state = "a contact head of zeros, which was never fitted" if found else "no contact head"
        raise InputError(
            f"contacts are read from attention by a fitted contact head; this model (family {config.family!r}) has {state}; "
            f"take an ESM-2 checkpoint as it was published"
        )
    if config.pruned_heads or found["weight"].numel() != config.n_layers * config.n_heads:
        raise InputError(
            f"the contact head weighs {found['weight'].numel()} heads, and the model has {config.n_layers} layers of "
            f"{config.n_heads}, {len(config.pruned_heads)} heads pruned; take the model as it was published"
        )
    weight = found["weight"].float().view(config.n_layers, config.n_heads)
    return ContactHead(weight, found["bias"].float().view(()))


def contact_maps(model: Encoder, rows: Sequence[Sequence[int]]) -> Iterator[Float[Tensor, "L L"]]:
    """For each protein, in order, the probability that two of its residues touch.

    A row is the start token, the residues and the end token; the map is of the residues. Proteins are computed several at once,
    packed into one row without padding.
    """
    head, max_len = contact_head(model), model.config.max_len
    for row in rows:
        if len(row) < 3 or len(row) > max_len:
            raise InputError(
                f"a protein is a start token, residues and an end token, {max_len} at most; got {len(row)}; "
                f"{'cut it into domains' if len(row) > 3 else 'give at least one residue'}"
            )
    for part in _parts(rows, model.config.dropped_token):
        yield from _run(model, head, part)


@torch.no_grad()
def _run(model: Encoder, head: ContactHead, rows: list[Sequence[int]]) -> list[Float[Tensor, "_ _"]]:
    """The maps of proteins that are computed together."""
    device, lengths = example_weight(model).device, [len(row) for row in rows]
    sums = [_Sums(length, head, device) for length in lengths]
    mask, positions = packed(lengths, device)
    tokens = torch.tensor([list(chain.from_iterable(rows))], device=device)
    with ExitStack() as attached:
        attached.enter_context(uncompiled(model))
        attached.enter_context(eval_mode(model))
        for layer, block in enumerate(blocks_of(model).values()):
            hook = block.attention.heads.register_forward_hook(_adder(sums, layer))
            attached.callback(hook.remove)
        model.states(tokens, mask if len(rows) > 1 else None, positions=positions)
    return [one.contacts() for one in sums]


def _parts(rows: Sequence[Sequence[int]], dropped: int) -> Iterator[list[Sequence[int]]]:
    """The rows in order, several at once. Token dropout counts masked tokens over a whole row, so a protein with some is alone."""
    part: list[Sequence[int]] = []
    for row in rows:
        if part and (sum(map(len, part)) + len(row) > AT_ONCE or dropped in (*part[-1], *row)):
            yield part
            part = []
        part.append(row)
    if part:
        yield part


class _Sums:
    """What is added up for one protein: the weighted sum of all heads' maps, and of their corrections."""

    def __init__(self, length: int, head: ContactHead, device: torch.device) -> None:
        self.head, self.length, n = head, length, length - 2
        self.maps = torch.zeros(n, n, device=device)
        self.corrections = torch.zeros(n, n, device=device)

    def add(self, layer: int, q: Float[Tensor, "1 H T E"], k: Float[Tensor, "1 K T E"], scale: float | None) -> None:
        H, T = q.shape[1], self.length
        groups = tuple(head * k.shape[1] // H for head in range(H))
        given = AttentionInputs(q, k, tuple(range(H)), groups, T, ALL, Mask(), None, scale)
        weight = self.head.weight[layer].to(q.device)
        by_row, by_column = q.new_zeros(H, T - 2, dtype=torch.float32), q.new_zeros(H, T - 2, dtype=torch.float32)
        step = max(1, WORKSPACE // (H * T))
        for first in range(1, T - 1, step):  # rows and columns of the residues: not of the start and the end
            rows = slice(first, min(first + step, T - 1))
            seen = given.weights(given.heads, rows)[0, :, :, 1:-1].float()
            at = slice(rows.start - 1, rows.stop - 1)
            self.maps[at] += torch.einsum("h,hij->ij", weight, seen)
            by_row[:, at] = seen.sum(2)
            by_column += seen.sum(1)
        sums = by_row + by_column  # of S = A + A^T
        # A head that looks only at the start and the end has sums of 0, and nothing to correct.
        share = weight / sums.sum(1).clamp(min=torch.finfo(sums.dtype).tiny)
        self.corrections += torch.einsum("h,hi,hj->ij", share, sums, sums)

    def contacts(self) -> Float[Tensor, "L L"]:
        return (self.maps + self.maps.T - self.corrections + self.head.bias.to(self.maps.device)).sigmoid()


def _adder(sums: Sequence[_Sums], layer: int) -> Callable[..., None]:
    def hook(attention: Attend, inputs: tuple[Any, ...], _: Tensor) -> None:
        q, k = lay_out(inputs)[:2]
        start = 0
        for one in sums:
            here = slice(start, start + one.length)
            one.add(layer, q[:, :, here], k[:, :, here], attention.scale)
            start += one.length

    return hook
