"""The functions of native.cpp, called on tensors without copies.

native_library.py finds or compiles the library. If there is none, `is_there` is False, `why_not` says why, and torch's own
operators are used. CLEARHEAD_NATIVE=0 turns it off.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.kernels import native_library

TEXT_WIDTHS = 16  # floats in the widest register: `text_attention` takes head widths that are multiples of this

POINTER, INT, FLOAT, SMALL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES: dict[str, tuple[list[Any], Any]] = {  # arguments and result; a result of 1 says that nothing was done
    "linear_f32": ([POINTER] * 4 + [INT] * 3 + [SMALL], None),
    "linear_packed": ([POINTER] * 6 + [INT] * 5 + [SMALL], SMALL),
    "pack_int4": ([POINTER] * 5 + [INT] * 3 + [SMALL], None),
    "search_int4": ([POINTER] * 9 + [INT] * 3 + [SMALL], None),
    "paged_attention": ([POINTER] * 6 + [INT] * 10 + [FLOAT, INT, SMALL], None),
    "paged_store": ([POINTER] * 6 + [INT] * 11, None),
    "text_attention": ([POINTER] * 6 + [INT] * 12 + [FLOAT, SMALL, SMALL], None),
    "top_log_probs": ([POINTER] * 4 + [INT] * 3 + [SMALL], None),
    "decode_step": ([POINTER], SMALL),
    "draw": ([POINTER] * 4 + [INT] * 2 + [SMALL], None),
}


def is_there() -> bool:
    return _library()[0] is not None


def has_tiles() -> bool:
    """Whether packed weights must be stored in tiles (quantization/integer.py)."""
    library, _ = _library()
    return library is not None and bool(ctypes.c_int.in_dll(library, "has_tiles").value)


def why_not() -> str | None:
    """Why the library can not be used; None if it can."""
    return _library()[1]


def linear(
    x: Float[Tensor, "R D"], weight: Float[Tensor, "N D"], bias: Float[Tensor, " N"] | None
) -> Float[Tensor, "R N"]:
    """x W^T + b in float32; x and weight are contiguous."""
    (rows, d), n = x.shape, weight.shape[0]
    out = x.new_empty(rows, n)
    _FUNCTIONS["linear_f32"](
        *(x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()),
        *(rows, n, d, torch.get_num_threads()),
    )
    return out


def linear_packed(
    x: Float[Tensor, "R D"],
    q: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    bias: Float[Tensor, " N"] | None,
    n: int,
    bits: int,
    inputs: int,
) -> Float[Tensor, "R N"]:
    """x W^T + b in float32; W has n rows of `bits` bits, in tiles if `has_tiles`, and x is rounded to `inputs` bits
    (quantization/integer.py)."""
    rows, d = x.shape
    out = x.new_empty(rows, n)
    failed = _FUNCTIONS["linear_packed"](
        *(x.data_ptr(), q.data_ptr(), scales.data_ptr(), None if mins is None else mins.data_ptr()),
        *(None if bias is None else bias.data_ptr(), out.data_ptr(), rows, n, d, bits, inputs, torch.get_num_threads()),
    )
    if failed:
        raise RuntimeError(f"native.cpp does not know weights of {bits} bits with inputs of {inputs}")
    return out


def pack_int4(
    weight: Float[Tensor, "N D"], shrinks: tuple[float, ...], n_fits: int
) -> tuple[Tensor, Float[Tensor, "N g"], Float[Tensor, "N g"]]:
    """q, scales and mins of `Int4` (quantization/integer.py), which explains the search; weight is contiguous."""
    (n, d), starts = weight.shape, torch.tensor(shrinks)
    q, scales, mins = torch.empty(n, d // 2, dtype=torch.uint8), torch.empty(n, d // 32), torch.empty(n, d // 32)
    _FUNCTIONS["pack_int4"](
        *(each.data_ptr() for each in (weight, q, scales, mins, starts)),
        *(n * d // 32, len(shrinks), n_fits, torch.get_num_threads()),
    )
    return q, scales, mins


def search_int4(
    weights: Float[Tensor, "32 n"],
    factor: Float[Tensor, "32 32"],
    inverse: Float[Tensor, "32 32"],
    shrinks: tuple[float, ...],
    n_fits: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `search` of quantization/int4_rounding.py finds; weights is contiguous, and factor and inverse are U and U^-1."""
    points, ones, starts, n = inverse.T @ weights, inverse.sum(0), torch.tensor(shrinks), weights.shape[1]
    u, lost, scales, mins = (torch.empty(shape) for shape in ((32, n), (32, n), n, n))
    factor = factor.clone(memory_format=torch.contiguous_format)
    factor.diagonal().reciprocal_()
    _FUNCTIONS["search_int4"](
        *(each.data_ptr() for each in (weights, points, factor, ones, starts, u, lost, scales, mins)),
        *(n, len(shrinks), n_fits, torch.get_num_threads()),
    )
    return u, scales, mins, lost


def paged_attention(
    q: Float[Tensor, "B H E"],
    k: Float[Tensor, "n K block E"],
    v: Float[Tensor, "n K block E"],
    table: Int[Tensor, "B m"],
    counts: Int[Tensor, " B"],
    scale: float,
    window: int = 0,
) -> Float[Tensor, "B H E"]:
    """Attention of one query a row over the last `window` (0: all) of its `counts` tokens.

    Token p of row b lies in block `table[b, p // block]`, slot `p % block`. A row of 0 tokens gives zeros. The last two axes of
    k and v are contiguous.
    """
    q, table, counts = q.contiguous(), table.int().contiguous(), counts.int().contiguous()
    (B, H, E), (_, K, block, _) = q.shape, k.shape
    out = torch.empty_like(q)
    _FUNCTIONS["paged_attention"](
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), table.data_ptr(), counts.data_ptr(), out.data_ptr()),
        *(B, H, K, E, block, table.shape[1], k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(scale, window, torch.get_num_threads()),
    )
    return out


