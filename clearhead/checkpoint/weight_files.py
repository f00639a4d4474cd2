"""Files of weights: safetensors (one or many), and torch's own files, whose pickles are never run.

Files of plain numbers are memory-mapped: a tensor's memory is the operating system's cache of the file. All processes that have
the file open share it. Writing to such a tensor gives the process a private copy of what it writes to.
"""

from __future__ import annotations

import json
import math
import mmap
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from clearhead.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SAVED = ".saved"  # inside a model's folder: a whole save whose files are not all in their places yet (saving.py)
CHECKSUMS = (
    "clearhead.crc32.tensors"  # the metadata key of a checksum for each tensor: of its name, type, shape and numbers
)
ALIGNMENT = 64  # bytes: torch's own tensors start at multiples of it, and so do the tensors in our files


class Weights(ABC):
    """Named tensors in files. Their shapes and types are known at once; their numbers are read later."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in the stored type. The caller must not write to it."""

    def read_into(self, name: str, out: Tensor) -> None:
        """One tensor copied into `out`, on its device and in its type."""
        out.copy_(self.read(name))

    def read_stacked(self, names: Sequence[str]) -> Tensor | None:
        """These tensors, stacked along the first axis, as one tensor without a copy; None where that is not possible.

        Possible is it where they lie one after the other in mapped memory, aligned as torch aligns its own tensors: matrix
        products of the same numbers at another alignment can differ in their last bits. The caller may write to the result.
        """
        return None


@dataclass(frozen=True)
class FileRange:
    """The bytes of one tensor in a file, and their checksum if it is known."""

    file: Path
    start: int
    nbytes: int
    label: bytes = b""  # name, type and shape, which the checksum begins with
    crc: int | None = None


