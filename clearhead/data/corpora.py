"""Corpora, read as streams: documents for language models, pairs, labelled texts, folders of pictures.

No more than one line, row or piece of a document is held at a time. What can not be used is judged by a `Policy` and counted
in `Findings`; nothing is left out in silence.
"""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

from clearhead.data.corpus_files import find_kind, read_lines, read_rows
from clearhead.data.filters import Findings, Policy, TextFilter, TextRow
from clearhead.errors import InputError, did_you_mean

Documents = Literal["file", "line", "paragraph"]
Names = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

PIECE = 2**16  # characters of a document handed on at once; several such are tokenised side by side
_TEXT = {".txt", ".text", ".md", ".jsonl", ".csv", ".tsv", ".parquet"}  # what a folder is searched for
_PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


class DocumentPart(NamedTuple):
    """A document, or a part of one: `ends` is True on its last."""

    text: str
    ends: bool


def expand_files(patterns: Names) -> list[Path]:
    """The files that names, globs ("data/**/*.txt") and folders stand for, in the order given, each argument's sorted.

    A folder stands for the text and table files below it; one that `datasets` saved, and "hf:NAME", for itself.
    """
    found: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str | os.PathLike) else patterns:
        path = Path(pattern).expanduser()
        if str(pattern).startswith("hf:"):
            found.append(Path(pattern))
            continue
        matches = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        if not matches:
            siblings = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
            hint = did_you_mean(path.name, siblings) if siblings else f"the folder {path.parent} is empty or missing"
            raise InputError(f"there is no file {str(pattern)!r}; {hint}")
        files = [file for match in matches for file in _walk(match)]
        if not files:
            raise InputError(
                f"the folder {pattern} holds no {', '.join(sorted(_TEXT))} file; name the files, as in '{pattern}/*'"
            )
        found += files
    if not found:
        raise InputError("no files were given (0 names); name at least one file, folder or glob")
    return found


def _walk(path: Path) -> list[Path]:
    if not path.is_dir() or (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return [path]
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not file.name.startswith(".") and _TEXT & set(file.suffixes[-2:])
    )


def read_texts(
    files: Names,
    *,
    column: str = "text",
    documents: Documents = "file",
    policy: Policy | None = None,
    findings: Findings | None = None,
) -> Iterator[DocumentPart]:
    """Documents for a language model, in pieces of about 64,000 characters, cut at line ends where there are any.

    In text files `documents` says what one document is: the file, each line, or each paragraph (blank lines lie between). In
    tables each row is one.
    """
    text_filter = TextFilter(policy, findings)
    for path in expand_files(files):
        if find_kind(path) == "text":
            pieces = _join(_split_text(path, documents, text_filter))
        else:
            pieces = _join(_split_rows(_read_table([path], (column,), text_filter)))
        first = next(pieces, None)
        text_filter.findings.read["files"] += 1
        if first is None or (first.ends and not first.text.strip()):
            kept = text_filter.keep_empty("files", path)
            if first is None or not kept:
                continue
        yield first
        yield from pieces


def _split_text(path: Path, documents: Documents, text_filter: TextFilter) -> Iterator[str | None]:
    """Lines, or parts of long ones; None where a document ends."""
    number, starts, under_way = 0, True, False
    for line in read_lines(path, text_filter.findings, PIECE):
        number += starts
        text_filter.findings.read["lines"] += starts
        starts = line.endswith("\n")
        text = text_filter.repair(line, "lines", path, number)
        if text is None or (documents == "paragraph" and not text.strip()):
            if under_way and starts and documents != "file":
                yield None
                under_way = False
            continue
        begins = documents == "line" and not under_way
        if begins and not text.strip() and not text_filter.keep_empty("lines", path, number):
            continue
        under_way = True
        yield text.removesuffix("\n") if documents == "line" else text
        if documents == "line" and starts:
            yield None
            under_way = False
    if under_way or documents == "file":
        yield None


def _split_rows(rows: Iterable[TextRow]) -> Iterator[str | None]:
    for row in rows:
        text = io.StringIO(row.values[0], newline="\n")
        while part := text.readline(PIECE):
            yield part
        yield None


def _join(parts: Iterable[str | None]) -> Iterator[DocumentPart]:
    """Parts put together until they make a piece."""
    held: list[str] = []
    size = 0
    for part in parts:
        if part is None or (held and size + len(part) > PIECE):
            yield DocumentPart("".join(held), part is None)
            held, size = [], 0
        if part is not None:
            held.append(part)
            size += len(part)