def store(
    k: Float[Tensor, "B K E"],
    v: Float[Tensor, "B K E"],
    pool_k: Float[Tensor, "n K block E"],
    pool_v: Float[Tensor, "n K block E"],
    table: Int[Tensor, "B m"],
    positions: Int[Tensor, " B"],
) -> None:
    """Write each row's key and value at its position. A negative position writes nothing."""
    k, v = (x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in (k, v))
    table, positions = table.int().contiguous(), positions.int().contiguous()
    (B, K, E), block = k.shape, pool_k.shape[2]
    _FUNCTIONS["paged_store"](
        *(k.data_ptr(), v.data_ptr(), pool_k.data_ptr(), pool_v.data_ptr(), table.data_ptr(), positions.data_ptr()),
        *(B, K, E, block, table.shape[1], pool_k.stride(0), pool_k.stride(1), pool_v.stride(0), pool_v.stride(1)),
        *(k.stride(0), v.stride(0)),
    )


def text_attention(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B K S E"],
    v: Float[Tensor, "B K S E"],
    scale: float,
    starts: tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None = None,
    *,
    causal: bool = False,
) -> Float[Tensor, "B H T E"]:
    """Attention of all queries of each row over all its keys, in float32.

    With `starts`, B is 1 and the row holds several texts: where each one's queries and keys start, and the end of the last. Each
    text attends to itself alone. q, k and v are strided as `lies_in_rows` says, and E is a multiple of `TEXT_WIDTHS`.
    """
    (B, H, T, E), (_, K, S, _) = q.shape, k.shape
    out = q.new_empty(B, T, H, E)
    queries, keys = (None, None) if starts is None else (each.int().contiguous() for each in starts)
    _FUNCTIONS["text_attention"](
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),
        *(None if each is None else each.data_ptr() for each in (queries, keys)),
        *(B if queries is None else len(queries) - 1, T, S, H, K, E),
        *(stride for each in (q, k, v) for stride in (each.stride(0 if each.shape[2] == 1 else 2), each.stride(1))),
        *(scale, causal, torch.get_num_threads()),
    )
    return out.transpose(1, 2)


def lies_in_rows(x: Float[Tensor, "B h T E"]) -> bool:
    """Whether one stride leads from each token to the next, across rows too, and each head is contiguous."""
    return x.stride(3) == 1 and (1 in (x.shape[0], x.shape[2]) or x.stride(0) == x.shape[2] * x.stride(2))


def top_log_probs(
    logits: Float[Tensor, "R V"], n: int, bias: Float[Tensor, " V"] | None
) -> tuple[Float[Tensor, "R n"], Int[Tensor, "R n"]]:
    """The n largest of log_softmax(row) + bias, descending, of equals the lower id first; all float32 and contiguous."""
    R, V = logits.shape
    values, ids = logits.new_empty(R, n), torch.empty(R, n, dtype=torch.int64)
    _FUNCTIONS["top_log_probs"](
        *(logits.data_ptr(), None if bias is None else bias.data_ptr(), values.data_ptr(), ids.data_ptr()),
        *(R, V, n, torch.get_num_threads()),
    )
    return values, ids


def draw(logits: Float[Tensor, "R V"], seeds: Int[Tensor, " R"], steps: Int[Tensor, " R"]) -> Int[Tensor, " R"]:
    """`sample` of sampling/strategy.py; logits are float32, seeds and steps int64, and all contiguous."""
    (R, V), tokens = logits.shape, torch.empty(len(logits), dtype=torch.int64)
    _FUNCTIONS["draw"](
        *(logits.data_ptr(), seeds.data_ptr(), steps.data_ptr(), tokens.data_ptr(), R, V, torch.get_num_threads())
    )
    return tokens


def decode_step(address: int) -> None:
    """One token a row through a decoder; `address` is that of a `Step` (decode_step.py)."""
    if _FUNCTIONS["decode_step"](address):
        raise RuntimeError("native.cpp does not know an activation, a norm or a weight format that it was given")


@functools.cache
def codes(kind: str) -> dict[str, int]:
    """The numbers that stand for kinds in native.cpp, by name: of "activation" or "norm". Empty without the library."""
    library, _ = _library()
    if library is None:
        return {}
    names = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, f"{kind}_names"))).decode()
    return {name: code for code, name in enumerate(names.split())}


_FUNCTIONS: dict[str, Any] = {}  # filled when the library is loaded
_LOCK = threading.Lock()


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str | None]:
    """The loaded library, or why there is none."""
    with _LOCK:
        if os.environ.get("CLEARHEAD_NATIVE") == "0":
            return None, "CLEARHEAD_NATIVE=0 turns it off"
        try:
            native_library.share_openmp()
            library = ctypes.CDLL(str(native_library.locate()))
            for name, (arguments, result) in SIGNATURES.items():
                _FUNCTIONS[name] = function = getattr(library, name)
                function.argtypes, function.restype = arguments, result
        except (OSError, RuntimeError) as error:
            native_library.say_once(str(error))
            return None, str(error)
        return library, None
