"""Corpora, read as streams: documents for language models, pairs, labelled texts, folders of images.

No more than one line, row or part of a document is in memory at a time. A `Policy` says what happens to data that can not be
used, and `Findings` counts it; nothing is dropped silently.
"""

from __future__ import annotations

import glob
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

from clearhead.data.corpus_files import Rows, find_kind, read_lines, read_rows
from clearhead.data.filters import Findings, Policy, TextFilter, TextRow
from clearhead.errors import InputError, did_you_mean

Documents = Literal["file", "line", "paragraph"]
Names = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_SAMPLED_ROWS = 10_000  # of a table with labels, to see whether its first row is a header
MAX_PART = 2**16  # characters of a document in one part; several parts are tokenised in parallel
_TEXT = {".txt", ".text", ".md", ".jsonl", ".csv", ".tsv", ".parquet"}  # the files that a folder is searched for
_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


class DocumentPart(NamedTuple):
    """A document or a part of one; `ends` is True for the last part."""

    text: str
    ends: bool


def expand_files(patterns: Names) -> list[Path]:
    """The files that names, globs ("data/**/*.txt") and folders stand for, in the order given; those of each are sorted.

    A folder stands for the text and table files below it. A folder that `datasets` saved, and "hf:NAME", stay as they are.
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
    """Documents for a language model, in parts of about 64,000 characters, split at line ends where there are any.

    In text files `documents` says what a document is: the file, each line, or each paragraph (separated by blank lines). In
    tables each row is a document.
    """
    text_filter = TextFilter(policy, findings)
    for path in expand_files(files):
        if find_kind(path) == "text":
            parts = _join(_split_text(path, documents, text_filter))
        else:
            parts = _join(_split_rows(_read_table([path], (column,), text_filter)))
        first = next(parts, None)
        text_filter.findings.read["files"] += 1
        if first is None or (first.ends and not first.text.strip()):
            kept = text_filter.keep_empty("files", path)
            if first is None or not kept:
                continue
        yield first
        yield from parts


def _split_text(path: Path, documents: Documents, text_filter: TextFilter) -> Iterator[str | None]:
    """Lines, or parts of long ones; None where a document ends."""
    number, at_line_start, in_document = 0, True, False
    for line in read_lines(path, text_filter.findings, MAX_PART):
        number += at_line_start
        text_filter.findings.read["lines"] += at_line_start
        at_line_start = line.endswith("\n")
        text = text_filter.repair(line, "lines", path, number)
        if text is None or (documents == "paragraph" and not text.strip()):
            if in_document and at_line_start and documents != "file":
                yield None
                in_document = False
            continue
        begins = documents == "line" and not in_document
        if begins and not text.strip() and not text_filter.keep_empty("lines", path, number):
            continue
        in_document = True
        yield text.removesuffix("\n") if documents == "line" else text
        if documents == "line" and at_line_start:
            yield None
            in_document = False
    if in_document or documents == "file":
        yield None


def _split_rows(rows: Iterable[TextRow]) -> Iterator[str | None]:
    """Parts of each row's text; None where a row ends."""
    for row in rows:
        text = io.StringIO(row.values[0], newline="\n")
        while part := text.readline(MAX_PART):
            yield part
        yield None


def _join(lines: Iterable[str | None]) -> Iterator[DocumentPart]:
    """Lines joined until they make a part; None ends a document."""
    buffer: list[str] = []
    size = 0
    for line in lines:
        if line is None or (buffer and size + len(line) > MAX_PART):
            yield DocumentPart("".join(buffer), line is None)
            buffer, size = [], 0
        if line is not None:
            buffer.append(line)
            size += len(line)


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
    """`read_pairs`, with the file and line of each row."""
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
        yield from _read_parallel(source, target, text_filter)


def read_labelled_rows(files: Names, columns: tuple[str, str], text_filter: TextFilter) -> Iterator[TextRow]:
    """`read_labelled`, with the file and line of each row."""
    for path in expand_files(files):
        rows = read_rows(path, columns, text_filter.findings)
        if find_kind(path) in ("csv", "tsv"):
            rows = _refuse_header(rows, path, columns)
        rows = ((number, [text, label.strip()]) for number, (text, label) in rows)
        yield from _filter_rows(rows, path, text_filter)


