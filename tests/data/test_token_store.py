"""Stores: round trips, damage is detected, a killed writer leaves no incomplete store, and nothing is prepared twice."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data import (
    Policy,
    Store,
    StoreWriter,
    Tokenizer,
    prepare_labelled,
    prepare_pairs,
    prepare_texts,
    train_tokenizer,
)
from clearhead.data.corpora import MAX_PART
from clearhead.errors import CheckpointError, InputError
from tests.shared_data import shared_data


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(kind="bytes")


def write(path: Path, content: str) -> Path:
    path.write_bytes(content.encode())
    return path


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text, special=False), tokenizer.eos]


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2**16 - 1), max_size=5), st.integers(-9, 9)), max_size=7),
    st.sampled_from(["uint16", "uint32"]),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[list[int], int]], dtype: str) -> None:
    folder = tmp_path_factory.mktemp("store") / "s"
    with StoreWriter(folder, {"text": dtype, "label": np.int32}, {"label": ()}) as writer:
        for ids, label in rows:
            writer.add_part("text", ids[:2], ends=False)
            writer.add_part("text", ids[2:], ends=True)
            writer.add(label=label)
        writer.info = {"über": [1]}
    store = Store(folder)
    store.check()
    assert store.info == {"über": [1]}
    text, label = store["text"], store["label"]
    assert len(store) == len(text) == len(label) == len(rows)
    assert [(text[i].tolist(), int(label[i])) for i in np.arange(len(rows))] == rows
    assert text.lengths.tolist() == [len(ids) for ids, _ in rows]
    assert text.flat.tolist() == [id for ids, _ in rows for id in ids]
    assert text.flat.dtype == dtype
    for row in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            text[row]


def make(folder: Path) -> Store:
    with StoreWriter(folder, {"text": np.uint16}) as writer:
        writer.add(text=[1, 2, 3])
        writer.add(text=[5, 7])
    return Store(folder)


def test_rows_are_mapped_not_read(tmp_path: Path) -> None:
    store = make(tmp_path / "s")
    assert isinstance(store["text"].flat, np.memmap)
    assert store["text"][-1].tolist() == [5, 7]
    with pytest.raises(InputError, match=r"no column 'texts'; did you mean 'text'"):
        store["texts"]


@pytest.mark.parametrize("name", ["text.bin", "text.offsets.bin", "store.json"])
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "s"
    store = make(folder)
    whole = (folder / name).read_bytes()
    if name != "store.json":
        (folder / name).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        with pytest.raises(CheckpointError, match=rf"{name} has checksum .* delete the folder"):
            store.check()
    for content in (whole[:-1], b""):
        (folder / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=r"is no whole store .* delete the folder"):
            Store(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match="delete the folder"):
        Store(folder)


def test_another_version(tmp_path: Path) -> None:
    make(tmp_path / "s")
    file = tmp_path / "s" / "store.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 0}))
    with pytest.raises(CheckpointError, match="version 0, this program's 1"):
        Store(tmp_path / "s")


def test_a_failure_leaves_the_old_store(tmp_path: Path) -> None:
    make(tmp_path / "s")
    with pytest.raises(OverflowError), StoreWriter(tmp_path / "s", {"text": np.uint16}) as writer:
        writer.add(text=[-11])
    assert Store(tmp_path / "s")["text"][0].tolist() == [1, 2, 3]
    assert files_in(tmp_path) == ["s"]


@pytest.mark.slow
def test_a_killed_writer_leaves_no_incomplete_store(tmp_path: Path) -> None:
    script = """
import os, signal, sys, numpy as np
from clearhead.data.token_store import StoreWriter
with StoreWriter(sys.argv[1], {"text": np.uint16}) as writer:
    writer.add(text=[1] * 100_003)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "s")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "s").exists()
    assert len(files_in(tmp_path)) == 1
    make(tmp_path / "s")  # the next writer removes it
    assert files_in(tmp_path) == ["s"]


def test_a_running_writer_is_not_disturbed(tmp_path: Path) -> None:
    (tmp_path / f".s.{os.getppid()}.tmp").mkdir()
    make(tmp_path / "s")
    assert files_in(tmp_path) == [f".s.{os.getppid()}.tmp", "s"]


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    write(tmp_path / "thesis.txt", "my thesis")
    with pytest.raises(InputError, match="is no store; choose an empty or a new folder"):
        make(tmp_path)
    assert files_in(tmp_path) == ["thesis.txt"]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"can not be written \(No space left on device\); free some space"):
        make(tmp_path / "s")
    assert files_in(tmp_path) == []


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    write(tmp_path / "file", "")
    with pytest.raises(CheckpointError, match=r"can not be written .*choose a folder you may write to"):
        make(tmp_path / "file" / "s")


