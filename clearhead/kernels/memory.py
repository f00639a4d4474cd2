"""Free memory of this machine and of GPUs, and the check before much of it is taken. Each system is asked in its own way.

What can not be found out counts as enough: work that fits is never refused.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from clearhead.errors import InputError

SMALL = 2**26  # bytes; less is never checked, so that small models are built as fast as ever
UNKNOWN = sys.maxsize
CGROUPS = Path("/sys/fs/cgroup")
# Files of a control group, versions 2 and 1: the limit, what is in use, and the line of memory.stat for files that can be dropped.
CGROUP_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def available_memory(device: torch.device | str = "cpu") -> int:
    """Free bytes: on a CUDA GPU what is free or cached by torch; else what the system and its control groups leave."""
    device = torch.device(device)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        return min(_system_memory(), *_cgroup_memory(), UNKNOWN)
    except (OSError, ValueError, KeyError, AttributeError, IndexError):  # files of an unusual system
        return UNKNOWN


def require_memory(needed: int, device: torch.device | str, what: str, advise: Callable[[int], str]) -> None:
    """Refuse what needs more bytes than are free. `advise` gets the number of free bytes and names what would fit."""
    if needed <= SMALL or torch.device(device).type == "meta":
        return
    free = available_memory(device)
    if needed > free:
        place = "" if torch.device(device).type == "cpu" else f" on {device}"
        raise InputError(
            f"{what} needs {spell_bytes(needed)} of memory, and {spell_bytes(free)} are free{place}; {advise(free)}"
        )


def spell_bytes(n: int) -> str:
    return f"{n / 1e9:,.1f} GB" if n >= 1e8 else f"{n / 1e6:,.1f} MB"


def _system_memory() -> int:
    table = Path("/proc/meminfo")
    if table.exists():
        lines = dict(line.split(":", 1) for line in table.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    if hasattr(ctypes, "windll"):  # Windows
        return _windows_memory()
    if sys.platform == "darwin":
        return read_vm_stat(subprocess.run(["vm_stat"], capture_output=True, text=True, check=True, timeout=5).stdout)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # all memory


def _windows_memory() -> int:
    numbers = [
        (name, ctypes.c_ulonglong)
        for name in ("total", "available", "total_file", "free_file", "total_virtual", "free_virtual", "extended")
    ]

    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong), *numbers]

    status: Any = Status(length=ctypes.sizeof(Status))
    windows: Any = getattr(ctypes, "windll")  # noqa: B009 - only there on Windows
    return int(status.available) if windows.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else UNKNOWN


def read_vm_stat(text: str) -> int:
    """Free bytes by macOS's vm_stat: pages that are free, or that are given up when somebody needs them."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = re.findall(r"Pages (?:free|inactive|speculative|purgeable):\s+(\d+)", text)
    return int(size[1]) * sum(map(int, pages)) if size and pages else UNKNOWN


def _cgroup_memory() -> Iterator[int]:
    """What each control group above this process leaves. Files in the cache count as free: the system drops them."""
    for folder in cgroup_folders():
        for limit, use, reclaimable in CGROUP_FILES:
            if (folder / limit).exists() and (most := (folder / limit).read_text().strip()).isdigit():
                stat = (folder / "memory.stat").read_text() if (folder / "memory.stat").exists() else ""
                lines = dict(line.split(" ", 1) for line in stat.splitlines())
                cached = sum(int(lines.get(name, 0)) for name in reclaimable)
                yield max(0, int(most) - max(0, int((folder / use).read_text()) - cached))


def cgroup_folders() -> Iterator[Path]:
    """The folders of this process's control groups, up to the root; in a container only the root may be there."""
    table = Path("/proc/self/cgroup")
    if not table.exists():
        return
    for line in table.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = CGROUPS / controllers
            folder = root / path.lstrip("/")
            while folder != root:
                yield folder
                folder = folder.parent
            yield root
