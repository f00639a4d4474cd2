"""Weights in huge pages (2 MB instead of 4 kB): fewer address translations, a decode step is faster by a fifth and more.

Addresses do not change: the operating system replaces small pages by huge ones. Linux does this by itself only slowly, if at all,
and never for a mapped file; such memory is copied first. A write while it is copied would be lost, so it waits until no other
thread could write. On other systems nothing happens.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.kernels.memory import available_memory

PAGE, PIECE = 2**21, 2**22  # bytes: of a huge page, and of what is moved at a time
COLLAPSE = 25  # of madvise, since Linux 6.1
MOVE_HERE = 1 | 2  # of mremap: MAYMOVE and FIXED
FAILED = ctypes.c_void_p(-1).value  # what mmap and mremap return on failure

Range = tuple[int, int]


def move(tensors: Iterable[Tensor], *, shared: bool = True) -> Generator[None]:
    """Moves PIECE bytes at each step of the generator, or nothing while it waits.

    `shared`: another thread may have these tensors, so memory of a mapped file waits until the process has one thread of Python.
    """
    if sys.platform != "linux":
        return
    held = [
        tensor.detach() for tensor in tensors if not tensor.is_cuda
    ]  # its memory stays, even if a parameter gets other data
    wanted = _joined((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in held)
    libc = _libc()
    # A copy of a file takes memory that the mapped file does not: a model that is larger than memory stays in its file.
    fits = sum(high - low for low, high in wanted) < available_memory() // 2
    for start, end, is_file in _maps():
        if is_file and not fits:
            continue
        for low, high in wanted:
            # Of a file only our own bytes; of other memory, also what shares a huge page with them.
            first, last = (
                (max(start, low), min(end, high)) if is_file else (max(start, _down(low)), min(end, _up(high)))
            )
            for at in range(_up(first), _down(last), PIECE):
                size = min(PIECE, _down(last) - at)
                while is_file and shared and threading.active_count() > 1:
                    yield
                if is_file:
                    _copy(libc, at, size)
                else:
                    libc.madvise(at, size, COLLAPSE)
                yield


def _libc() -> Any:
    libc: Any = ctypes.CDLL(None)
    place, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.madvise.argtypes = [place, size, number]
    libc.munmap.argtypes = [place, size]
    libc.mmap.argtypes = [place, size, number, number, number, ctypes.c_long]
    libc.mremap.argtypes = [place, size, size, number, place]
    libc.mmap.restype = libc.mremap.restype = place
    return libc


def _copy(libc: Any, at: int, size: int) -> None:
    """Replace a mapped file's memory by anonymous memory with the same content."""
    whole = size + PAGE
    room = libc.mmap(None, whole, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if room == FAILED:
        return
    fresh = _up(room)
    libc.madvise(fresh, size, mmap.MADV_HUGEPAGE)
    ctypes.memmove(fresh, at, size)
    moved = libc.mremap(fresh, size, size, MOVE_HERE, at) != FAILED
    # mremap left a hole that other threads may already have filled: unmap only what is left around it.
    for start, end in ((room, fresh), (fresh + size if moved else fresh, room + whole)):
        if end > start:
            libc.munmap(start, end - start)


def _maps() -> list[tuple[int, int, bool]]:
    """Private writable memory of this process: start, end, and whether it is a mapped file."""
    found: list[tuple[int, int, bool]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, kind, _, _, inode, *_ = line.split()
        if kind.startswith("rw") and kind.endswith("p"):
            start, end = (int(part, 16) for part in span.split("-"))
            found.append((start, end, inode != "0"))
    return found


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Sorted, and joined where less than a page lies between two."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start - found[-1][1] < PAGE:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _down(at: int) -> int:
    return at // PAGE * PAGE


def _up(at: int) -> int:
    return -(-at // PAGE) * PAGE
