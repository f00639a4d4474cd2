"""A store of tokenised data: columns of numbers in memory-mapped files, written once. It may be larger than memory.

store.json         the columns, what the store was made from, the size and checksum of every other file, and its own checksum
NAME.bin           the values of column NAME
NAME.offsets.bin   int64: the start of each row, and the end; only for columns whose rows differ in length
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from clearhead.errors import CheckpointError, InputError, did_you_mean

VERSION = 1
SEAL = "checksum"  # of store.json itself
_BLOCK = 2**20


class Column:
    """The rows of one column: integer sequences of any length (with `offsets`), or one value or array each."""

    def __init__(self, flat: NDArray[Any], offsets: NDArray[np.int64] | None) -> None:
        self.flat, self.offsets = flat, offsets

    def __len__(self) -> int:
        return len(self.flat) if self.offsets is None else len(self.offsets) - 1

    def __getitem__(self, row: SupportsIndex) -> Any:
        if not -len(self) <= index(row) < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row = index(row) % len(self)
        return self.flat[row] if self.offsets is None else self.flat[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens in each row."""
        return np.ones(len(self), np.int64) if self.offsets is None else np.diff(self.offsets)


class Store:
    """An open store. Rows are read from disk when they are used."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            content = json.loads((self.folder / "store.json").read_text(encoding="utf-8"))
            if content["version"] != VERSION:
                raise _damaged(self.folder, f"its format is version {content['version']}, this program's {VERSION}")
            seal = content.pop(SEAL, None)  # stores of before have none
            if seal is not None and seal != _seal(content):
                raise _damaged(self.folder, "store.json does not match its checksum")
            self.info: dict[str, Any] = content["info"]
            self._files: dict[str, dict[str, int]] = content["files"]
            columns: dict[str, Any] = content["columns"]
            for name, expected in self._files.items():
                size = (self.folder / name).stat().st_size
                if size != expected["bytes"]:
                    raise _damaged(self.folder, f"{name} has {size:,} bytes, not {expected['bytes']:,}")
            self._columns = {name: self._map(name, **fields) for name, fields in columns.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(self.folder, repr(error)[:100]) from None

    def _map(self, name: str, dtype: str, shape: Sequence[int], ragged: bool) -> Column:
        flat = _map_file(self.folder / f"{name}.bin", dtype).reshape(-1, *shape)
        return Column(flat, _map_file(self.folder / f"{name}.offsets.bin", "int64") if ragged else None)

    def __getitem__(self, name: str) -> Column:
        if name not in self._columns:
            raise InputError(f"the store {self.folder} has no column {name!r}; {did_you_mean(name, self._columns)}")
        return self._columns[name]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def check(self) -> None:
        """Read every byte and compare the checksums. Opening a store compares only the sizes, and the checksum of store.json."""
        for name, expected in self._files.items():
            crc = 0
            with (self.folder / name).open("rb") as file:
                while block := file.read(_BLOCK):
                    crc = zlib.crc32(block, crc)
            if crc != expected["crc32"]:
                raise _damaged(self.folder, f"{name} has checksum {crc:08x}, not {expected['crc32']:08x}")


def _seal(content: Mapping[str, Any]) -> int:
    """The checksum of all other fields of store.json."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _map_file(file: Path, dtype: str) -> NDArray[Any]:
    # An empty file can not be mapped.
    return np.memmap(file, dtype, "r") if file.stat().st_size else np.zeros(0, dtype)


