"""Free memory of this machine, as each system tells it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


class _Status(ctypes.Structure):
    """MEMORYSTATUSEX of Windows."""

    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "free", "total_page", "free_page", "total_virtual")),
        *((name, ctypes.c_uint64) for name in ("free_virtual", "free_extended")),
    ]


def free_memory() -> int:
    """Bytes that programs can still get. macOS tells only how much there is in all."""
    table = Path("/proc/meminfo")
    if table.exists():
        lines = dict(line.split(":", 1) for line in table.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    status = _Status(length=ctypes.sizeof(_Status))
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):  # type: ignore[attr-defined]
        raise OSError("Windows did not say how much memory is free")
    return status.free