def test_prepare_texts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["one\ntwo é\n", "x" * (2 * MAX_PART + 7), "THREE"]
    files = [write(tmp_path / f"{i}.txt", text) for i, text in enumerate(texts)]
    progress: list[tuple[int, int]] = []
    store = prepare_texts(tmp_path / "s", files, tokenizer, progress=lambda *numbers: progress.append(numbers))
    assert [row.tolist() for row in map(store["text"].__getitem__, range(3))] == [ids_of(tokenizer, t) for t in texts]
    size = sum(len(text.encode()) for text in texts)
    assert progress[-1] == (size, size)
    assert store.info["bytes"] == size
    assert store.info["rows"] == 3
    assert store.info["values"] == {"text": size + 3}
    assert store.info["findings"] == []
    low = prepare_texts(tmp_path / "low", files[2], tokenizer, lowercase=True)
    assert low["text"][0].tolist() == ids_of(tokenizer, "three")


def test_prepare_in_many_batches(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a tokenisation batch does not change the store."""
    file = write(tmp_path / "a.txt", "\n".join(f"line {i}" for i in range(101)))
    whole = prepare_texts(tmp_path / "whole", file, tokenizer, documents="line")
    monkeypatch.setattr("clearhead.data.preparation.BATCH", 13)
    parts = prepare_texts(tmp_path / "parts", file, tokenizer, documents="line")
    assert parts.info["fingerprint"] == whole.info["fingerprint"]
    assert np.array_equal(parts["text"].flat, whole["text"].flat)
    assert np.array_equal(parts["text"].lengths, whole["text"].lengths)


@pytest.mark.slow
def test_preparation_needs_little_memory(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.data.preparation.BATCH", 2**17)
    file = write(tmp_path / "a.txt", ("some words in a line, " * 50 + "\n") * 1500)
    tracemalloc.start()
    store = prepare_texts(tmp_path / "s", file, tokenizer)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store["text"].flat) == file.stat().st_size + 1
    # 131,072 characters at once, with their ids in lists of 8 bytes each; the whole file would need 15 MB.
    assert peak < 4_500_000


@pytest.mark.parametrize("name", ["text.bin", "store.json"])
def test_a_flipped_bit_is_found_when_a_store_is_used_again(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    """Another run would train on other tokens, without a word."""
    file, folder = write(tmp_path / "a.txt", "one\ntwo\n"), tmp_path / "s"
    prepare_texts(folder, file, tokenizer)
    whole = (folder / name).read_bytes()
    at = whole.index(b'"dtype"') + 11 if name == "store.json" else 0
    (folder / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(CheckpointError, match=r"is no whole store .*checksum.* delete the folder and prepare"):
        prepare_texts(folder, file, tokenizer)


def test_folders_are_synced_after_a_rename(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed: list[Path] = []
    synced: list[tuple[Path, int]] = []
    rename, replace, fsync = Path.rename, os.replace, os.fsync

    def note(path: Path) -> None:
        renamed.append(path.parent)

    def noted_rename(self: Path, target: Path) -> Path:
        note(Path(target))
        return rename(self, target)

    def noted_replace(source: Path, target: Path) -> None:
        note(Path(target))
        replace(source, target)

    def noted_fsync(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").is_dir():
            synced.append((Path(f"/proc/self/fd/{handle}").resolve(), len(renamed)))
        fsync(handle)

    monkeypatch.setattr(Path, "rename", noted_rename)
    monkeypatch.setattr(os, "replace", noted_replace)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    make(tmp_path / "s")
    assert (tmp_path, len(renamed)) in synced
    tokenizer.save(tmp_path / "t")
    assert (tmp_path / "t", len(renamed)) in synced


def test_a_store_is_made_once(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = write(tmp_path / "a.txt", "one\ntwo\n"), tmp_path / "s"
    first = prepare_texts(folder, file, tokenizer).info["fingerprint"]
    with monkeypatch.context() as patch:
        patch.setattr(
            "clearhead.data.text_preparation.read_texts", lambda *_, **__: pytest.fail("the text was read again")
        )
        assert prepare_texts(folder, file, tokenizer).info["fingerprint"] == first
    prints = {first}
    other = train_tokenizer(kind="bytes", special=("<unk>", "</s>"))
    prints.add(prepare_texts(folder, file, other).info["fingerprint"])
    prints.add(prepare_texts(folder, file, tokenizer, documents="line").info["fingerprint"])
    prints.add(prepare_texts(folder, file, tokenizer, policy=Policy(bad_bytes="drop")).info["fingerprint"])
    os.utime(file, ns=(1, 1))
    prints.add(prepare_texts(folder, file, tokenizer).info["fingerprint"])
    assert len(prints) == 5
    assert files_in(tmp_path) == ["a.txt", "s"]


def test_prepare_pairs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source, target = (
        write(tmp_path / "a.en", "one\n\nthree\nfour\n"),
        write(tmp_path / "a.de", "eins\nzwei\ndrei\nvierundvierzig\n"),
    )
    with pytest.raises(
        InputError, match=r"a.de:4 has at least 15 tokens, but max_len=7; .*too_long=\"drop\" or \"cut\""
    ):
        prepare_pairs(tmp_path / "s", source, target, tokenizer, max_len=7)
    assert not (tmp_path / "s").exists()

    def prepare(too_long: str) -> tuple[list[tuple[list[int], list[int]]], dict[str, Any]]:
        store = prepare_pairs(
            tmp_path / too_long,
            source,
            target,
            tokenizer,
            max_source_len=5,
            max_len=7,
            policy=Policy(too_long=too_long),
        )
        pairs = [(store["source"][i].tolist(), store["target"][i].tolist()) for i in range(len(store))]
        return pairs, store.info

    def pair(*texts: str) -> tuple[list[int], ...]:
        return tuple(ids_of(tokenizer, text) for text in texts)

    pairs, info = prepare("drop")
    assert pairs == [pair("one", "eins")]
    assert info["bytes"] == 4
    assert info["findings"] == [
        "1 of 4 pairs dropped: empty (a.en:2)",
        "1 of 4 pairs dropped: more than 5 tokens (a.en:3)",
        "1 of 4 pairs dropped: more than 7 tokens (a.de:4)",
    ]
    pairs, info = prepare("cut")
    assert pairs == [pair("one", "eins"), pair("thre", "drei"), pair("four", "vierun")]
    assert info["findings"][1:] == [
        "1 of 4 pairs cut to 5 tokens: too long (a.en:3)",
        "1 of 4 pairs cut to 7 tokens: too long (a.de:4)",
    ]


def test_a_line_of_ten_million_characters(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Its beginning shows that it is too long; the rest is not tokenised."""
    source, target = (
        write(tmp_path / "a.en", "one\n" + "x" * 10_000_019 + "\n"),
        write(tmp_path / "a.de", "eins\nzwei\n"),
    )
    store = prepare_pairs(tmp_path / "cut", source, target, tokenizer, max_source_len=5, policy=Policy(too_long="cut"))
    assert store["source"][1].tolist() == ids_of(tokenizer, "xxxx")
    with pytest.raises(InputError, match=r"a.en:2 has at least 65,537 tokens, but max_source_len=5"):
        prepare_pairs(tmp_path / "s", source, target, tokenizer, max_source_len=5)


def test_a_long_text_of_few_tokens_is_not_too_long(tmp_path: Path) -> None:
    """Tokens may be longer than expected: the whole text decides."""
    words = train_tokenizer(texts=["x" * 64], kind="wordpiece", vocab_size=11, add_bos=False)
    spaced = "x" + " " * (2 * MAX_PART) + "x"
    file = write(tmp_path / "a.tsv", f"{spaced}\t1\nx\t2\n")
    assert prepare_labelled(tmp_path / "s", file, words, max_len=2)["text"][0].tolist() == words.encode("x x")


def test_pairs_need_an_eos_token(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="eos is None"):
        prepare_pairs(tmp_path / "s", "a", "b", train_tokenizer(kind="bytes", special=()))


def test_prepare_labelled(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write(tmp_path / "a.tsv", "ten\t10\ntwo\t2\nlong one\t2\n")
    cut = Policy(too_long="cut")
    store = prepare_labelled(tmp_path / "s", file, tokenizer, max_len=5, policy=cut)
    assert store.info["labels"] == ["2", "10"]
    assert store["label"].flat.tolist() == [1, 0, 0]
    assert [store["text"][i].tolist() for i in range(3)] == [tokenizer.encode(t) for t in ("ten", "two", "long")]
    assert store.info["findings"] == ["1 of 3 rows cut to 5 tokens: too long (a.tsv:3)"]
    given = prepare_labelled(tmp_path / "given", file, tokenizer, labels=["7", "2", "10"])
    assert given.info["labels"] == ["7", "2", "10"]
    assert given["label"].flat.tolist() == [2, 1, 1]
    with pytest.raises(InputError, match=r"a.tsv:1 has the label '10', which is none of the 2 known"):
        prepare_labelled(tmp_path / "x", file, tokenizer, labels=["1", "2"])
    with pytest.raises(InputError, match=r"every label is '2'; .*right column"):
        prepare_labelled(tmp_path / "x", write(tmp_path / "b.tsv", "x\t2\n"), tokenizer)


def test_nothing_left(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match=r"nothing is left of .*a.txt: 1 of 1 files dropped: empty"):
        prepare_texts(tmp_path / "s", write(tmp_path / "a.txt", "\n"), tokenizer)
    assert files_in(tmp_path) == ["a.txt"]


def test_sst2(tmp_path: Path, tokenizer: Tokenizer) -> None:
    store = prepare_labelled(tmp_path / "s", shared_data("sst2/dev.tsv"), tokenizer)
    assert len(store) == 872
    assert store.info["labels"] == ["0", "1"]
    assert store.info["findings"] == []


def test_tinyshakespeare_as_characters(tmp_path: Path) -> None:
    file = shared_data("tinyshakespeare.txt")
    chars = train_tokenizer(file, kind="chars", special=("<unk>",))
    store = prepare_texts(tmp_path / "s", file, chars)
    assert len(store["text"].flat) == 1_115_394
    assert chars.decode(store["text"].flat[-1000:].tolist()) == file.read_text()[-1000:]