def _damaged(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{folder} is no whole store ({why}); delete the folder and prepare the data again")


class StoreWriter:
    """Writes a store row by row. The folder gets its name at the end, so that a process that is killed leaves no incomplete store.

    `columns` is the dtype of each column; `shapes` the shape of a row, for columns where all rows have the same ("()": a number).
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        columns: Mapping[str, DTypeLike],
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.info: dict[str, Any] = {}
        self._dtypes = {name: np.dtype(dtype) for name, dtype in columns.items()}
        self._shapes = shapes or {}
        self._temporary = self.folder.with_name(f".{self.folder.name}.{os.getpid()}.tmp")
        self._open: dict[str, BinaryIO] = {}
        self._files: dict[str, dict[str, int]] = {}

    def __enter__(self) -> StoreWriter:
        if self.folder.exists() and not (self.folder / "store.json").exists() and any(self.folder.iterdir()):
            raise InputError(f"{self.folder} is there and is no store; choose an empty or a new folder")
        try:
            _clear_leftovers(self.folder)
            self._temporary.mkdir(parents=True)
        except OSError as error:
            raise self._failure(error) from None
        for name in self._dtypes:
            if name not in self._shapes:
                self._write(f"{name}.offsets.bin", np.zeros(1, np.int64))
            self._write(f"{name}.bin", np.zeros(0, self._dtypes[name]))
        return self

    def add(self, **values: Any) -> None:
        """Add one row: a value for each column."""
        for name, value in values.items():
            self.add_part(name, value, ends=True)

    def add_part(self, name: str, value: Any, *, ends: bool) -> None:
        """Add a part of a row of one column, for rows that are too long for memory."""
        self._write(f"{name}.bin", np.asarray(value, self._dtypes[name]))
        if ends and name not in self._shapes:
            end = self._files[f"{name}.bin"]["bytes"] // self._dtypes[name].itemsize
            self._write(f"{name}.offsets.bin", np.array([end], np.int64))

    def count(self) -> dict[str, tuple[int, int]]:
        """Rows and values written so far, by column."""
        counts: dict[str, tuple[int, int]] = {}
        for name, dtype in self._dtypes.items():
            values = self._files[f"{name}.bin"]["bytes"] // dtype.itemsize
            if name in self._shapes:
                counts[name] = values // math.prod(self._shapes[name]), values
            else:
                counts[name] = self._files[f"{name}.offsets.bin"]["bytes"] // 8 - 1, values
        return counts

    def _write(self, name: str, values: NDArray[Any]) -> None:
        block = values.tobytes()
        try:
            if name not in self._open:
                self._open[name] = (self._temporary / name).open("wb")
                self._files[name] = {"bytes": 0, "crc32": 0}
            self._open[name].write(block)
        except OSError as error:
            raise self._failure(error) from None
        entry = self._files[name]
        entry["bytes"] += len(block)
        entry["crc32"] = zlib.crc32(block, entry["crc32"])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as failure:
            raise self._failure(failure) from None
        finally:
            for file in self._open.values():
                # An error in flushing was already raised above, or the file is deleted anyway.
                with contextlib.suppress(OSError):
                    file.close()
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _finish(self) -> None:
        columns = {
            name: {"dtype": dtype.name, "shape": list(self._shapes.get(name, ())), "ragged": name not in self._shapes}
            for name, dtype in self._dtypes.items()
        }
        content = {"version": VERSION, "columns": columns, "files": self._files, "info": self.info}
        content[SEAL] = _seal(content)
        self._open["store.json"] = (self._temporary / "store.json").open("wb")
        self._open["store.json"].write(json.dumps(content, indent=2, ensure_ascii=False).encode())
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
        old = self._temporary.with_suffix(".old")
        if self.folder.exists():
            self.folder.rename(old)
        self._temporary.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _failure(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"the store {self.folder} can not be written ({error.strerror}); free some space, or choose a folder you may write to"
        )


def _clear_leftovers(folder: Path) -> None:
    """Remove the temporary folders of writers that were killed."""
    for place in folder.parent.glob(f".{folder.name}.*.*"):
        process = place.suffixes[-2][1:] if place.suffix in (".tmp", ".old") else ""
        try:
            os.kill(int(process), 0)  # signal 0 only checks whether the process exists
        except (ValueError, PermissionError):
            continue
        except ProcessLookupError:
            shutil.rmtree(place, ignore_errors=True)
