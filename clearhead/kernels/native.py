"""native.cpp for Python: compiled on first use for the machine it runs on, kept, and called without copies.

It needs a C++ compiler (`$CXX`, or g++, clang++ or c++ on the path) and the OpenMP library that torch came with, whose threads it
shares. Where one is missing nothing breaks: `why_not` says what, and torch's own operators do the work.

CLEARHEAD_NATIVE=0 turns it off. CLEARHEAD_CACHE is the folder that keeps the compiled file, ~/.cache/clearhead if not set.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

SOURCE, HEADERS = Path(__file__).with_name("native.cpp"), Path(__file__).with_name("cpp")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC")
# Apple's compiler knows OpenMP only this way.
OPENMP = ("-Xpreprocessor", "-fopenmp") if sys.platform == "darwin" else ("-fopenmp",)

TEXT_WIDTHS = 16  # numbers in the widest register: `text_attention` takes heads of whole ones

POINTER, INT, FLOAT, SMALL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES = {
    "linear_f32": [POINTER] * 4 + [INT] * 3 + [SMALL],
    "linear_packed": [POINTER] * 6 + [INT] * 4 + [SMALL],
    "pack_int4": [POINTER] * 5 + [INT] * 3 + [SMALL],
    "paged_attention": [POINTER] * 6 + [INT] * 10 + [FLOAT, INT, SMALL],
    "paged_store": [POINTER] * 6 + [INT] * 11,
    "text_attention": [POINTER] * 6 + [INT] * 12 + [FLOAT, SMALL, SMALL],
    "one_token": [POINTER],
}


class Matrix(ctypes.Structure):
    _fields_ = [(name, POINTER) for name in ("q", "scales", "mins", "bias")] + [
        (name, INT) for name in ("n", "d", "bits")
    ]


class Norm(ctypes.Structure):
    _fields_ = [("weight", POINTER), ("bias", POINTER), ("eps", FLOAT), ("is_rms", ctypes.c_int32)]


class Attention(ctypes.Structure):
    _fields_ = [("in", Matrix), ("out", Matrix), ("q_norm", Norm), ("k_norm", Norm), ("scale", FLOAT)]


class Layer(ctypes.Structure):
    _fields_ = [("self", Attention), ("cross", Attention), ("up", Matrix), ("down", Matrix), ("norms", Norm * 3)]


class Ends(ctypes.Structure):
    _fields_ = [
        *(("embedding", Matrix), ("head", Matrix), ("norm", Norm)),
        *((name, POINTER) for name in ("positions", "tokens", "logits", "likeliest")),
        *(("factor", FLOAT), ("scale", FLOAT)),
    ]


class Blocks(ctypes.Structure):
    _fields_ = [("table", POINTER), ("counts", POINTER), ("width", INT)]


class Step(ctypes.Structure):
    """What `one_token` of native.cpp takes; the names are explained there."""

    _fields_ = [
        *(("layers", POINTER), ("ends", POINTER), ("last", Norm)),
        *((name, POINTER) for name in ("x", "pool", "cos", "sin")),
        *(("pages", Blocks), ("source", Blocks)),
        *((name, INT) for name in ("n_layers", "rows", "d", "heads", "kv_heads", "width", "n_turns", "window")),
        *((name, INT) for name in ("block", "block_stride", "layer_stride", "value_stride", "head_stride")),
        *((name, INT) for name in ("has_cross", "norm_first", "is_gated", "activation", "threads")),
    ]


def is_there() -> bool:
    return _library()[0] is not None


def has_tiles() -> bool:
    """Whether the kernels of packed weights are those for tiles (quantized.py)."""
    library, _ = _library()
    return library is not None and bool(ctypes.c_int.in_dll(library, "has_tiles").value)


def why_not() -> str | None:
    """What keeps the kernels from being used, or None."""
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
) -> Float[Tensor, "R N"]:
    """x W^T + b in float32, with W of n rows as `quantized` holds it, in tiles where `has_tiles`."""
    rows, d = x.shape
    out = x.new_empty(rows, n)
    _FUNCTIONS["linear_packed"](
        *(x.data_ptr(), q.data_ptr(), scales.data_ptr(), None if mins is None else mins.data_ptr()),
        *(None if bias is None else bias.data_ptr(), out.data_ptr(), rows, n, d, bits, torch.get_num_threads()),
    )
    return out


def pack_int4(
    weight: Float[Tensor, "N D"], shrinks: tuple[float, ...], n_fits: int
) -> tuple[Tensor, Float[Tensor, "N g"], Float[Tensor, "N g"]]:
    """q, scales and mins of `quantized.Int4`, which explains the search; weight is contiguous."""
    (n, d), starts = weight.shape, torch.tensor(shrinks)
    q, scales, mins = torch.empty(n, d // 2, dtype=torch.uint8), torch.empty(n, d // 32), torch.empty(n, d // 32)
    _FUNCTIONS["pack_int4"](
        *(each.data_ptr() for each in (weight, q, scales, mins, starts)),
        *(n * d // 32, len(shrinks), n_fits, torch.get_num_threads()),
    )
    return q, scales, mins


def paged_attention(
    q: Float[Tensor, "B H E"],
    k: Float[Tensor, "n K block E"],
    v: Float[Tensor, "n K block E"],
    table: Int[Tensor, "B m"],
    counts: Int[Tensor, " B"],
    scale: float,
    window: int = 0,
) -> Float[Tensor, "B H E"]:
    """Each row's query over the last `window` (0: all) of its `counts` tokens, where they lie: token p of row b in block
    `table[b, p // block]`, slot `p % block`. A row of 0 tokens gives zeros. The last two axes of k and v are contiguous.
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
    """Write each row's next token, which stands at `positions` (negative: nowhere), into its block."""
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
    """All queries of each row over all its keys, in float32; of the one row where `starts` says so, text by text.

    Tokens lie one after the other at equal distances, as `lies_in_rows` tells, and E is a multiple of `TEXT_WIDTHS`.
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
    """Whether the tokens of all rows lie at equal distances, the numbers of each head side by side."""
    return x.stride(3) == 1 and (1 in (x.shape[0], x.shape[2]) or x.stride(0) == x.shape[2] * x.stride(2))


def one_token(step: Step) -> None:
    """From embeddings to final states, in place."""
    _FUNCTIONS["one_token"](ctypes.addressof(step))


_FUNCTIONS: dict[str, Any] = {}  # filled when the library is loaded
_LOCK = threading.Lock()


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str | None]:
    """The loaded library, or why there is none."""
    with _LOCK:
        if os.environ.get("CLEARHEAD_NATIVE") == "0":
            return None, "CLEARHEAD_NATIVE=0 turns it off"
        try:
            library = ctypes.CDLL(str(_compiled()))
            for name, signature in SIGNATURES.items():
                _FUNCTIONS[name] = function = getattr(library, name)
                function.argtypes, function.restype = signature, None
        except (OSError, RuntimeError) as error:
            return None, str(error)
        return library, None


def cache_folder() -> Path:
    """Where what is made once for this machine is kept."""
    return Path(os.environ.get("CLEARHEAD_CACHE") or Path.home() / ".cache" / "clearhead")


def _compiled() -> Path:
    """The compiled file, from the cache or made now."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "clang++", "c++"))), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler was found; install g++, or name one in CXX")
    openmp = _openmp()
    sources = [file.read_text() for file in (SOURCE, *sorted(HEADERS.glob("*.h")))]
    made_of = (sources, compiler, os.stat(compiler).st_mtime_ns, openmp, FLAGS, _processor())
    name = f"native-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    folder = cache_folder()
    if (folder / name).exists():
        return folder / name
    folder.mkdir(parents=True, exist_ok=True)
    # Made aside and moved: another process finds all of it or nothing, and of two that make it the last one stays.
    with tempfile.TemporaryDirectory(dir=folder) as work:
        # Compiled and linked apart: -fopenmp at the link would bring the system's OpenMP beside torch's.
        steps = (
            [compiler, *FLAGS[:-2], FLAGS[-1], *OPENMP, "-c", str(SOURCE), "-o", f"{work}/native.o"],
            [compiler, *FLAGS, f"{work}/native.o", str(openmp), "-o", f"{work}/{name}"],
        )
        for command in steps:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        os.replace(f"{work}/{name}", folder / name)
    return folder / name


def _openmp() -> Path:
    """The OpenMP library in this process: torch's."""
    names = ("libgomp", "libomp", "libiomp5")
    maps = Path("/proc/self/maps")
    loaded = {Path(line.split()[-1]) for line in maps.read_text().splitlines()} if maps.exists() else set[Path]()
    beside = set((Path(torch.__file__).parent / "lib").glob("lib*"))
    for path in sorted(loaded) + sorted(beside):
        if path.name.startswith(names):
            return path
    raise RuntimeError("torch's OpenMP library was not found")


def _processor() -> str:
    """What -march=native depends on, for a home folder that several machines share."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    kept = [line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")]
    return "\n".join([platform.machine(), platform.processor(), *kept])
