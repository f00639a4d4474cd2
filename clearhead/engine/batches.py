"""Lists of ids on their way to a model: checked, padded, sent; what comes back; and what a model is like while it writes."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from clearhead.errors import InputError

Ids = Sequence[Sequence[int]]  # several texts


def check_rows(rows: Sequence[object], vocab_size: int, what: str) -> list[list[int]]:
    """Lists of ids of this vocabulary, and nothing else."""
    checked: list[list[int]] = []
    for place, row in enumerate(rows):
        ids: list[Any] = list(row) if isinstance(row, Sequence) else [None]
        if not set(map(type, ids)) <= {int}:
            raise InputError(
                f"{what}s are a list of lists of ids; got {what} {place} = {str(row)[:40]!r}; encode text with the model's "
                f"tokenizer, and put a single {what} in a list of its own"
            )
        check_ids(ids, vocab_size, f"{what} {place}")
        checked.append(ids)
    return checked


def check_ids(ids: Sequence[int], vocab_size: int, what: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise InputError(
            f"{what} holds ids from {min(ids)} to {max(ids)}; the vocabulary has 0 .. {vocab_size - 1}; "
            f"is this the model's own tokenizer?"
        )


def check_least(value: object, least: int, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} is a whole number of at least {least}; got {value!r}; raise it")


def check_shape(model: nn.Module, shape: str) -> None:
    config = getattr(model, "config", None)
    found, inputs = getattr(config, "shape", type(model).__name__), getattr(config, "inputs", None)
    if (found, inputs) != (shape, "tokens"):
        raise InputError(
            f"this takes a model of shape={shape!r} over tokens; got shape={found!r}, inputs={inputs!r}; "
            f"generate is for decoders, translate for encoder-decoders"
        )


def pad(rows: Ids, device: torch.device) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"] | None]:
    """Rows side by side, filled up on the right; which tokens are real, or None where all are."""
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), lengths.max()), np.int64)
    for at, row in enumerate(rows):
        tokens[at, : len(row)] = row
    if (lengths == lengths.max()).all():
        return send(tokens, device), None
    return send(tokens, device), send(np.arange(lengths.max()) < lengths[:, None], device)


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """To the device, without waiting for what it is doing."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return _staging(device).send(tensor) if device.type == "cuda" else tensor.to(device)


class Staging:
    """Pinned memory, from which a GPU copies while the CPU goes on; each piece is used again when its copy is over."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pieces: dict[int, deque[tuple[Tensor, torch.cuda.Event]]] = {}  # by size, the longest unused first

    def send(self, tensor: Tensor) -> Tensor:
        size = 1 << max(tensor.nbytes - 1, 1).bit_length()
        pieces = self.pieces.setdefault(size, deque())
        if pieces and pieces[0][1].query():
            piece, copied = pieces.popleft()
        else:
            piece, copied = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
        held = piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        sent = held.copy_(tensor).to(self.device, non_blocking=True)
        copied.record(torch.cuda.current_stream(self.device))
        pieces.append((piece, copied))
        return sent


@functools.cache
def _staging(device: torch.device) -> Staging:
    return Staging(device)


class Parcel:
    """Numbers as they are now, on their way from the device; `open` waits for them."""

    def __init__(self, *parts: Tensor) -> None:
        self.arrival: torch.cuda.Event | None = None
        if parts[0].is_cuda:
            # Only into pinned memory does a copy go on while the CPU does.
            copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in parts]
            self.arrival = torch.cuda.Event()
            self.arrival.record()
        else:
            copies = [part.clone() for part in parts]
        self.parts = copies

    def open(self) -> Sequence[Tensor]:
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.parts


@contextmanager
def evaluating(model: nn.Module) -> Generator[None, None, None]:
    """Without dropout or gradients inside; each module's mode is put back after."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def widen(logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    """At least float32: 8 or 11 bits tell too few tokens apart."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
