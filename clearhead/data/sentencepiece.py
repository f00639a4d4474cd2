"""SentencePiece models (T5, LLaMA) and Marian's pair of them.

The few fields that are needed are read from the protobuf wire format: this is less than depending on `sentencepiece` and
`protobuf`, and broken files are found by our own checks.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from clearhead.data import tokenizer_parts as parts
from clearhead.data.tokenizer import Tokenizer
from clearhead.errors import CheckpointError

# ModelProto.SentencePiece.Type, which GGUF took over as its token types.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class Piece(NamedTuple):
    text: str
    score: float
    type: int = NORMAL


def build_core(
    pieces: Sequence[Piece],
    *,
    unigram: bool = False,
    space: str = "▁",
    add_prefix: bool = True,
    tidy_spaces: bool = False,
    charsmap: bytes = b"",
    symbols_apart: bool = False,
) -> tokenizers.Tokenizer:
    """SentencePiece's algorithm as a `tokenizers` pipeline: most likely pieces (unigram), or merging by score (BPE).

    A user-defined symbol is a piece wherever it stands in the text: "the <u>man" is `▁the ▁ <u> man`, and "<u>man" is `▁ <u> man`.
    (transformers leaves out the space before a symbol that starts the text.) With `symbols_apart` symbols are cut out first, and
    each part between them is a text with its own prefix, as llama.cpp does: `▁the <u> ▁man`.

    If a model has a charsmap, `Precompiled` applies it to one grapheme at a time and takes the shortest match in it. The result
    for a letter with two or more separate combining marks can therefore differ from SentencePiece (a mark is lost). Composed
    text (NFC) is not affected; transformers does the same.
    """
    vocab = {piece.text: id for id, piece in enumerate(pieces)}
    if not pieces or len(vocab) < len(pieces) or "" in vocab:
        raise ValueError(f"{len(pieces)} pieces, of which {len(vocab)} differ, an empty one: {'' in vocab}")
    if not all(math.isfinite(piece.score) for piece in pieces):
        raise ValueError("a score that is not a finite number")
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    symbols = [piece.text for piece in pieces if piece.type == USER_DEFINED]
    # A symbol that the charsmap changes can not be found after it.
    inside = [text for text in symbols if not symbols_apart and all(step.normalize_str(text) == text for step in steps)]
    core = tokenizers.Tokenizer(_model(pieces, vocab, unigram=unigram, has_symbols=bool(inside)))
    if tidy_spaces:
        # \A and \z, not ^ and $: those match at every line.
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(space)] if add_prefix else []
    steps += [normalizers.Replace(" ", space)] if space != " " else []
    core.normalizer = normalizers.Sequence(steps)
    if inside:
        longest_first = "|".join(re.escape(text) for text in sorted(inside, key=len, reverse=True))
        core.pre_tokenizer = pre_tokenizers.Split(Regex(longest_first), "isolated")
    back: list[Any] = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if add_prefix else back)

    parts.add_special(core, [piece.text for piece in pieces if piece.type in (UNKNOWN, CONTROL)])
    core.add_tokens([AddedToken(text, normalized=False) for text in symbols if text not in inside])
    return core


def _model(pieces: Sequence[Piece], vocab: dict[str, int], *, unigram: bool, has_symbols: bool) -> Any:
    unk = next((id for id, piece in enumerate(pieces) if piece.type == UNKNOWN), None)
    has_bytes = sum(piece.type == BYTE for piece in pieces) == 256
    if unigram:
        return models.Unigram([(piece.text, piece.score) for piece in pieces], unk, has_bytes)
    best_first = sorted((p for p in pieces if p.type in (NORMAL, USER_DEFINED)), key=lambda piece: -piece.score)
    merges = parts.derive_merges([piece.text for piece in best_first], vocab)
    unk_token = None if unk is None else pieces[unk].text
    # No merges lead to a symbol: what lies between two cuts and is a piece is taken whole.
    options: dict[str, Any] = dict(byte_fallback=has_bytes, fuse_unk=True, ignore_merges=has_symbols)
    return models.BPE(vocab, merges, unk_token=unk_token, **options)


def read_sentencepiece(path: Path) -> Tokenizer:
    config = parts.read_json(path.parent / "tokenizer_config.json")
    with parts.parse_errors(path, "a SentencePiece model"):
        core, roles = parse_model(parts.read_bytes(path))
        # T5's sentinels are not in the model file: <extra_id_0> has the last id, and they are counted backwards.
        count = config.get("extra_ids", 0)
        if type(count) is int and 0 < count < 10_000 and not config.get("added_tokens_decoder"):
            core.add_special_tokens([f"<extra_id_{i}>" for i in reversed(range(count))])
        parts.add_listed(core, path.parent)
        # By default, bos is added if the model has one, else eos (T5 was trained with it).
        use_bos = config.get("add_bos_token", "bos" in roles)
        use_eos = config.get("add_eos_token", "bos" not in roles)
        parts.surround(core, [roles.get("bos") if use_bos else None], [roles.get("eos") if use_eos else None])
    tokenizer = parts.finish(core, path.parent)
    for role, token in roles.items():
        if getattr(tokenizer, role) is None:
            setattr(tokenizer, role, core.token_to_id(token))
    return tokenizer


def parse_model(data: bytes) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The pipeline of a serialized ModelProto, and its special tokens by role."""
    top = list(_fields(data))
    trainer = {number: value for field, content in top if field == 2 for number, value in _fields(content)}
    normal = {number: value for field, content in top if field == 3 for number, value in _fields(content)}
    pieces: list[Piece] = []
    for content in (content for field, content in top if field == 1):
        piece = dict(_fields(content))
        score = struct.unpack("<f", piece.get(2, bytes(4)))[0]
        pieces.append(Piece(piece[1].decode(), score, piece.get(3, NORMAL)))
    kind = trainer.get(3, 1)
    if kind not in (1, 2) or trainer.get(24) or not normal.get(5, 1):
        raise ValueError(
            f"model type {kind} (1 unigram and 2 BPE are read), or spaces kept or moved to the end of words"
        )
    core = build_core(
        pieces,
        unigram=kind == 1,
        add_prefix=bool(normal.get(3, 1)),
        tidy_spaces=bool(normal.get(4, 1)),
        charsmap=normal.get(2, b""),
    )
    # A missing id is written as -1, that is 2**64 - 1.
    ids = {"unk": trainer.get(40, 0), "bos": trainer.get(41, 1), "eos": trainer.get(42, 2), "pad": trainer.get(43, -1)}
    return core, {role: pieces[id].text for role, id in ids.items() if 0 <= id < len(pieces)}


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers and raw values of one protobuf message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
        else:
            if key & 7 == 2:
                size, at = _varint(data, at)
            else:
                size = {1: 8, 5: 4}[key & 7]
            value, at = data[at : at + size], at + size
        if at > len(data):
            raise ValueError(f"a field that ends at byte {at} of {len(data)}")
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError(f"a number without end at byte {at}")


