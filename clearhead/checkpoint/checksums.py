"""Checksums of files and of JSON: a flipped bit in a config or a header would load as another model."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEAL = "checksum"  # the field of a JSON object that holds the checksum of all others


def file_checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(2**22):
            value = zlib.crc32(block, value)
    return value


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """The object with its checksum."""
    return {**content, SEAL: _checksum(content)}


def check_seal(content: Mapping[str, Any], known: set[str]) -> None:
    """ValueError if an object does not match its checksum, or has fields that are not known: one may have been the checksum's.

    An object without a checksum is accepted: somebody may have changed it on purpose, and removed the checksum.
    """
    if unknown := content.keys() - known - {SEAL}:
        raise ValueError(f"it has a field {min(unknown)!r:.40}, which is none of {', '.join(sorted(known))}")
    rest = {name: value for name, value in content.items() if name != SEAL}
    if SEAL in content and content[SEAL] != _checksum(rest):
        raise ValueError(f"it does not match its checksum; if it was changed on purpose, remove its field {SEAL!r}")


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
