"""Real-world corpora: bad bytes, blank lines, a line of 10 MB, CRLF, byte order marks, tables in five formats."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data import Findings, Policy, expand_files, find_images, read_labelled, read_pairs, read_texts
from clearhead.data.corpora import MAX_PART
from clearhead.errors import ConfigError, InputError, MissingExtraError

KEEP = Policy(empty="keep")


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def documents(*files: Path, **options: Any) -> list[str]:
    """Whole documents, joined from their parts."""
    texts = [""]
    for piece in read_texts(files, **options):
        texts[-1] += piece.text
        if piece.ends:
            texts.append("")
    assert texts[-1] == ""
    return texts[:-1]


def test_a_file_is_a_document(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.txt", "a\n\nb\n"), write(tmp_path / "2.txt", "c\0d")
    assert documents(one, two) == ["a\n\nb\n", "c\0d"]


def test_lines_and_paragraphs(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "a\nb\n\n \nc\n\x0bd\u2028e\x85f\n\ng")
    findings = Findings()
    # Only "\n" ends a line: not U+2028, U+0085 or a vertical tab.
    assert documents(file, documents="line", findings=findings) == ["a", "b", "c", "\x0bd\u2028e\x85f", "g"]
    assert findings.lines() == ["3 of 8 lines dropped: empty (a.txt:3, a.txt:4, a.txt:7)"]
    assert documents(file, documents="paragraph") == ["a\nb\n", "c\n\x0bd\u2028e\x85f\n", "g"]
    assert documents(file, documents="line", policy=KEEP) == ["a", "b", "", " ", "c", "\x0bd\u2028e\x85f", "", "g"]
    with pytest.raises(InputError, match=r"a.txt:3 is empty; .*empty=\"drop\""):
        documents(file, documents="line", policy=Policy(empty="error"))


def test_crlf_and_byte_order_mark(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\r\n")
    assert documents(file) == ["one\ntwo\rthree\n"]
    assert documents(file, documents="line") == ["one", "two\rthree"]


def test_crlf_at_the_end_of_a_part(tmp_path: Path) -> None:
    for extra in range(-3, 3):
        text = "x" * (MAX_PART + extra) + "\r\n" + "y" * (MAX_PART - 1) + "\r"
        assert documents(write(tmp_path / "a.txt", text)) == [text.replace("\r\n", "\n")]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=6), st.booleans())
def test_every_character_is_read(tmp_path_factory: pytest.TempPathFactory, parts: list[str], zipped: bool) -> None:
    text = "é\n".join(parts)
    file = tmp_path_factory.mktemp("any") / ("a.txt.gz" if zipped else "a.txt")
    file.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    expected = text.removeprefix("\ufeff").replace("\r\n", "\n")
    assert documents(file, policy=KEEP) == [expected]


def test_bad_bytes(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", b"good\nb\xc3\xa9\xffad \xe2\x82\nfine\n")
    with pytest.raises(InputError, match=r"a.txt:2 is not UTF-8: byte 0xff at byte 4 .*iconv.*bad_bytes=\"replace\""):
        documents(file)
    replaced, dropped = Findings(), Findings()
    assert documents(file, policy=Policy(bad_bytes="replace"), findings=replaced) == [
        "good\nbé\ufffdad \ufffd\ufffd\nfine\n"
    ]
    assert replaced.lines() == ["1 of 3 lines repaired: invalid UTF-8 (a.txt:2)"]
    assert documents(file, policy=Policy(bad_bytes="drop"), findings=dropped, documents="line") == ["good", "fine"]
    assert dropped.lines() == ["1 of 3 lines dropped: invalid UTF-8 (a.txt:2)"]


def test_a_bad_byte_drops_only_its_part_of_a_long_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", b"x" * MAX_PART + b"\xff\nnext\n")
    assert documents(file, documents="line", policy=Policy(bad_bytes="drop")) == ["x" * MAX_PART, "next"]


def test_empty_files(tmp_path: Path) -> None:
    files = [write(tmp_path / name, content) for name, content in (("a.txt", ""), ("b.txt", "\n \n"), ("c.txt", "c"))]
    for kind in ("file", "paragraph"):
        findings = Findings()
        assert documents(*files, documents=kind, findings=findings) == ["c"]
        assert findings.lines() == ["2 of 3 files dropped: empty (a.txt, b.txt)"]
    with pytest.raises(InputError, match=r"a.txt is empty"):
        documents(*files, policy=Policy(empty="error"))


@pytest.mark.parametrize("kind", ["file", "line"])
def test_ten_million_characters_without_a_line_end(tmp_path: Path, kind: Any) -> None:
    file = write(tmp_path / "a.txt", "é" * 5_000_011)
    pieces = list(read_texts(file, documents=kind))
    assert max(len(piece.text) for piece in pieces) <= MAX_PART
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert sum(len(piece.text) for piece in pieces) == 5_000_011


@pytest.mark.slow
@pytest.mark.parametrize("line", [b"a line of some words " * 60 + b"\n", b"no line end "])
def test_memory_stays_bounded(tmp_path: Path, line: bytes) -> None:
    file = write(tmp_path / "a.txt", line * (30_000_000 // len(line)))
    read_size = 0
    tracemalloc.start()
    for piece in read_texts(file):
        read_size += len(piece.text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert read_size == file.stat().st_size
    assert peak < 2_000_000  # a part of 65,536 characters, its lines and the decoder's buffers


def test_pairs(tmp_path: Path) -> None:
    source = write(tmp_path / "a.en", "one\r\ntwo\n\nfour\n")
    target = write(tmp_path / "a.de", "eins\nzwei\ndrei\n \n")
    findings = Findings()
    assert list(read_pairs(source, target, findings=findings)) == [("one", "eins"), ("two", "zwei")]
    assert findings.lines() == ["2 of 4 pairs dropped: empty (a.en:3, a.de:4)"]
    assert list(read_pairs([source] * 2, [target] * 2, policy=KEEP))[2:5] == [
        ("", "drei"),
        ("four", " "),
        ("one", "eins"),
    ]
    with pytest.raises(InputError, match="2 source files and 1 target files"):
        list(read_pairs([source, target], [target]))


@pytest.mark.parametrize("swap", [False, True])
def test_unequal_line_counts(tmp_path: Path, swap: bool) -> None:
    files = [write(tmp_path / "a.en", "one\ntwo\nthree\n"), write(tmp_path / "a.de", "eins")]
    files = files[::-1] if swap else files
    with pytest.raises(InputError, match=r"has 1 lines.*has 3|has 3 lines.*has 1, .*unequal=\"cut\"") as error:
        list(read_pairs(*files))
    assert str(error.value).index("a.de" if swap else "a.en") < str(error.value).index("a.en" if swap else "a.de")
    findings = Findings()
    assert len(list(read_pairs(*files, policy=Policy(unequal="cut"), findings=findings))) == 1
    assert findings.lines() == ["2 of 3 pairs dropped: the other file has ended (a.en:2, ...)"]


ROWS = [("plain", "0"), ('with "quotes", and comma', "1"), ("two\nlines", "0"), ("日本", "two words")]


def save_table(path: Path, kind: str, rows: list[tuple[str, str]], names: tuple[str, str] = ("text", "label")) -> Path:
    records = [dict(zip(names, row, strict=True)) for row in rows]
    if kind.startswith("jsonl"):
        content = "".join(json.dumps({"more": [1], **record}) + "\r\n" for record in records).encode()
        path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    elif kind == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("id", *names), *((i, *row) for i, row in enumerate(rows))])
    elif kind == "parquet":
        parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        parquet.write_table(arrow.Table.from_pylist(records), path)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            datasets = pytest.importorskip("datasets")
            datasets.disable_progress_bars()
            datasets.Dataset.from_list(records).save_to_disk(path)
    return path


LABELLED = "".join(f"text {i},{'pos' if i % 3 else 'neg'}\n" for i in range(7))


@pytest.mark.parametrize("header", ["review,sentiment", "Text,Label", "a,b"])
@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_header_with_other_names_is_no_class(header: str, kind: str, tmp_path: Path) -> None:
    rows = f"{header}\n{LABELLED}"
    file = write(tmp_path / f"a.{kind}", rows.replace(",", "\t") if kind == "tsv" else rows)
    with pytest.raises(InputError, match=rf"a.{kind}:1 (seems to be a header|has no column).*data.columns=") as caught:
        list(read_labelled(file))
    assert header.split(",")[1] in str(caught.value)
    first, second = header.split(",")
    assert len(list(read_labelled(file, columns=(first, second)))) == 7


def test_a_first_row_is_no_header_if_its_label_or_no_label_comes_again(tmp_path: Path) -> None:
    assert len(list(read_labelled(write(tmp_path / "a.csv", LABELLED)))) == 7
    numbers = "".join(f"text {i},{i / 7:.3f}\n" for i in range(11))
    assert len(list(read_labelled(write(tmp_path / "b.csv", numbers)))) == 11


@pytest.mark.parametrize("header", ["", "text;label\n", '"text";"label"\n', "id;label;text\n"])
def test_semicolons_separate_a_csv_file_too(header: str, tmp_path: Path) -> None:
    rows = [("good, really", "1"), ("bad", "0"), ("good", "1")]
    lines = [f'"{text}";{label}\n' if "id" not in header else f"7;{label};{text}\n" for text, label in rows]
    assert list(read_labelled(write(tmp_path / "a.csv", header + "".join(lines)))) == rows


def test_a_semicolon_within_a_text_separates_nothing(tmp_path: Path) -> None:
    assert list(read_labelled(write(tmp_path / "a.csv", "text,label\nso; so,1\n"))) == [("so; so", "1")]
    assert list(read_labelled(write(tmp_path / "b.csv", "so; so,1\nyes,0\n"))) == [("so; so", "1"), ("yes", "0")]
    assert documents(write(tmp_path / "c.csv", "one; two\nthree\n")) == ["one; two", "three"]
    with pytest.raises(InputError, match=r"d.csv:1 can be split at its comma or at its semicolon.*text,label"):
        list(read_labelled(write(tmp_path / "d.csv", "so; so,1\n")))


@pytest.mark.parametrize("header", ["", "text\tlabel\n", "id\tlabel\ttext\n"])
def test_tabs_separate_a_csv_file_too(header: str, tmp_path: Path) -> None:
    rows = [("good, really; yes", "1"), ("bad", "0"), ("good", "1")]
    lines = [f"{text}\t{label}\n" if "id" not in header else f"7\t{label}\t{text}\n" for text, label in rows]
    assert list(read_labelled(write(tmp_path / "a.csv", header + "".join(lines)))) == rows


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_spaces_around_names_and_labels_are_not_part_of_them(kind: str, tmp_path: Path) -> None:
    mark = "," if kind == "csv" else "\t"
    lines = [f"text{mark} label", f"good{mark} pos ", f"bad{mark}neg", f"worse{mark} "]
    rows = [("good", "pos"), ("bad", "neg")]
    assert list(read_labelled(write(tmp_path / f"a.{kind}", "\n".join(lines)))) == rows


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.txt.gz"])
def test_utf_16_is_named(encoding: str, name: str, tmp_path: Path) -> None:
    content = "\ufefftext,label\ngood,1\n".encode(encoding)
    with pytest.raises(
        InputError, match=r"is UTF-16, not UTF-8: its first bytes are (ff fe|fe ff); convert it: iconv -f UTF-16"
    ):
        documents(write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content))


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "parquet", "folder"])
def test_tables(tmp_path: Path, kind: str) -> None:
    file = save_table(tmp_path / f"a.{kind}", kind, ROWS)
    assert list(read_labelled(file)) == ROWS
    assert documents(file) == [text for text, _ in ROWS]
    assert list(read_pairs(file, columns=("label", "text"))) == [(label, text) for text, label in ROWS]
    with pytest.raises(InputError, match=r"no column 'txet', only .*'text'.*did you mean 'text'"):
        documents(file, column="txet")


def test_tsv_and_headers(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", 'good "movie\t1\r\nbad\t0\n\n \t1\n')
    findings = Findings()
    assert list(read_labelled(file, findings=findings)) == [('good "movie', "1"), ("bad", "0")]
    assert findings.lines() == ["2 of 4 rows dropped: empty (a.tsv:3, a.tsv:4)"]
    headed = write(tmp_path / "b.tsv", "id\tlabel\ttext\n7\t1\tgood\n")
    assert list(read_labelled(headed)) == [("good", "1")]
    with pytest.raises(InputError, match=r"b.tsv:1 has no column 'sentence', only 'id', 'label', 'text'"):
        list(read_labelled(headed, columns=("sentence", "label")))
    # Two columns, and one of them has the expected name: a header, not a row with the label "label".
    with pytest.raises(InputError, match="no column 'text', only 'sentence', 'label'"):
        list(read_labelled(write(tmp_path / "c.tsv", "sentence\tlabel\nx\t1\n")))
    with pytest.raises(InputError, match=r"d.tsv:2 has 3 columns, the first row 2"):
        list(read_labelled(write(tmp_path / "d.tsv", "x\t1\ny\tz\t1\n")))
    with pytest.raises(InputError, match=r"plain text and has no columns; .*\.tsv"):
        list(read_labelled(write(tmp_path / "e.txt", "x\t1\n")))


def test_damaged_tables(tmp_path: Path) -> None:
    for name, content, words in (
        ("a.jsonl", '{"text": "x"}\n{"text": ', "a.jsonl:2 is no JSON"),
        ("b.jsonl", "[1]\n", "b.jsonl:1 is no JSON object"),
        ("c.jsonl", '{"text": ["x"]}\n', "c.jsonl:1 holds a list where a text belongs"),
        ("d.jsonl", '{"text": "\\ud800"}\n', r"d.jsonl:1 is not UTF-8: half a character, \\ud800"),
        ("e.csv", 'text\n"never closed\n', "e.csv:2 is no row of a csv file"),
        ("f.parquet", "no", "no parquet file"),
        ("g.txt.gz", b"\x1f\x8b\x08", r"g.txt.gz can not be read"),
        ("h.txt.gz", gzip.compress(b"x" * 999)[:20], r"h.txt.gz can not be read"),
    ):
        with pytest.raises(InputError, match=words):
            documents(write(tmp_path / name, content))


def test_json_numbers_are_labels(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"text": "x", "label": 3}\n\n{"text": null, "label": 1}\n')
    findings = Findings()
    assert list(read_labelled(file, findings=findings)) == [("x", "3")]
    assert findings.lines() == ["2 of 3 rows dropped: empty (a.jsonl:2, a.jsonl:3)"]


def test_datasets_with_splits_and_class_names(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]))
        data = datasets.Dataset.from_dict({"text": ["x", "y"], "label": [1, 0]}, features=features)
        datasets.DatasetDict(train=data).save_to_disk(tmp_path / "all")
    assert list(read_labelled(tmp_path / "all" / "train")) == [("x", "yes"), ("y", "no")]
    with pytest.raises(InputError, match="several splits: train; give one of their folders"):
        list(read_labelled(tmp_path / "all"))


@pytest.mark.parametrize(("package", "file"), [("pyarrow", "a.parquet"), ("datasets", "hf:some/name")])
def test_missing_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, file: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    path = file if file.startswith("hf:") else write(tmp_path / file, "")
    extra = {"pyarrow": "parquet"}.get(package, package)
    with pytest.raises(MissingExtraError, match=rf"{package}, which is missing; pip install 'clearhead\[{extra}\]'"):
        list(read_texts(path))


def test_expand_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    names = ["b.txt", "a.txt", "deep/c.jsonl.gz", "deep/d.py", ".hidden.txt", "x[1].txt"]
    paths = {name: write(tmp_path / name, "") for name in names}
    assert expand_files(tmp_path) == [paths[name] for name in ("a.txt", "b.txt", "deep/c.jsonl.gz", "x[1].txt")]
    assert expand_files([f"{tmp_path}/**/*.py", paths["b.txt"], f"{tmp_path}/?.txt"]) == [
        paths[name] for name in ("deep/d.py", "b.txt", "a.txt", "b.txt")
    ]
    assert expand_files(str(paths["x[1].txt"])) == [paths["x[1].txt"]]
    with pytest.raises(InputError, match=r"no file '.*/a.text'; did you mean 'a.txt'"):
        expand_files(tmp_path / "a.text")
    with pytest.raises(InputError, match=r"missing/a.txt'; the folder .* is empty or missing"):
        expand_files(tmp_path / "missing" / "a.txt")
    with pytest.raises(InputError, match="no files were given"):
        expand_files([])
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match=r"none holds no .*\.csv"):
        expand_files(tmp_path / "none")


def test_policies_are_checked() -> None:
    with pytest.raises(ConfigError, match="bad_bytes='replaced' is no policy; did you mean 'replace'"):
        Policy(bad_bytes="replaced")


def test_find_images(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds 0 folders, .* one folder for each class"):
        find_images(tmp_path)
    for name in ("dog/b.png", "dog/a.JPG", "cat/c.png", "cat/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, "")
    findings = Findings()
    assert find_images(tmp_path, findings) == [
        (tmp_path / "cat/c.png", "cat"),
        (tmp_path / "dog/a.JPG", "dog"),
        (tmp_path / "dog/b.png", "dog"),
    ]
    assert findings.lines() == ["1 of 4 files left out: no picture by their name (cat/notes.txt)"]
    (tmp_path / "bird").mkdir()
    with pytest.raises(InputError, match=r"bird holds no picture"):
        find_images(tmp_path)
