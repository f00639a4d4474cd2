"""Files that a kill, a full disk or a planted link can not spoil: new files, replaced texts, synced folders, locks.

A new file is opened under a random name and never through a link: a folder may come from a stranger. It replaces the old one when
it is complete, and the folder is synced after the rename, so that a power cut does not undo it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no locks there
    fcntl = None

NOT_A_LINK: int = getattr(os, "O_NOFOLLOW", 0)
BINARY: int = getattr(os, "O_BINARY", 0)
NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | NOT_A_LINK | BINARY


def write_new(file: Path, content: bytes) -> None:
    """Write a file that must not exist yet, also not as a link, and sync it."""
    with os.fdopen(os.open(file, NEW, 0o666), "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_text(file: Path, text: str) -> None:
    """Write atomically: a reader sees the old file or the new one. A link in the file's place is replaced, not followed."""
    work = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_new(work, text.encode())
        os.replace(work, file)
    finally:
        with suppress(OSError):
            os.unlink(work)
    sync_folder(file.parent)


def sync_file(file: Path) -> None:
    """Wait until the file's content is on the disk."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk. Some systems can not open folders, some file systems not sync them."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def try_lock(handle: int) -> bool:
    """Lock an open file or folder until it is closed; False if another process holds it. Without locks here, True."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


@contextmanager
def stage(folder: Path, prefix: str) -> Generator[Path]:
    """A new hidden folder in `folder`, locked while it is open: `sweep` knows by the lock that somebody still writes there."""
    path = folder / f"{prefix}{secrets.token_hex(8)}"
    os.mkdir(path)
    handle = None
    try:
        if fcntl is not None:
            handle = os.open(path, os.O_RDONLY)
            try_lock(handle)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def sweep(folder: Path, prefix: str) -> None:
    """Remove the stages that killed processes left in `folder`. One whose process still runs stays."""
    if fcntl is None:
        return
    for path in folder.glob(f"{prefix}*"):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | NOT_A_LINK)
            try:
                if try_lock(handle):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)
