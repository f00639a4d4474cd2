"""From a corpus to a store: each text is tokenised once, in parallel.

A folder that already holds the store of the same files, tokenizer and options is opened without reading the files.
`store.info["findings"]` has a sentence for each kind of data that was dropped, repaired or cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.data.corpora import (
    MAX_PART,
    Documents,
    Names,
    expand_files,
    read_labelled_rows,
    read_pair_rows,
    read_texts,
)
from clearhead.data.filters import Policy
from clearhead.data.preparation import Folder, Labels, Preparation, Progress, in_batches
from clearhead.data.token_store import Store, StoreWriter
from clearhead.data.tokenizer import Tokenizer
from clearhead.errors import InputError


def prepare_texts(
    folder: Folder,
    files: Names,
    tokenizer: Tokenizer,
    *,
    column: str = "text",
    documents: Documents = "file",
    lowercase: bool = False,
    policy: Policy | None = None,
    progress: Progress | None = None,
) -> Store:
    """Documents for a language model: column "text", the ids of each document and then eos, if the tokenizer has one.

    A long document is tokenised in parts that end at line ends (see `read_texts`): no token spans two parts.
    """
    preparation = Preparation(
        folder, expand_files(files), policy, progress, ["texts", column, documents, lowercase], tokenizer
    )
    if preparation.is_done():
        return Store(folder)
    ending = [] if tokenizer.eos is None else [tokenizer.eos]
    text_filter, n_bytes = preparation.text_filter, 0
    with StoreWriter(folder, {"text": _dtype(tokenizer)}) as writer:
        parts = read_texts(
            preparation.paths,
            column=column,
            documents=documents,
            policy=text_filter.policy,
            findings=text_filter.findings,
        )
        for batch in in_batches(parts, lambda part: len(part.text)):
            encoded = _encode(tokenizer, [part.text for part in batch], lowercase)
            for part, (ids, size) in zip(batch, encoded, strict=True):
                n_bytes += size
                writer.add_part("text", ids + ending if part.ends else ids, ends=part.ends)
            preparation.report_progress()
        preparation.write_info(writer, bytes=n_bytes)
    return Store(folder)


def prepare_pairs(
    folder: Folder,
    source: Names,
    target: Names,
    tokenizer: Tokenizer,
    *,
    max_source_len: int | None = None,
    max_len: int | None = None,
    columns: tuple[str, str] = ("source", "target"),
    lowercase: bool = False,
    policy: Policy | None = None,
    progress: Progress | None = None,
) -> Store:
    """Pairs: columns "source" and "target", both ids and then eos. With target=() the source files are tables.

    `info["bytes"]` counts the bytes of the targets, which a translator predicts.
    """
    if tokenizer.eos is None:
        raise InputError("pairs need a tokenizer with an end-of-sequence token, and eos is None; train one with '</s>'")
    eos: int = tokenizer.eos
    options = ["pairs", max_source_len, max_len, columns, lowercase]
    paths = expand_files(source) + (expand_files(target) if target else [])
    preparation = Preparation(folder, paths, policy, progress, options, tokenizer)
    if preparation.is_done():
        return Store(folder)
    text_filter, n_bytes = preparation.text_filter, 0

    def fit(ids: list[int], place: str, limit: int | None, name: str) -> list[int] | None:
        if limit is None or len(ids) < limit:
            return [*ids, eos]
        kept = text_filter.keep_long("rows" if not target else "pairs", place, len(ids) + 1, limit, name)
        return [*ids[: limit - 1], eos] if kept else None

    with StoreWriter(folder, dict.fromkeys(("source", "target"), _dtype(tokenizer))) as writer:
        rows = read_pair_rows(source, target, columns, text_filter)
        for batch in in_batches(rows, lambda row: len(row.values[0]) + len(row.values[1])):
            sources = _encode(tokenizer, [row.values[0] for row in batch], lowercase, limit=max_source_len)
            targets = _encode(tokenizer, [row.values[1] for row in batch], lowercase, target=True, limit=max_len)
            for row, (ours, _), (theirs, size) in zip(batch, sources, targets, strict=True):
                first = fit(ours, row.place(0), max_source_len, "max_source_len")
                second = None if first is None else fit(theirs, row.place(1), max_len, "max_len")
                if first is not None and second is not None:
                    writer.add(source=first, target=second)
                    n_bytes += size
            preparation.report_progress()
        preparation.write_info(writer, bytes=n_bytes)
    return Store(folder)


def prepare_labelled(
    folder: Folder,
    files: Names,
    tokenizer: Tokenizer,
    *,
    max_len: int | None = None,
    columns: tuple[str, str] = ("text", "label"),
    labels: Sequence[str] | None = None,
    lowercase: bool = False,
    policy: Policy | None = None,
    progress: Progress | None = None,
) -> Store:
    """Texts with one label each: columns "text", with special tokens, and "label", an index into info["labels"].

    `labels` fixes the names and their order; validation data gets those of the training data.
    """
    options = ["labelled", max_len, columns, labels, lowercase]
    preparation = Preparation(folder, expand_files(files), policy, progress, options, tokenizer)
    if preparation.is_done():
        return Store(folder)
    text_filter, names, n_bytes = preparation.text_filter, Labels(labels), 0
    with StoreWriter(folder, {"text": _dtype(tokenizer), "label": np.int32}, {"label": ()}) as writer:
        for batch in in_batches(
            read_labelled_rows(preparation.paths, columns, text_filter), lambda row: len(row.values[0])
        ):
            encoded = _encode(tokenizer, [row.values[0] for row in batch], lowercase, special=True, limit=max_len)
            for row, (ids, size) in zip(batch, encoded, strict=True):
                if max_len is not None and len(ids) > max_len:
                    if not text_filter.keep_long("rows", row.place(0), len(ids), max_len, "max_len"):
                        continue
                    ids = _encode(tokenizer, [row.values[0]], lowercase, special=True, limit=max_len, cut=True)[0][0]
                names.add(row.values[1], row.place(1))
                writer.add(text=ids)
                n_bytes += size
            preparation.report_progress()
        found, indices = names.number()
        writer.add_part("label", indices, ends=True)
        preparation.write_info(writer, bytes=n_bytes, labels=found)
    return Store(folder)


def _dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32


def _encode(
    tokenizer: Tokenizer,
    texts: list[str],
    lowercase: bool,
    *,
    special: bool = False,
    target: bool = False,
    limit: int | None = None,
    cut: bool = False,
) -> list[tuple[list[int], int]]:
    """The ids and the number of bytes of each text. With a `limit`, the ids of a much longer text may be incomplete, but there
    are then more of them than `limit`."""
    if lowercase:
        texts = [text.lower() for text in texts]

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer.encode_all(texts, special, target, limit if cut else None, "right")

    # A text of ten million characters would need gigabytes, and its beginning is enough to see that it is too long.
    enough = None if limit is None else max(MAX_PART, 64 * limit)
    rows = encode([text[:enough] for text in texts])
    for number, text in enumerate(texts):
        if limit is not None and not cut and len(text[:enough]) < len(text) and len(rows[number]) <= limit:
            rows[number] = encode([text])[0]
    return [(ids, len(text.encode())) for ids, text in zip(rows, texts, strict=True)]
