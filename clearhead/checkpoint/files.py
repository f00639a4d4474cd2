"""Files of weights, read tensor by tensor: safetensors (one or many), and torch's own files without ever running a pickle.

A tensor's bytes go from the file straight into the memory they are for, so loading needs no second copy of the model.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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
CHECKSUMS = "clearhead.crc32"  # the key, in a file's metadata, of a checksum for each tensor


class Weights(ABC):
    """Named tensors in files: their shapes are known, their numbers are read when asked for."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, as it is stored."""

    def read_into(self, name: str, out: Tensor) -> None:
        """One tensor into memory that is already there, on any device, in its type."""
        out.copy_(self.read(name))


@dataclass(frozen=True)
class Place:
    file: Path
    start: int
    nbytes: int
    crc: int | None = None


class Stored(Weights):
    """Tensors that lie in files as plain numbers, at known places."""

    def __init__(self) -> None:
        self.shapes, self.dtypes, self.places = {}, {}, dict[str, Place]()

    def read(self, name: str) -> Tensor:
        out = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: Tensor) -> None:
        place = self.places[name]
        if out.device.type != "cpu" or out.dtype != self.dtypes[name] or not out.is_contiguous():
            out.copy_(self.read(name))
            return
        memory = out.view(-1).view(torch.uint8).numpy().data if place.nbytes else memoryview(bytearray())
        with place.file.open("rb") as stream:
            _read_exactly(stream, place, memory, name)
        if place.crc is not None and zlib.crc32(memory) != place.crc:
            raise CheckpointError(
                f"{place.file.name}: {name!r} does not match its checksum; the file was damaged, or only half of a save "
                f"arrived; fetch or save it again"
            )


class SafeTensors(Stored):
    """One or many .safetensors files as one set of tensors."""

    def __init__(self, files: Iterable[Path]) -> None:
        super().__init__()
        for file in files:
            self._open(file)

    def _open(self, file: Path) -> None:
        try:
            with safe_open(
                file, framework="pt"
            ):  # the library checks the header: sizes, offsets, no holes, no overlaps
                pass
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header: dict[str, Any] = json.loads(stream.read(length))
        except OSError as error:
            raise CheckpointError(f"{file} can not be read ({error.strerror or error}); is the path right?") from None
        except Exception as error:  # safetensors raises its own type, and json's
            raise CheckpointError(f"{file} is not a whole safetensors file ({error}); fetch or save it again") from None
        metadata = header.pop("__metadata__", None) or {}
        checksums: dict[str, int] = json.loads(metadata.get(CHECKSUMS, "{}"))
        for name, entry in header.items():
            if name in self.places:
                raise CheckpointError(
                    f"{name!r} is in {self.places[name].file.name} and in {file.name}; remove one file"
                )
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(f"{file.name}: {name!r} has type {entry['dtype']}; known: {', '.join(DTYPES)}")
            begin, end = entry["data_offsets"]
            self.shapes[name] = tuple(entry["shape"])
            self.dtypes[name] = DTYPES[entry["dtype"]]
            self.places[name] = Place(file, 8 + length + begin, end - begin, checksums.get(name))


def _read_exactly(stream: BinaryIO, place: Place, memory: memoryview, name: str) -> None:
    stream.seek(place.start)
    done = 0
    while done < place.nbytes:
        count = stream.readinto(memory[done:])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{place.file.name} ends inside {name!r}; fetch or save it again")
        done += count


class Tensors(Weights):
    """Tensors already in memory (or mapped from a file), by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        self.dtypes = {name: t.dtype for name, t in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def load_torch_file(file: Path) -> Any:
    """What a .bin or .pt file holds, through torch's restricted unpickler: a file that asks for code is refused."""
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
    """The weights of a Hugging Face or clearhead directory: safetensors if there are any, else .bin files."""
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
        return Tensors({name: tensor for file in files for name, tensor in _state_dict(file).items()})
    raise CheckpointError(
        f"{folder} holds no weights: no model.safetensors, no pytorch_model.bin, and no index of either; is the path right?"
    )


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    value = parse_json(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} should hold a JSON object, but holds a {type(value).__name__}; fetch it again")
    return value


def parse_json(file: Path) -> Any:
    """Whatever JSON is in a file."""
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


def _state_dict(file: Path) -> dict[str, Tensor]:
    state = load_torch_file(file)
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise CheckpointError(
            f"{file} is not a state dict of named tensors; got {type(state).__name__}; export it again"
        )
    return state
