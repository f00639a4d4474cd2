"""The wire format of the page's answers, and the keys under which a page without a server finds them.

An answer is: a length (4 bytes, little-endian), that many bytes of JSON, then the arrays, each aligned to 8 bytes. The JSON
holds dtype, shape and offset of each array. HTTP sends these bytes as they are; an exported page holds them as base64.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

DTYPES = {"uint8": "u1", "float32": "f4", "int32": "i4"}


def pack(answer: Mapping[str, Any], **arrays: np.ndarray) -> bytes:
    """An answer's fields and arrays (uint8, float32 or int32) as bytes."""
    entries: dict[str, Any] = {}
    parts: list[bytes] = []
    at = 0
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        entries[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "at": at}
        padding = -len(raw) % 8
        parts += [raw, b"\0" * padding]
        at += len(raw) + padding
    text = json.dumps(_finite({**answer, "arrays": entries}), ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    return struct.pack("<I", len(text)) + text + b"".join(parts)


def unpack(packed: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The fields and arrays of a packed answer."""
    (n,) = struct.unpack_from("<I", packed)
    answer: dict[str, Any] = json.loads(packed[4 : 4 + n])
    arrays: dict[str, np.ndarray] = {}
    for name, entry in answer.pop("arrays").items():
        kind, count = np.dtype(f"<{entry['dtype']}"), math.prod(entry["shape"])
        arrays[name] = np.frombuffer(packed, kind, count, 4 + n + entry["at"]).reshape(entry["shape"])
    return answer, arrays


def key_of(name: str, params: Mapping[str, Any]) -> str:
    """The key of a request: its name and what JavaScript's JSON.stringify makes of the sorted fields."""
    return name + _script_json(params)


def _script_json(value: Any) -> str:
    if isinstance(value, Mapping):
        fields = (f"{_script_json(str(key))}:{_script_json(value[key])}" for key in sorted(value))
        return "{" + ",".join(fields) + "}"
    if isinstance(value, str) or not isinstance(value, Sequence | float):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, float):
        return "[" + ",".join(map(_script_json, value)) + "]"
    if not math.isfinite(value):
        return "null"
    if value.is_integer() and abs(value) < 1e21:
        return str(int(value))
    text = repr(value)
    mantissa, _, exponent = text.partition("e")
    power = int(exponent or 0)
    if -7 < power < 0:  # such as 1e-05: JavaScript writes 0.00001
        return f"{value:.{len(mantissa.replace('-', '').replace('.', '')) - 1 - power}f}"
    return f"{mantissa}e{power:+d}" if exponent else text


def _finite(value: Any) -> Any:
    """NaN and infinities replaced by None: JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
