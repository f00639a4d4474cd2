"""A whole decode step of native.cpp for Python: from each row's last token to the logits of its next one, in one call.

`DecodeModel` holds the addresses of a model's weights; it never changes, and several threads may use one. `DecodeStep` holds what
changes from call to call; each caller has its own. Neither keeps the tensors alive: their owner must.

The structures have the fields of those in cpp/decode_step.h, which explains them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from clearhead.kernels import native

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Matrix(ctypes.Structure):
    _fields_ = [(name, POINTER) for name in ("q", "scales", "mins", "bias")] + [
        (name, INT) for name in ("n", "d", "bits", "inputs")
    ]


class Norm(ctypes.Structure):
    _fields_ = [("weight", POINTER), ("bias", POINTER), ("kind", INT), ("eps", FLOAT)]


class Attention(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("qkv", "out")),
        *((name, Norm) for name in ("q_norm", "k_norm")),
        *((name, INT) for name in ("heads", "kv_heads")),
        ("scale", FLOAT),
    ]


class Layer(ctypes.Structure):
    _fields_ = [("self", Attention), ("cross", Attention), ("up", Matrix), ("down", Matrix), ("norms", Norm * 3)]


class Model(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER),
        *((name, Matrix) for name in ("embedding", "head")),
        *((name, Norm) for name in ("embedding_norm", "final_norm")),
        *((name, INT) for name in ("n_layers", "d_model", "d_head", "window", "activation")),
        *((name, INT) for name in ("has_cross", "norm_first", "is_gated")),
        *((name, FLOAT) for name in ("embedding_scale", "head_scale")),
    ]


class BlockTableStruct(ctypes.Structure):
    _fields_ = [("table", POINTER), ("counts", POINTER), ("width", INT)]


class StepStruct(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("model", "tokens", "logits", "positions", "cos", "sin", "pool")),
        *((name, BlockTableStruct) for name in ("own", "source", "kept")),
        *((name, INT) for name in ("rows", "n_angles", "block")),
        *((name, INT) for name in ("block_stride", "layer_stride", "value_stride", "head_stride", "threads")),
        ("stores_first", INT),
    ]


class Table(NamedTuple):
    """Where the tokens of each row lie (at least as many rows as a call has): blocks in order, and the number of tokens."""

    blocks: NDArray[np.int32]  # (rows, m)
    counts: NDArray[np.int32]  # (rows,)


class PositionTables(NamedTuple):
    """One row for each of the first n positions; None where a kind of positions does not use it."""

    n: int
    added: Float[Tensor, "n D"] | None = None  # to embeddings
    cos: Float[Tensor, "n e"] | None = None
    sin: Float[Tensor, "n e"] | None = None


def activations() -> dict[str, int]:
    """The activations that native.cpp computes, and the numbers that stand for them."""
    return native.codes("activation")


def matrix(
    parts: Sequence[Tensor], bias: Tensor | None, *, shape: Sequence[int], bits: int, inputs: int = 32
) -> Matrix:
    """A weight of `shape` (N, D): `parts` are the weight itself (32 bits), or q, scales and (4 bits) mins; `inputs`: bits of x."""
    held = [*(part.data_ptr() for part in parts), None, None][:3]
    return Matrix(*held, None if bias is None else bias.data_ptr(), *shape, bits, inputs)


def norm(kind: str, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
    """A norm of a kind that native.cpp knows. `Norm()` is none at all."""
    return Norm(weight.data_ptr(), None if bias is None else bias.data_ptr(), native.codes("norm")[kind], eps)


class DecodeModel:
    def __init__(self, layers: Sequence[Layer], *, activation: str, **fields: Matrix | Norm | float | int) -> None:
        """`fields` are those of `Model`."""
        self._layers = (Layer * len(layers))(*layers)
        self.model = Model(
            layers=ctypes.addressof(self._layers), n_layers=len(layers), activation=activations()[activation], **fields
        )


class DecodeStep:
    def __init__(self, model: DecodeModel) -> None:
        self._model, self._n_logits = model, model.model.head.n
        self._step = StepStruct(model=ctypes.addressof(model.model))
        self._address = ctypes.addressof(self._step)
        self._pool: Tensor | None = None  # what the step was last filled with
        self._positions: PositionTables | None = None
        self._logits: Tensor | None = None  # those of the last step, if it was to reuse them

    def run(
        self,
        tokens: Int[Tensor, " n"],
        pool: Float[Tensor, "blocks layers 2 K slots E"],
        own: Table,
        source: Table,
        positions: PositionTables,
        kept: Table | None = None,
        stores_first: bool = False,
        reuse: bool = False,
    ) -> Float[Tensor, "n V"]:
        """The logits after these tokens, whose keys and values are stored in the pool; each row's most likely next token
        takes the place of its token. `own` counts the tokens before these; `source` is that of cross-attention. Self-attention
        reads `kept`, if given: some whole blocks of `own`, this token's the last of them. With `stores_first`, rows may be
        successive tokens of one text, whose keys are stored before any row attends. With `reuse`, the logits lie in the memory
        of the last ones: new memory for hundreds of rows takes a tenth of a step."""
        step = self._step
        logits = self._room_for_logits(len(tokens)) if reuse else torch.empty(len(tokens), self._n_logits)
        if pool is not self._pool:
            self._pool, step.pool, step.block = pool, pool.data_ptr(), pool.shape[4]
            step.block_stride, step.layer_stride, step.value_stride, step.head_stride = pool.stride()[:4]
        if positions is not self._positions:
            self._positions, (_, added, cos, sin) = positions, positions
            step.positions, step.cos, step.sin = map(_address, (added, cos, sin))
            step.n_angles = 0 if cos is None else cos.shape[1]
        step.tokens, step.logits = tokens.data_ptr(), logits.data_ptr()
        step.own, step.source = _block_table(own), _block_table(source)
        step.kept = BlockTableStruct() if kept is None else _block_table(kept)
        step.rows, step.threads, step.stores_first = len(tokens), torch.get_num_threads(), stores_first
        native.decode_step(self._address)
        return logits

    def _room_for_logits(self, n: int) -> Float[Tensor, "n V"]:
        if self._logits is None or len(self._logits) < n:
            self._logits = torch.empty(n, self._n_logits)
        return self._logits[:n]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _block_table(table: Table) -> BlockTableStruct:
    blocks, counts = table
    (at, _), (counts_at, _) = blocks.__array_interface__["data"], counts.__array_interface__["data"]
    return BlockTableStruct(at, counts_at, blocks.shape[1])
