"""Laws of every tokenizer: round trips, batches, streams, saving, refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data import Tokenizer, load_tokenizer, train_tokenizer
from clearhead.errors import CheckpointError, InputError

LINES = ["the cat sat on the mat", "größer 中文 🙂 12", "it's  two\n"] * 20
KINDS = {
    kind: train_tokenizer(texts=LINES, kind=kind, vocab_size=size, add_eos=True)
    for kind, size in (("bpe", 307), ("unigram", 307), ("bytes", None), ("chars", None), ("wordpiece", 97))
}
EDGES = [
    "",
    "\0",
    "\n",
    "\r\n",
    " ",
    "   ",
    "🙂",
    "👩‍👩‍👧",
    "שלום עולם",
    "مرحبا",
    "e\u0301\u0323",
    "\ufffd",
    "\U0010ffff",
    "ａ",
]

any_text = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(EDGES)
byte_level = pytest.mark.parametrize("kind", ["bpe", "unigram", "bytes"])
every_kind = pytest.mark.parametrize("kind", list(KINDS))


@byte_level
@given(text=any_text)
def test_bytes_encode_all_of_unicode(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@byte_level
@pytest.mark.parametrize("text", EDGES)
def test_edge_cases_round_trip(kind: str, text: str) -> None:
    assert KINDS[kind].decode(KINDS[kind].encode(text)) == text


def test_a_byte_is_its_id() -> None:
    tokenizer = KINDS["bytes"]
    assert tokenizer.vocab_size == 4 + 256
    assert tokenizer.encode("aé", special=False) == [4 + byte for byte in "aé".encode()]


def test_roles_and_specials() -> None:
    tokenizer = KINDS["bpe"]
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.unk, tokenizer.mask) == (0, 1, 2, 3, None)
    ids = tokenizer.encode("the cat")
    assert (ids[0], ids[-1]) == (1, 2)
    assert ids[1:-1] == tokenizer.encode("the cat", special=False)
    assert tokenizer.decode(ids, special=True) == "<s>the cat</s>"
    assert tokenizer.token(1) == "<s>"
    assert tokenizer.id("<s>") == 1
    assert tokenizer.token(tokenizer.id("Ġcat")) == "Ġcat"


# ---- batches


@every_kind
def test_batch_is_the_rows_padded(kind: str) -> None:
    tokenizer = KINDS[kind]
    texts = ["the cat", "", "it's two mat on the mat"]
    rows = [tokenizer.encode(text) for text in texts]
    for side in ("left", "right"):
        tokens, real = tokenizer.batch(texts, side=side)
        assert tokens.dtype == torch.long
        assert tokens.shape == (3, max(map(len, rows)))
        assert [row[mask].tolist() for row, mask in zip(tokens, real, strict=True)] == rows
        assert (tokens[~real] == tokenizer.pad).all()
        assert real[1, 0 if side == "right" else -1]


def test_no_pad_token_and_no_texts() -> None:
    tokenizer = train_tokenizer(kind="bytes", special=())
    tokens, real = tokenizer.batch(["ab", "c"])
    assert tokens.tolist() == [[97, 98], [99, 0]]
    assert real.tolist() == [[True, True], [True, False]]
    assert tokenizer.batch([])[0].shape == (0, 0)


def test_long_texts_are_refused_or_truncated() -> None:
    tokenizer = KINDS["bytes"]
    text = "abcdefg"
    with pytest.raises(InputError, match=r"9 tokens .*max_len=5.*truncate"):
        tokenizer.batch([text], max_len=5)
    assert tokenizer.batch([text], max_len=9)[0].tolist() == [tokenizer.encode(text)]
    assert tokenizer.batch([text], max_len=5, truncate="right")[0].tolist() == [tokenizer.encode("abc")]
    assert tokenizer.batch([text], max_len=5, truncate="left")[0].tolist() == [tokenizer.encode("efg")]
    assert tokenizer.batch([text], max_len=2, truncate="left")[0].tolist() == [[1, 2]]
    with pytest.raises(InputError, match="2 of them special"):
        tokenizer.batch([text], max_len=1, truncate="left")


# ---- streams


@pytest.mark.slow
@every_kind
@given(data=st.data())
def test_stream_equals_decode(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40)
    drawn = data.draw(any_ids | any_text)
    ids = tokenizer.encode(drawn) if isinstance(drawn, str) else drawn
    special = data.draw(st.booleans())
    stream = tokenizer.stream(special=special)
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids, special=special)


def test_stream_waits_for_a_whole_character() -> None:
    stream = KINDS["bytes"].stream()
    ids = KINDS["bytes"].encode("a🙂b", special=False)
    assert [stream.push(id) for id in ids] == ["a", "", "", "", "🙂", "b"]
    assert stream.push(ids[1]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(ids[0]) == "a"


def test_stream_cost_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = KINDS["bpe"]
    widest = 0
    decode = tokenizer.decode

    def watch(ids: list[int], special: bool = False) -> str:
        nonlocal widest
        widest = max(widest, len(ids))
        return decode(ids, special)

    monkeypatch.setattr(tokenizer, "decode", watch)
    stream = tokenizer.stream()
    for id in tokenizer.encode("the cat sat on the größer mat. " * 50):
        stream.push(id)
    assert widest < 10


# ---- saving


@every_kind
def test_load_gives_back_what_save_wrote(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]
    tokenizer.chat_template = "{{ messages }}" if kind == "bpe" else None
    # Files of another tokenizer: must not affect this one.
    (tmp_path / "chat_template.jinja").write_text("stale")
    (tmp_path / "config.json").write_text('{"mask_token_id": 5}')
    (tmp_path / "special_tokens_map.json").write_text('{"mask_token": "<s>"}')
    tokenizer.save(tmp_path)
    same_as(load_tokenizer(tmp_path), tokenizer)
    assert not list(tmp_path.glob(".*"))
    tokenizer.chat_template = None


def same_as(found: Tokenizer, expected: Tokenizer) -> None:
    roles = ("bos", "eos", "pad", "unk", "mask", "vocab_size", "special_ids", "vocab", "chat_template")
    assert {role: getattr(found, role) for role in roles} == {role: getattr(expected, role) for role in roles}
    assert found.core.to_str() == expected.core.to_str()


@every_kind
def test_transformers_reads_what_save_wrote(kind: str, tmp_path: Path, transformers) -> None:
    tokenizer = KINDS[kind]
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in LINES[:3]:
        assert theirs(text).input_ids == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text), skip_special_tokens=True) == tokenizer.decode(
            tokenizer.encode(text)
        )
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 0)
    theirs.save_pretrained(tmp_path / "theirs")  # with our checksums, of files that it writes in its own way
    assert load_tokenizer(tmp_path / "theirs").encode(LINES[0]) == tokenizer.encode(LINES[0])


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KINDS["bpe"].save(tmp_path)

    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        KINDS["chars"].save(tmp_path)
    monkeypatch.undo()
    same_as(load_tokenizer(tmp_path), KINDS["bpe"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_a_file_may_not_truncate_or_pad(tmp_path: Path) -> None:
    KINDS["bpe"].save(tmp_path)
    found = json.loads((tmp_path / "tokenizer.json").read_text())
    found["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    found["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    found["padding"] |= {"pad_type_id": 0, "pad_token": "<pad>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json is not what was saved.*on purpose, remove.*'checksums'"
    ):
        load_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["checksums"]  # as the error says
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).encode("the cat sat") == KINDS["bpe"].encode("the cat sat")


# ---- refusals


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda t: t.encode(b"bytes"), r"must be a str, not bytes.*decode it"),
        (lambda t: t.encode("\ud800"), r"cannot be encoded.*lone surrogate"),
        (lambda t: t.batch("one text"), r"one str, 'one text'.*list"),
        (lambda t: t.batch(["a"], side="rigth"), r"side='rigth'.*did you mean 'right'"),
        (lambda t: t.batch(["a"], truncate="lefft"), r"truncate='lefft'.*did you mean 'left'"),
        (lambda t: t.decode([999_999]), r"id 999999 is not in this vocabulary of 296 ids"),
        (lambda t: t.decode([-1]), r"id -1 is not"),
        (lambda t: t.stream().push(999_999), r"id 999999"),
        (lambda t: t.token(-3), r"id -3"),
        (lambda t: t.id("<pat>"), r"'<pat>' is not one token.*did you mean '<pad>'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_refusals(wrong: Callable[[Tokenizer], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        wrong(KINDS["bpe"])