def read_pairs(
    source_files: Names,
    target_files: Names = (),
    *,
    columns: tuple[str, str] = ("source", "target"),
    policy: Policy | None = None,
    findings: Findings | None = None,
) -> Iterator[tuple[str, str]]:
    """Source and target: line by line from two files (or two lists of files), or two columns of tables, if no target is given."""
    for row in read_pair_rows(source_files, target_files, columns, TextFilter(policy, findings)):
        yield row.values[0], row.values[1]


def read_labelled(
    files: Names,
    *,
    columns: tuple[str, str] = ("text", "label"),
    policy: Policy | None = None,
    findings: Findings | None = None,
) -> Iterator[tuple[str, str]]:
    """Texts and their labels, two columns of tables."""
    for row in read_labelled_rows(files, columns, TextFilter(policy, findings)):
        yield row.values[0], row.values[1]


def read_pair_rows(
    source_files: Names, target_files: Names, columns: tuple[str, str], text_filter: TextFilter
) -> Iterator[TextRow]:
    """`read_pairs`, with the places."""
    sources = expand_files(source_files)
    if not target_files:
        yield from _read_table(sources, columns, text_filter)
        return
    targets = expand_files(target_files)
    if len(sources) != len(targets):
        raise InputError(
            f"{len(sources)} source files and {len(targets)} target files make no pairs; give as many of each"
        )
    for source, target in zip(sources, targets, strict=True):
        yield from _read_in_step(source, target, text_filter)


def read_labelled_rows(files: Names, columns: tuple[str, str], text_filter: TextFilter) -> Iterator[TextRow]:
    """`read_labelled`, with the places."""
    return _read_table(expand_files(files), columns, text_filter)


def _read_in_step(source: Path, target: Path, text_filter: TextFilter) -> Iterator[TextRow]:
    for path in (source, target):
        if find_kind(path) != "text":
            raise InputError(
                f"{path} is a table, but two files are paired line by line; give one table with two columns"
            )
    alone, number, longer = 0, 0, source
    for number, (first, second) in enumerate(
        zip_longest(read_lines(source, text_filter.findings), read_lines(target, text_filter.findings)), 1
    ):
        text_filter.findings.read["pairs"] += 1
        if first is None or second is None:
            alone, longer = alone + 1, target if first is None else source
            continue
        values = first.removesuffix("\n"), second.removesuffix("\n")
        row = text_filter.apply(values, "pairs", (source, target), number)
        if row is not None:
            yield row
    if alone and text_filter.policy.unequal == "error":
        counts = (number, number - alone) if longer is source else (number - alone, number)
        raise InputError(
            f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}, so they do not pair line by line; "
            'align them, or choose unequal="cut" to stop at the end of the shorter'
        )
    if alone:
        text_filter.findings.note(
            "pairs", "dropped: the other file has ended", f"{longer.name}:{number - alone + 1}", alone
        )


def _read_table(files: Sequence[Path], columns: Sequence[str], text_filter: TextFilter) -> Iterator[TextRow]:
    for path in files:
        for number, values in read_rows(path, columns, text_filter.findings):
            text_filter.findings.read["rows"] += 1
            row = text_filter.apply(values, "rows", [path] * len(values), number)
            if row is not None:
                yield row


def find_images(folder: str | os.PathLike[str], findings: Findings | None = None) -> list[tuple[Path, str]]:
    """Pictures and their labels: one folder for each class, named as the class is, in alphabetical order."""
    findings, root = Findings() if findings is None else findings, Path(folder)
    classes = sorted(each for each in root.glob("*") if each.is_dir() and not each.name.startswith("."))
    if len(classes) < 2:
        raise InputError(
            f"{root} holds {len(classes)} folders, but pictures lie in one folder for each class, at least 2"
        )
    pictures: list[tuple[Path, str]] = []
    for each in classes:
        files = sorted(file for file in each.rglob("*") if file.is_file() and not file.name.startswith("."))
        found = [(file, each.name) for file in files if file.suffix.lower() in _PICTURES]
        findings.read["files"] += len(files)
        for file in files:
            if file.suffix.lower() not in _PICTURES:
                findings.note("files", "left out: no picture by their name", f"{each.name}/{file.name}")
        if not found:
            raise InputError(
                f"the class folder {each} holds no picture; add some ({', '.join(sorted(_PICTURES))}), or remove it"
            )
        pictures += found
    return pictures
