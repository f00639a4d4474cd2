"""The tokenizer inside a .gguf file.

The metadata is read here, not by the `gguf` package: its reader trusts every length in the file, so that a wrong one makes it
hang or fill the memory.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from clearhead.data import tokenizer_parts as parts
from clearhead.data.sentencepiece import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Piece, build_core
from clearhead.data.tokenizer import Tokenizer
from clearhead.errors import did_you_mean

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# The metadata comes first; a tokenizer of 262,144 tokens with merges takes 20 MB. The weights after it are not read.
_MAX_METADATA = 64 * 2**20
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "mask": "mask"}


def read_gguf(path: Path) -> Tokenizer:
    with parts.parse_errors(path, "a GGUF tokenizer"):
        meta = read_metadata(path)
        kind = meta.get("tokenizer.ggml.model")
        readers: dict[Any, Callable[[dict[str, Any]], Any]] = {"gpt2": _byte_level, "llama": _sentencepiece}
        if kind not in readers:
            raise ValueError(f"tokenizer model {kind!r}; {did_you_mean(str(kind), readers)}")
        core = readers[kind](meta)
        ids = {role: meta.get(f"tokenizer.ggml.{name}_token_id") for name, role in _ROLES.items()}
        roles = {role: int(id) for role, id in ids.items() if id is not None and core.id_to_token(int(id)) is not None}
        names = {role: core.id_to_token(id) for role, id in roles.items()}
        parts.add_special(core, names.values())
        # llama.cpp's defaults for fields that the file does not have.
        starts = kind == "llama" or meta.get("tokenizer.ggml.pre") == "llama-bpe"
        use_bos = meta.get("tokenizer.ggml.add_bos_token", starts)
        use_eos = meta.get("tokenizer.ggml.add_eos_token", False)
        parts.surround(core, [names.get("bos") if use_bos else None], [names.get("eos") if use_eos else None])
        return Tokenizer(core, roles, meta.get("tokenizer.chat_template"))


def _byte_level(meta: dict[str, Any]) -> Any:
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise ValueError(f"{len(tokens)} tokens, of which only {len(vocab)} differ")
    if "tokenizer.ggml.pre" not in meta:
        raise ValueError(
            "tokenizer.ggml.pre is missing, as in files from before May 2024: how the model's own tokenizer cuts words is unknown; "
            "convert the model again"
        )
    core = parts.byte_level_bpe(vocab, merges, meta["tokenizer.ggml.pre"])
    types = list(zip(tokens, meta.get("tokenizer.ggml.token_type", ()), strict=False))
    parts.add_special(core, [token for token, type in types if type in (UNKNOWN, CONTROL)])
    core.add_tokens([AddedToken(token, normalized=False) for token, type in types if type == USER_DEFINED])
    return core


def _sentencepiece(meta: dict[str, Any]) -> Any:
    tokens, scores = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.scores"]
    types = meta.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    pieces = [Piece(text, float(score), int(type)) for text, score, type in zip(tokens, scores, types, strict=True)]
    add_prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    return build_core(pieces, add_prefix=add_prefix, symbols_apart=True)


def read_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs: numbers, strings, lists of strings, tuples of numbers. Never reads past the end of the file."""
    with path.open("rb") as file:
        size = min(path.stat().st_size, _MAX_METADATA)
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
            magic, version, _, count = struct.unpack_from("<4sIQQ", data)
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"it starts with {magic!r}, version {version}; GGUF versions 2 and 3 are read")
            meta: dict[str, Any] = {}
            at = 24
            # A count that is too high ends in an error of unpack_from, at the end of the file.
            for _ in range(count):
                key, at = _value(data, at, _STRING)
                (kind,) = struct.unpack_from("<I", data, at)
                meta[key], at = _value(data, at + 4, kind)
            return meta


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        (size,) = struct.unpack_from("<Q", data, at)
        end = at + 8 + size
        if end > len(data):
            raise ValueError(f"a string that ends at byte {end} of {len(data)}")
        return data[at + 8 : end].decode(), end
    if kind != _ARRAY:
        return struct.unpack_from(f"<{_SCALARS[kind]}", data, at)[0], at + struct.calcsize(f"<{_SCALARS[kind]}")
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind in _SCALARS:
        form = f"<{count}{_SCALARS[kind]}"
        return struct.unpack_from(form, data, at), at + struct.calcsize(form)
    values: list[Any] = []
    for _ in range(count):
        value, at = _value(data, at, kind)
        values.append(value)
    return values, at