class PairTokenizer(Tokenizer):
    """Marian's tokenizer: source and target have their own pieces and share the ids. `decode` takes target ids."""

    def __init__(self, source: bytes, target: bytes, vocab: dict[str, int]) -> None:
        self._files = {"source.spm": source, "target.spm": target, "vocab.json": json.dumps(vocab).encode()}
        cores = [parse_model(source)[0], parse_model(target)[0]]
        for core in cores:
            # For a model with several target languages, a code in front of the text selects one.
            core.add_special_tokens([token for token in vocab if token.startswith(">>") and token.endswith("<<")])
            parts.surround(core, [], ["</s>"])
        roles = {"eos": vocab["</s>"], "unk": vocab["<unk>"], "pad": vocab.get("<pad>")}
        super().__init__(cores[0], roles, target_core=cores[1], vocab=vocab)
        self.special_ids = {id for id in roles.values() if id is not None}

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        names = [self._names[id] for id in self._check(ids) if special or id not in self.special_ids]
        return self.target_core.decoder.decode(names)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write Marian's own layout: source.spm, target.spm, vocab.json, tokenizer_config.json."""
        self._write(directory, self._files, "MarianTokenizer")

    def _ids(self, encoding: tokenizers.Encoding) -> list[int]:
        # By piece, not by the pipeline's ids: the shared vocabulary may have pieces that one side does not have.
        return [self.vocab.get(piece, self.vocab["<unk>"]) for piece in encoding.tokens]


def read_marian(folder: Path) -> PairTokenizer:
    if parts.read_json(folder / "tokenizer_config.json").get("separate_vocabs"):
        raise CheckpointError(
            f"{folder} has separate vocabularies for source and target; only models with one shared vocab.json are read"
        )
    vocab = parts.read_vocab(folder / "vocab.json")
    with parts.parse_errors(folder, "Marian's source.spm, target.spm and vocab.json"):
        return PairTokenizer(parts.read_bytes(folder / "source.spm"), parts.read_bytes(folder / "target.spm"), vocab)