def _refuse_header(rows: Rows, path: Path, columns: tuple[str, str]) -> Rows:
    """The rows. A first row that was not taken for a header is refused if it seems to be one, since it would become a class.

    It seems to be one if its label is no number and on no other row, while most other rows share their label with another.
    """
    sample = list(islice(rows, _SAMPLED_ROWS))
    if len(sample) > 1 and sample[0][0] == 1:
        (_, names), counts = sample[0], Counter(values[1] for _, values in sample[1:])
        shared = sum(count for count in counts.values() if count > 1)
        is_number = names[1].strip().lstrip("+-").replace(".", "", 1).isdigit()  # no column is named so
        if names[1] not in counts and not is_number and 2 * shared > len(sample) - 1:
            raise InputError(
                f"{path}:1 seems to be a header and would become a class: no other row has the label {names[1]!r:.40}, and no "
                f"column is named {' or '.join(columns)}; got {names[0]!r:.40}, {names[1]!r:.40}; name the columns with "
                f"--set \"data.columns=['TEXT', 'LABEL']\", or write {','.join(columns)} into the first line"
            )
    yield from sample
    yield from rows


def _read_parallel(source: Path, target: Path, text_filter: TextFilter) -> Iterator[TextRow]:
    """Line n of one file with line n of the other."""
    for path in (source, target):
        if find_kind(path) != "text":
            raise InputError(
                f"{path} is a table, but two files are paired line by line; give one table with two columns"
            )
    unpaired, number, longer = 0, 0, source
    for number, (first, second) in enumerate(
        zip_longest(read_lines(source, text_filter.findings), read_lines(target, text_filter.findings)), 1
    ):
        text_filter.findings.read["pairs"] += 1
        if first is None or second is None:
            unpaired, longer = unpaired + 1, target if first is None else source
            continue
        values = first.removesuffix("\n"), second.removesuffix("\n")
        row = text_filter.apply(values, "pairs", (source, target), number)
        if row is not None:
            yield row
    if unpaired and text_filter.policy.unequal == "error":
        counts = (number, number - unpaired) if longer is source else (number - unpaired, number)
        raise InputError(
            f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}, so they do not pair line by line; "
            'align them, or choose unequal="cut" to stop at the end of the shorter'
        )
    if unpaired:
        text_filter.findings.note(
            "pairs", "dropped: the other file has ended", f"{longer.name}:{number - unpaired + 1}", unpaired
        )


def _read_table(files: Sequence[Path], columns: Sequence[str], text_filter: TextFilter) -> Iterator[TextRow]:
    for path in files:
        yield from _filter_rows(read_rows(path, columns, text_filter.findings), path, text_filter)


def _filter_rows(rows: Rows, path: Path, text_filter: TextFilter) -> Iterator[TextRow]:
    for number, values in rows:
        text_filter.findings.read["rows"] += 1
        row = text_filter.apply(values, "rows", [path] * len(values), number)
        if row is not None:
            yield row


def find_images(folder: str | os.PathLike[str], findings: Findings | None = None) -> list[tuple[Path, str]]:
    """Image files and their labels. There is a folder for each class, with the class's name; sorted by name."""
    findings, root = Findings() if findings is None else findings, Path(folder)
    classes = sorted(each for each in root.glob("*") if each.is_dir() and not each.name.startswith("."))
    if len(classes) < 2:
        raise InputError(
            f"{root} holds {len(classes)} folders, but pictures lie in one folder for each class, at least 2"
        )
    images: list[tuple[Path, str]] = []
    for each in classes:
        files = sorted(file for file in each.rglob("*") if file.is_file() and not file.name.startswith("."))
        found = [(file, each.name) for file in files if file.suffix.lower() in _IMAGES]
        findings.read["files"] += len(files)
        for file in files:
            if file.suffix.lower() not in _IMAGES:
                findings.note("files", "left out: no picture by their name", f"{each.name}/{file.name}")
        if not found:
            raise InputError(
                f"the class folder {each} holds no picture; add some ({', '.join(sorted(_IMAGES))}), or remove it"
            )
        images += found
    return images