class MappedWeights(Weights):
    """Tensors that files hold as plain numbers, at known ranges."""

    def __init__(self) -> None:
        self.shapes, self.dtypes, self.ranges = {}, {}, dict[str, FileRange]()
        self.maps: dict[Path, mmap.mmap | bytearray] = {}

    def map(self, file: Path) -> None:
        """Map a file into memory; must come before reading a tensor of it."""
        with file.open("rb") as stream:
            try:
                self.maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError):  # some file systems have no mapping
                self.maps[file] = bytearray(stream.read())

    def read(self, name: str) -> Tensor:
        self._check(name)
        return self._tensor(self.ranges[name], self.shapes[name], self.dtypes[name])

    def read_stacked(self, names: Sequence[str]) -> Tensor | None:
        first, dtype = self.ranges[names[0]], self.dtypes[names[0]]
        if first.start % ALIGNMENT:
            return None
        end = first.start
        for name in names:
            part = self.ranges[name]
            if part.file != first.file or part.start != end or self.dtypes[name] != dtype:
                return None
            end += part.nbytes
        for name in names:
            self._check(name)
        rows = sum(self.shapes[name][0] for name in names) if len(names) > 1 else 0
        shape = (rows, *self.shapes[names[0]][1:]) if rows else self.shapes[names[0]]
        return self._tensor(first, shape, dtype)

    def release(self, name: str) -> None:
        """The tensor was copied: its mapped memory no longer has to count as this process's memory."""
        part, unit = self.ranges[name], mmap.PAGESIZE
        memory, start = self.maps[part.file], -(-part.start // unit) * unit
        length = (part.start + part.nbytes) // unit * unit - start
        if not isinstance(memory, bytearray) and hasattr(mmap, "MADV_DONTNEED") and length > 0:
            memory.madvise(mmap.MADV_DONTNEED, start, length)

    def _tensor(self, part: FileRange, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if part.start % dtype.itemsize:  # not every processor can compute with unaligned numbers
            nbytes = count * dtype.itemsize
            raw = torch.frombuffer(self.maps[part.file], dtype=torch.uint8, offset=part.start, count=nbytes)
            return raw.clone().view(dtype).view(shape)
        return torch.frombuffer(self.maps[part.file], dtype=dtype, offset=part.start, count=count).view(shape)

    def _check(self, name: str) -> None:
        part = self.ranges[name]
        with memoryview(self.maps[part.file]) as memory, memory[part.start : part.start + part.nbytes] as content:
            if len(content) < part.nbytes:
                raise CheckpointError(f"{part.file.name} ends inside {name!r}; fetch or save it again")
            if part.crc is not None and zlib.crc32(content, zlib.crc32(part.label)) != part.crc:
                raise CheckpointError(
                    f"{part.file.name}: {name!r} does not match its checksum; the file was damaged, or only half of a "
                    f"save arrived; fetch or save it again"
                )


class SafeTensors(MappedWeights):
    """One or many .safetensors files as one set of tensors."""

    def __init__(self, files: Iterable[Path]) -> None:
        super().__init__()
        self.headers: dict[str, int] = {}  # the checksum of each file's header
        for file in files:
            self._open(file)

    def _open(self, file: Path) -> None:
        try:
            # The library checks the header: sizes, offsets, no holes, no overlaps.
            with safe_open(file, framework="pt"):
                pass
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                text = stream.read(length)
                header: dict[str, Any] = json.loads(text)
            self.map(file)
            self.headers[file.name] = zlib.crc32(text.rstrip())
            metadata = header.pop("__metadata__", None) or {}
            checksums: dict[str, int] = json.loads(metadata.get(CHECKSUMS, "{}"))
        except OSError as error:
            raise CheckpointError(f"{file} can not be read ({error.strerror or error}); is the path right?") from None
        except Exception as error:  # safetensors raises errors of its own and of json
            raise CheckpointError(f"{file} is not a whole safetensors file ({error}); fetch or save it again") from None
        for name, entry in header.items():
            if name in self.ranges:
                raise CheckpointError(
                    f"{name!r} is in {self.ranges[name].file.name} and in {file.name}; remove one file"
                )
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(f"{file.name}: {name!r} has type {entry['dtype']}; known: {', '.join(DTYPES)}")
            begin, end = entry["data_offsets"]
            self.shapes[name] = tuple(entry["shape"])
            self.dtypes[name] = DTYPES[entry["dtype"]]
            label = _label(name, entry)
            self.ranges[name] = FileRange(file, 8 + length + begin, end - begin, label, checksums.get(name))


def _label(name: str, entry: Mapping[str, Any]) -> bytes:
    return f"{name} {entry['dtype']} {list(entry['shape'])}".encode()


def write_safetensors(file: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write contiguous CPU tensors to one file: a header, then the numbers, wide types first and else in the order given.

    Returns the header's checksum.

    A model's q, k and v thus lie one after the other, as `read_stacked` needs them. Equal tensors make equal files.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    memory = {name: tensors[name].view(-1).view(torch.uint8).numpy().data for name in order if tensors[name].numel()}
    header: dict[str, Any] = {"__metadata__": {}}
    checksums: dict[str, int] = {}
    at = 0
    for name in order:
        tensor = tensors[name]
        place = [at, at + tensor.nbytes]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        checksums[name] = zlib.crc32(memory.get(name, b""), zlib.crc32(_label(name, header[name])))
        at = place[1]
    header["__metadata__"] = {CHECKSUMS: json.dumps(checksums), "format": "pt"}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for numbers in memory.values():
            stream.write(numbers)
    return zlib.crc32(text.rstrip())


class MemoryWeights(Weights):
    """Tensors that torch has already read or mapped, by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        self.dtypes = {name: t.dtype for name, t in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def load_torch_file(file: Path) -> Any:
    """The content of a .bin or .pt file, read by torch's restricted unpickler, which refuses files that contain code."""
    try:
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before torch 1.6 can not be mapped
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything
        reason = str(error).strip().split("\n")[0][:200]
        raise CheckpointError(
            f"{file} is not a file of plain tensors ({reason}); only tensors are read, never code: "
            f"convert it to safetensors where it came from"
        ) from None


def open_weights(folder: Path) -> Weights:
    """The weights in a Hugging Face or clearhead folder: safetensors if there are any, else .bin files."""
    for index, single in (
        ("model.safetensors.index.json", "model.safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model.bin"),
    ):
        if (folder / single).is_file():
            files = [folder / single]
        elif (folder / index).is_file():
            files = _shards(folder / index)
        else:
            continue
        if single.endswith(".safetensors"):
            return SafeTensors(files)
        return MemoryWeights(_joined(files))
    raise CheckpointError(
        f"{folder} holds no weights: no model.safetensors, no pytorch_model.bin, and no index of either; is the path right?"
    )


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    value = parse_json(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} should hold a JSON object, but holds a {type(value).__name__}; fetch it again")
    return value


def parse_json(file: Path) -> Any:
    """The JSON value in a file, of any type."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} can not be read ({error.strerror or error}); is the path right?") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON ({str(error)[:100]}); fetch it again") from None


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map of file names; fetch it again")
    names = sorted(set(weight_map.values()))
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"{index} names files outside its folder: {names[:5]}; they must lie beside it")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.name} names {len(names)} files, and {missing[:5]} are not there; fetch them again"
        )
    return [index.parent / name for name in names]


def _joined(files: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of several torch files; a name may be in one of them only."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        state = _state_dict(file)
        if twice := tensors.keys() & state.keys():
            raise CheckpointError(f"{min(twice)!r} is in {file.name} and in a file before it; fetch the files again")
        tensors |= state
    return tensors


def _state_dict(file: Path) -> dict[str, Tensor]:
    state = load_torch_file(file)
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise CheckpointError(
            f"{file} is not a state dict of named tensors; got {type(state).__name__}; export it again"
        )
    return state
