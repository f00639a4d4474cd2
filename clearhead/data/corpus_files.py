"""One file of a corpus, by its suffix: lines of text, or the rows of a table. Nothing is filtered here.

Bytes that are not UTF-8 are read as lone surrogates (Python's "surrogateescape"), which valid UTF-8 can not contain. The filter
finds them there, when file, line and byte are still known.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from clearhead.data.filters import Findings
from clearhead.errors import InputError, MissingExtraError, did_you_mean

Rows = Iterator[tuple[int, list[str]]]  # the number of the line or row, counted from 1, and the chosen columns
_MAX_FIELD = 2**26  # characters: where a quote is never closed, the rest of the file would be one field
_SAMPLED_LINES = 64  # of a csv file, to find what separates its fields
_DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab"}


def read_lines(path: Path, findings: Findings, limit: int = -1) -> Iterator[str]:
    """Lines with their "\\n", the only character that ends a line. CRLF becomes LF; a byte order mark is skipped.

    A line of more than `limit` characters comes in parts. A part that does not end in "\\n" is continued, or is the file's last.
    """
    try:
        with path.open("rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            if (first := file.peek(2)[:2]) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise InputError(
                    f"{path} is UTF-16, not UTF-8: its first bytes are {first.hex(' ')}; convert it: iconv -f UTF-16 -t UTF-8"
                )
            text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n")
            reported = 0
            for count in itertools.count(1):
                line = text.readline(limit)
                if line.endswith("\r") and len(line) == limit:  # its "\n" may be the next character
                    line += text.readline(1)
                if count % 256 == 0 or not line:  # for each line, tell() would take longer than reading it
                    findings.done += raw.tell() - reported
                    reported = raw.tell()
                if not line:
                    return
                yield line[:-2] + "\n" if line.endswith("\r\n") else line
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} can not be read ({error}); is it complete, and may you read it?") from None


def find_kind(path: Path) -> str:
    """The kind of a file, by its name: "text", or one of the tables "jsonl", "csv", "tsv", "parquet" and "dataset"."""
    if str(path).startswith("hf:") or path.is_dir():
        return "dataset"
    suffix = (path.with_suffix("") if path.suffix == ".gz" else path).suffix[1:].lower()
    return suffix if suffix in _READERS else "text"


def read_rows(path: Path, columns: Sequence[str], findings: Findings) -> Rows:
    """The `columns` of a table, row by row."""
    kind = find_kind(path)
    if kind == "text":
        raise InputError(
            f"{path} is plain text and has no columns; {' and '.join(columns)} need a .tsv, .csv, .jsonl or .parquet file"
        )
    return _READERS[kind](path, columns, findings)


def _read_jsonl(path: Path, columns: Sequence[str], findings: Findings) -> Rows:
    for number, line in enumerate(read_lines(path, findings), 1):
        if not line.strip():
            yield number, [""] * len(columns)
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number} is no JSON ({error}): {line!r:.60}; write one object a line") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number} is no JSON object: {line!r:.60}; write one object a line")
        _need(columns, list(row), f"{path}:{number}")
        yield number, [_as_text(row[name], f"{path}:{number}") for name in columns]


def _read_tsv(path: Path, columns: Sequence[str], findings: Findings) -> Rows:
    lines = enumerate(read_lines(path, findings), 1)
    return _pick(((number, line.removesuffix("\n").split("\t")) for number, line in lines), columns, path)


def _read_csv(path: Path, columns: Sequence[str], findings: Findings) -> Rows:
    def rows() -> Rows:
        csv.field_size_limit(_MAX_FIELD)  # csv has one limit for all its readers; the default is 131,072
        reader = csv.reader(read_lines(path, findings), strict=True, delimiter=_find_delimiter(path, columns))
        number = 1
        try:
            for row in reader:
                yield number, row or [""]
                number = reader.line_num + 1
        except csv.Error as error:
            raise InputError(f"{path}:{number} is no row of a csv file ({error}); check its quotes") from None

    return _pick(rows(), columns, path)


def _find_delimiter(path: Path, columns: Sequence[str]) -> str:
    """What separates a csv file's fields, by its first rows: a comma, or the semicolon or tab that many spreadsheets write.

    Without a header, rows can be read in several ways: then all of the first rows must agree on one.
    """
    lines = list(itertools.islice(read_lines(path, Findings()), _SAMPLED_LINES))
    samples = {mark: _split_sample(lines, mark) for mark in _DELIMITERS}
    samples = {mark: rows for mark, rows in samples.items() if rows and len(rows[0]) > 1}
    if named := [mark for mark, rows in samples.items() if set(columns) & set(_strip(rows[0]))]:
        return named[0]
    if len(columns) == 1 or not samples:
        return ","
    fitting = [mark for mark, rows in samples.items() if len(rows[0]) == len(columns)]
    if len(fitting) < 2:
        return (fitting or list(samples))[0]
    even = [mark for mark in fitting if len({len(row) for row in samples[mark] if row}) == 1]
    if len(even) != 1:
        raise InputError(
            f"{path}:1 can be split at its {' or at its '.join(_DELIMITERS[mark] for mark in fitting)}, and the rows after it do "
            f"not decide: {lines[0]!r:.60}; write the column names into a first line, such as "
            f"{' or '.join(mark.join(columns) for mark in fitting)}"
        )
    return even[0]


def _split_sample(lines: list[str], delimiter: str) -> list[list[str]]:
    """The rows of the first lines; the last may be cut in the middle, and what is no csv ends the sample."""
    rows: list[list[str]] = []
    try:
        for row in csv.reader(lines, strict=True, delimiter=delimiter):
            rows.append(row)
    except csv.Error:
        pass
    return rows


def _pick(rows: Rows, columns: Sequence[str], path: Path) -> Rows:
    """The wanted columns, by name if the first row is a header; without a header, all columns in their order."""
    first = next(rows, None)
    if first is None:
        return
    number, names = first[0], _strip(first[1])
    width, places = len(names), list(range(len(columns)))
    # "Text,Label" is a header too: refused below with the names that it has.
    if {name.lower() for name in columns} & {name.lower() for name in names} or width != len(columns):
        _need(columns, names, f"{path}:{number}")
        places = [names.index(name) for name in columns]
    else:
        yield first
    for number, row in rows:
        if len(row) not in (width, 1) or (len(row) == 1 < width and row[0].strip()):
            raise InputError(f"{path}:{number} has {len(row)} columns, the first row {width}; correct that row")
        yield number, [row[place] for place in places] if len(row) == width else [""] * len(columns)


def _strip(names: list[str]) -> list[str]:
    return [name.strip() for name in names]


def _read_parquet(path: Path, columns: Sequence[str], findings: Findings) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError(f"{path} needs pyarrow, which is missing; pip install 'clearhead[parquet]'") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _need(columns, file.schema_arrow.names, str(path))
            for batch in file.iter_batches(batch_size=1024, columns=list(columns)):
                for values in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
                    number += 1
                    yield number, [_as_text(value, f"{path}:{number}") for value in values]
                findings.done += path.stat().st_size * batch.num_rows // max(1, file.metadata.num_rows)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} is no parquet file that can be read ({error}); fetch it again") from None


def _read_dataset(path: Path, columns: Sequence[str], findings: Findings) -> Rows:
    """A folder that `save_to_disk` wrote, or hf:NAME or hf:NAME:SPLIT from the hub (the default split is "train")."""
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(f"{path} needs datasets, which is missing; pip install 'clearhead[datasets]'") from None
    name = str(path)
    try:
        if name.startswith("hf:"):
            place, _, split = name[3:].partition(":")
            data: Any = datasets.load_dataset(place, split=split or "train")
        else:
            data = datasets.load_from_disk(name)
    except Exception as error:  # the network, the hub, the disk and the dataset's own script can all fail
        raise InputError(f"the dataset {name} can not be loaded ({error!r:.200}); check its name or folder") from None
    if isinstance(data, dict):
        raise InputError(
            f"{name} holds several splits: {', '.join(data)}; give one of their folders, such as {name}/train"
        )
    _need(columns, data.column_names, name)
    spelled: dict[str, Callable[[Any], Any]] = {
        column: getattr(data.features[column], "int2str", lambda value: value) for column in columns
    }
    for number, row in enumerate(data.select_columns(list(columns)), 1):
        try:
            yield number, [_as_text(spelled[column](row[column]), f"{name}:{number}") for column in columns]
        except ValueError as error:
            raise InputError(f"{name}:{number} has no class by that number ({error}); leave such rows out") from None


_READERS: dict[str, Callable[[Path, Sequence[str], Findings], Rows]] = {
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "tsv": _read_tsv,
    "parquet": _read_parquet,
    "dataset": _read_dataset,
}


def _need(columns: Sequence[str], found: Sequence[str], place: str) -> None:
    for name in columns:
        if name not in found:
            raise InputError(
                f"{place} has no column {name!r}, only {', '.join(map(repr, found)):.200}; name the columns to use: "
                f'--set "data.columns={_spell_names(columns)}" with their names in this file; '
                + did_you_mean(name, [each[:40] for each in found])
            )


def _spell_names(names: Sequence[str]) -> str:
    return "[" + ", ".join(f"'{name}'" for name in names) + "]"


def _as_text(value: Any, place: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str | int | float):
        return str(value)
    raise InputError(f"{place} holds a {type(value).__name__} where a text belongs: {value!r:.60}; name another column")
