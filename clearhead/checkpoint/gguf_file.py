"""The tensors of a .gguf file, read one by one.

The header is read here, not by the `gguf` package: its reader trusts every length in the file, so that a wrong one makes it hang
or fill the memory. The package dequantises the numbers, a few rows at a time, into the model's own memory.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clearhead.checkpoint.weight_files import FileRange, MappedWeights
from clearhead.errors import CheckpointError

MAGIC = b"GGUF"
# The header is the metadata and the list of tensors; a tokenizer of 262,144 tokens with merges takes 20 MB of it.
MAX_HEADER = 64 * 2**20
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CHUNK = 2**22  # numbers dequantised at once


class GgufWeights(MappedWeights):
    """The tensors of a .gguf file. Quantised ones are read as float32."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.packed: dict[str, Any] = {}  # name -> its quantisation
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            self.metadata, entries, start = read_header(path)
            for name, (shape, number, offset) in entries.items():
                kind = GGMLQuantizationType(number)
                block, nbytes = GGML_QUANT_SIZES[kind]
                if shape[-1] % block:
                    raise ValueError(f"rows of {shape[-1]} in {name!r} are no whole blocks of {block}")
                self.shapes[name] = shape
                self.dtypes[name] = PLAIN.get(kind.name, torch.float32)
                self.ranges[name] = FileRange(path, start + offset, math.prod(shape) // block * nbytes)
                if kind.name not in PLAIN:
                    self._unpack(np.zeros((1, nbytes), np.uint8), kind)  # raises now, not later, if it can not be read
                    self.packed[name] = kind
            self._check_ranges()
            self.map(path)
        except OSError as error:
            raise CheckpointError(f"{path} can not be read ({error.strerror or error}); is the path right?") from None
        except (ValueError, KeyError, OverflowError, NotImplementedError, struct.error) as error:
            raise CheckpointError(f"{path} is not a whole GGUF file ({error}); fetch it again") from None

    def read(self, name: str) -> Tensor:
        if name not in self.packed:
            return super().read(name)
        out = torch.empty(self.shapes[name])
        self.read_into(name, out)
        return out

    def read_stacked(self, names: Sequence[str]) -> Tensor | None:
        return None if any(name in self.packed for name in names) else super().read_stacked(names)

    def read_into(self, name: str, out: Tensor) -> None:
        if name not in self.packed:
            return super().read_into(name, out)
        source, shape = self.ranges[name], self.shapes[name]
        rows = out.view(-1, shape[-1])
        width = source.nbytes // len(rows)
        step = max(1, CHUNK // shape[-1])
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            raw = np.fromfile(self.path, np.uint8, len(part) * width, offset=source.start + first * width)
            part.copy_(torch.from_numpy(self._unpack(raw.reshape(-1, width), self.packed[name])))
        return None

    def _unpack(self, raw: npt.NDArray[np.uint8], kind: Any) -> npt.NDArray[np.float32]:
        from gguf.quants import dequantize

        with np.errstate(all="ignore"):  # a damaged scale may be infinite, and numpy would warn
            return dequantize(raw, kind)

    def _check_ranges(self) -> None:
        size, total = self.path.stat().st_size, 0
        for name, part in self.ranges.items():
            total += part.nbytes
            # Tensors that overlap would let a small file ask for any amount of memory.
            if part.start + part.nbytes > size or total > size:
                raise ValueError(f"it has {size:,} bytes, too few for {name!r}")


Entries = dict[str, tuple[tuple[int, ...], int, int]]  # name -> shape, type, offset


def read_header(path: Path) -> tuple[dict[str, Any], Entries, int]:
    """The metadata without its lists (they belong to the tokenizer), the tensors' entries, and the offset of their bytes."""
    size = min(path.stat().st_size, MAX_HEADER)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
        header = HeaderReader(data)
        magic, version, n_tensors, n_keys = header.take("4sIQQ")
        if magic != MAGIC or version not in (2, 3):
            raise ValueError(f"it starts with {magic!r}, version {version}; little-endian versions 2 and 3 are read")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):  # a count that is too high ends in an error, at the end of the data
            key = header.text()
            value = header.value()
            if value is not None:
                metadata[key] = value
        entries: Entries = {}
        for _ in range(n_tensors):
            name, (n_dims,) = header.text(), header.take("I")
            if name in entries or not 1 <= n_dims <= 4:
                raise ValueError(f"{name!r} is there twice, or has {n_dims} dimensions")
            shape = header.take(f"{n_dims}Q")[::-1]  # the fastest dimension first, in the file
            if not all(0 < n < 2**31 for n in shape):
                raise ValueError(f"{name!r} has shape {shape}")
            kind, offset = header.take("IQ")
            entries[name] = shape, kind, offset
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment > MAX_HEADER:
            raise ValueError(f"its tensors are aligned to {alignment!r}")
        return metadata, entries, -(-header.at // alignment) * alignment


class HeaderReader:
    """Reads a header from its start to its end. A length that leads past the end is an error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values

    def skip(self, nbytes: int) -> None:
        if nbytes > len(self.data) - self.at:
            raise ValueError(
                f"{nbytes:,} bytes are announced at {self.at:,}, and the header ends at {len(self.data):,}"
            )
        self.at += nbytes

    def text(self) -> str:
        (length,) = self.take("Q")
        self.skip(length)
        return self.data[self.at - length : self.at].decode()

    def value(self) -> int | float | bool | str | None:
        """A number or a text; None for a list, which is skipped."""
        (kind,) = self.take("I")
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.take(SCALARS[kind])[0]
        kind, count = self.take("IQ")
        if kind == STRING:
            for _ in range(count):
                self.skip(*self.take("Q"))
        else:
            self.skip(count * struct.calcsize(f"<{SCALARS[kind]}"))
        return None
