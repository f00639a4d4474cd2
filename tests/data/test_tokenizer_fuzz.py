"""Broken files: each raises a CheckpointError or gives a tokenizer that works; nothing crashes or hangs."""

from __future__ import annotations

import base64
import json
import random
import re
import struct
from pathlib import Path

import pytest

from clearhead.data import load_tokenizer, train_tokenizer
from clearhead.errors import CheckpointError, InputError

from .conftest import make_lines, train_spm
from .test_tokenizer_formats import write_gguf, write_tok

FALSE_NUMBERS = [b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f" + b"\0" * 4, struct.pack("<q", 1 << 40)]


def mutate(data: bytes, draw: random.Random) -> bytes:
    broken = bytearray(data)
    at = draw.randrange(len(data))
    match draw.randrange(5):
        case 0:
            del broken[at:]
        case 1:
            for _ in range(draw.randint(1, 8)):
                broken[draw.randrange(len(data))] = draw.randrange(256)
        case 2:
            broken[at : at + 8] = draw.choice(FALSE_NUMBERS)
        case 3:
            del broken[at : at + draw.randint(1, 30)]
        case _:
            numbers = list(re.finditer(rb"\d+", data))
            if numbers:
                start, end = draw.choice(numbers).span()
                broken[start:end] = draw.choice([b"-1", b"99999999999", b"1e400", b"null", b'""', b"[]"])
    return bytes(broken)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory, corpus: Path, sentencepiece) -> dict[str, dict[str, bytes]]:
    """A small valid tokenizer in every format: {format: {file: content}}."""
    folder = tmp_path_factory.mktemp("valid")
    for kind in ("bpe", "unigram", "wordpiece"):
        train_tokenizer(corpus, kind=kind, vocab_size=300).save(folder / kind)
    model = json.loads((folder / "bpe" / "tokenizer.json").read_text())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    files = {kind: folder / kind for kind in ("bpe", "unigram", "wordpiece")}
    for name in ("gpt2", "spm", "bert", "tiktoken", "llama2c", "gguf", "marian"):
        files[name] = folder / name
        files[name].mkdir()
    (files["gpt2"] / "vocab.json").write_text(json.dumps(model["vocab"]))
    (files["gpt2"] / "merges.txt").write_text("\n".join(merges))
    train_spm(sentencepiece, corpus, files["spm"] / "tokenizer", vocab_size=150)
    (files["bert"] / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "##n", "a"]))
    lines = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
    (files["tiktoken"] / "gpt2.tiktoken").write_bytes(b"".join(lines))
    write_tok(files["llama2c"] / "tok9.bin", [(text, -1.0) for text in ["<unk>", "<s>", "</s>", " ", *"abet", "th"]])
    write_gguf(files["gguf"] / "a.gguf", tokenizer_model="gpt2", pre="smollm", tokens=tokens, merges=merges, bos=1)
    spm = (files["spm"] / "tokenizer.model").read_bytes()
    for side in ("source", "target"):
        (files["marian"] / f"{side}.spm").write_bytes(spm)
    (files["marian"] / "vocab.json").write_text('{"</s>": 0, "<unk>": 1, "\u2581the": 2, "a": 3, "<pad>": 4}')
    (files["spm"] / "tokenizer.vocab").unlink()
    return {name: {path.name: path.read_bytes() for path in place.iterdir()} for name, place in files.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bpe", "unigram", "wordpiece", "gpt2", "spm", "bert", "tiktoken", "llama2c", "gguf", "marian"]
)
def test_a_thousand_mutations(name: str, valid: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    draw = random.Random(name)
    text = make_lines(1)[0]
    refused: list[str] = []
    for _ in range(100):  # of each of ten formats
        for file, content in valid[name].items():
            (tmp_path / file).write_bytes(content)
        victim = draw.choice(sorted(valid[name]))
        (tmp_path / victim).write_bytes(mutate(valid[name][victim], draw))
        try:
            tokenizer = load_tokenizer(tmp_path)
            tokenizer.decode(tokenizer.encode(text))
        except CheckpointError as error:
            refused.append(str(error))
        except InputError:
            pass  # the vocabulary has lost its [UNK]
    assert len(refused) > 10
    for message in refused:
        assert ";" in message  # what is wrong; what to do next
        assert str(tmp_path) in message or "cut words" in message


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer.json", b"\xff\xfe{}"),
        ("tokenizer.json", b'{"version": "1.0"}'),
        ("vocab.txt", b""),
        ("vocab.txt", b"the\na\n"),
        ("x.tiktoken", b""),
        ("x.tiktoken", b"IQ== 0\nIg== 0\n"),
        ("x.tiktoken", b"not base64 at all\n"),
        ("tok9.bin", b""),
        ("tok9.bin", struct.pack("<i", 7)),
        ("tok9.bin", struct.pack("<ifi", 2**31 - 1, 0.0, 2**31 - 1)),
        ("tok9.bin", struct.pack("<ifi", 7, 0.0, -8)),
        ("tok9.bin", struct.pack("<ifi", 7, float("nan"), 1) + b"a"),
        ("tokenizer.model", b""),
        ("tokenizer.model", b"\x0a\xff\xff\xff\xff\xff\xff\xff\x7f"),
        ("tokenizer.model", b"\xff" * 40),
        ("a.gguf", b""),
        ("a.gguf", b"GGUF"),
        ("a.gguf", struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**63)),
        # These two hang the `gguf` package's own reader.
        ("a.gguf", struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 6, 2**40)),
        ("a.gguf", struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 0, 2**62)),
        (
            "a.gguf",
            struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
            + struct.pack("<Q1sI", 1, b"k", 9)
            + struct.pack("<IQ", 9, 1) * 5000,
        ),
    ],
)
def test_false_lengths_and_counts(file: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(str(tmp_path / file))} does not read as .*; fetch or export"
    ):
        load_tokenizer(tmp_path / file)


def test_a_file_too_large_to_be_a_tokenizer(tmp_path: Path) -> None:
    with (tmp_path / "tok9.bin").open("wb") as file:
        file.truncate(2**34)  # sparse: takes no space on disk
    with pytest.raises(CheckpointError, match=r"17179869184 bytes, too many for a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json"]
)
def test_broken_files_beside(name: str, tmp_path: Path, corpus: Path) -> None:
    train_tokenizer(corpus, vocab_size=300).save(tmp_path)
    for content in ('{"bos_token": ', "[]", "null"):
        (tmp_path / name).write_text(content)
        with pytest.raises(CheckpointError, match=rf"{name} does not read as JSON"):
            load_tokenizer(tmp_path)
    (tmp_path / name).write_text(
        '{"bos_token": [1], "eos_token": {"content": 3}, "pad_token_id": "x", "chat_template": 5}'
    )
    assert load_tokenizer(tmp_path).chat_template is None
