"""Every format against an independent implementation: transformers, sentencepiece, or a plain version of the algorithm."""

from __future__ import annotations

import base64
import itertools
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from clearhead.data import Tokenizer, load_tokenizer, train_tokenizer
from clearhead.data.tokenizer_formats import read_tiktoken
from clearhead.data.tokenizer_parts import byte_alphabet
from clearhead.errors import CheckpointError
from tests.shared_data import shared_data

from .conftest import TEXTS, write_json


def trained(corpus: Path, folder: Path, **options: Any) -> Tokenizer:
    """A tiny tokenizer in transformers' directory layout."""
    tokenizer = train_tokenizer(corpus, **options)
    tokenizer.save(folder)
    return tokenizer


def model_of(tokenizer: Tokenizer) -> dict[str, Any]:
    return json.loads(tokenizer.core.to_str())["model"]


# ---- directories that transformers wrote


def test_bert_as_transformers_saves_it(tmp_path: Path, corpus: Path, transformers) -> None:
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    vocab = train_tokenizer(corpus, kind="wordpiece", vocab_size=389, special=special).vocab
    for lower in (True, False):
        theirs = transformers.BertTokenizer(vocab=vocab, do_lower_case=lower)
        theirs.save_pretrained(tmp_path)
        ours = load_tokenizer(tmp_path)
        # The old layout: one token a line.
        old = tmp_path / "old"
        old.mkdir(exist_ok=True)
        (old / "vocab.txt").write_text(
            "".join(f"{token}\n" for token in sorted(vocab, key=vocab.get)), encoding="utf-8"
        )
        write_json(old / "tokenizer_config.json", {"do_lower_case": lower, "tokenizer_class": "BertTokenizer"})
        plain = load_tokenizer(old)
        for text in TEXTS:
            assert ours.encode(text) == plain.encode(text) == theirs(text).input_ids
            assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)
        for tokenizer in (ours, plain):
            roles = (tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos, tokenizer.mask)
            assert roles == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocab_and_merges(kind: str, tmp_path: Path, corpus: Path, transformers) -> None:
    model = model_of(train_tokenizer(corpus, vocab_size=389, special=("<|endoftext|>",)))
    theirs = getattr(transformers, kind)(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    merges = "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in model["merges"])
    for names in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        folder = tmp_path / names[0]
        folder.mkdir()
        write_json(folder / names[0], model["vocab"])
        (folder / names[1]).write_text(merges, encoding="utf-8")
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": kind})
        for ours in (load_tokenizer(folder), load_tokenizer(folder / names[0])):
            for text in TEXTS:
                assert ours.encode(text) == theirs(text).input_ids
            assert ours.eos == 0
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "CLIPTokenizer"})
    with pytest.raises(CheckpointError, match=r"belongs to a CLIPTokenizer.*save_pretrained"):
        load_tokenizer(folder)


def test_whisper_as_transformers_saves_it(tmp_path: Path, corpus: Path, transformers) -> None:
    model = model_of(train_tokenizer(corpus, vocab_size=389, special=()))
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>"]
    special += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    vocab = {**model["vocab"], "<|endoftext|>": 389}
    merges = [tuple(pair) for pair in model["merges"]]
    theirs = transformers.WhisperTokenizer(vocab=vocab, merges=merges, extra_special_tokens=special)
    theirs.save_pretrained(tmp_path / "new")
    old = tmp_path / "old"
    old.mkdir()
    write_json(old / "vocab.json", vocab)
    (old / "merges.txt").write_text("".join(f"{left} {right}\n" for left, right in merges), encoding="utf-8")
    write_json(old / "added_tokens.json", {token: theirs.convert_tokens_to_ids(token) for token in special})
    for ours in (load_tokenizer(tmp_path / "new"), load_tokenizer(old)):
        for text in TEXTS:
            assert ours.encode(text) == theirs(text).input_ids
        assert ours.eos == 389
        assert ours.decode(ours.encode("the number")) == "the number"


def test_esm(tmp_path: Path, transformers) -> None:
    tokens = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    theirs, ours = transformers.EsmTokenizer(str(tmp_path / "vocab.txt")), load_tokenizer(tmp_path)
    for text in ("MKTAYIAK", "MK<mask>AY.-", "M K\nT", "", "mkt", "MKj1T  bb<mask>", "<null_1>A"):
        assert ours.encode(text) == theirs(text).input_ids
    assert ours.decode(ours.encode("MKTAYIAK")) == "MKTAYIAK"
    assert (ours.bos, ours.pad, ours.eos, ours.unk, ours.mask) == (0, 1, 2, 3, 32)


def test_roles_come_from_the_nearest_file(tmp_path: Path, corpus: Path) -> None:
    trained(corpus, tmp_path, vocab_size=300)
    config = tmp_path / "tokenizer_config.json"
    config.write_text("{}")
    assert load_tokenizer(tmp_path).bos == 1  # by convention
    write_json(tmp_path / "config.json", {"bos_token_id": 7, "eos_token_id": 8, "pad_token_id": -1})
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [9, 10]})
    found = load_tokenizer(tmp_path)
    assert (found.bos, found.eos, found.pad) == (7, 9, 0)
    write_json(tmp_path / "special_tokens_map.json", {"bos_token": {"content": "<pad>"}, "mask_token": "<absent>"})
    write_json(config, {"eos_token": None})
    found = load_tokenizer(tmp_path)
    assert (found.bos, found.eos, found.mask) == (0, None, None)


# ---- Whisper's tiktoken, llama2.c, GGUF


def test_tiktoken_is_byte_level_bpe(tmp_path: Path, corpus: Path) -> None:
    tokenizer = train_tokenizer(corpus, vocab_size=389, special=())
    byte = {letter: bytes([value]) for value, letter in enumerate(byte_alphabet())}
    lines = [
        base64.b64encode(b"".join(byte[letter] for letter in tokenizer.token(id))) + b" %d\n" % id for id in range(389)
    ]
    path = tmp_path / "multilingual.tiktoken"
    path.write_bytes(b"".join([*lines, b"= 389\n"]))  # OpenAI's file really has an empty last token
    ours = load_tokenizer(path)
    assert ours.vocab_size == 390 + 2 + 99 + 6 + 1501
    assert (ours.id("<|endoftext|>"), ours.id("<|en|>"), ours.id("<|su|>")) == (390, 392, 490)
    assert ours.token(ours.vocab_size - 1) == "<|30.00|>"
    assert read_tiktoken(path, languages=100).id("<|yue|>") == 491
    around = [391, ours.id("<|notimestamps|>"), 390]
    for text in TEXTS:
        assert ours.encode(text, special=False) == tokenizer.encode(text)
        assert ours.encode(text) == [*around[:2], *tokenizer.encode(text), around[2]]
        assert ours.decode([*ours.encode(text), ours.id("<|1.00|>")]) == text


def write_tok(path: Path, pieces: list[tuple[str, float]]) -> None:
    body = b"".join(struct.pack("<fi", score, len(text.encode())) + text.encode() for text, score in pieces)
    path.write_bytes(struct.pack("<i", max(len(text.encode()) for text, _ in pieces)) + body)


def read_tok(path: Path) -> list[tuple[str, float]]:
    data, at, pieces = path.read_bytes(), 4, []
    while at < len(data):
        score, size = struct.unpack_from("<fi", data, at)
        pieces.append((data[at + 8 : at + 8 + size].decode(), score))
        at += 8 + size
    return pieces


def encode_by_score(text: str, pieces: list[tuple[str, float]]) -> list[int]:
    """llama2.c's algorithm: a space in front, letters or their bytes, then always the best-scored merge, the leftmost first."""
    ids = {piece: id for id, (piece, _) in enumerate(pieces)}
    row: list[int] = []
    for letter in " " + text if text else "":
        row += [ids[letter]] if letter in ids else [byte + 3 for byte in letter.encode()]
    while True:
        joins = [(ids.get(pieces[a][0] + pieces[b][0]), at) for at, (a, b) in enumerate(itertools.pairwise(row))]
        joins = [(pieces[id][1], -at, id) for id, at in joins if id is not None]
        if not joins:
            return row
        _, at, id = max(joins)
        row[-at : -at + 2] = [id]


def test_llama2c_with_a_random_vocabulary(tmp_path: Path) -> None:
    draw = random.Random(0)
    made = {"".join(draw.choices(" aab", k=draw.randint(2, 5))) for _ in range(60)} - {"", " ", "a", "b"}
    pieces = [("<unk>", 0.0), ("\n<s>\n", 0.0), ("\n</s>\n", 0.0), *((f"<0x{byte:02X}>", 0.0) for byte in range(256))]
    pieces += [(text, -float(rank)) for rank, text in enumerate([*sorted(made), " ", "a", "b"])]
    write_tok(tmp_path / "tok999.bin", pieces)
    ours = load_tokenizer(tmp_path)
    for _ in range(400):
        text = "".join(draw.choices("  aabü▁🙂\n", k=draw.randint(0, 24)))
        assert ours.encode(text) == [1, *encode_by_score(text, pieces)]
        assert ours.decode(ours.encode(text)) == text


def test_stories260k() -> None:
    path = shared_data("stories260K/tok512.bin")
    ours, pieces = load_tokenizer(path.parent), read_tok(path)
    assert (ours.vocab_size, ours.bos, ours.eos, ours.unk) == (512, 1, 2, 0)
    story = path.with_name("expected.txt").read_text(encoding="utf-8")
    for text in (story, *TEXTS):
        assert ours.encode(text) == [1, *encode_by_score(text, pieces)]
        assert ours.decode(ours.encode(text)) == text
    beside = load_tokenizer(path.with_name("stories260K.bin"))  # the file of weights: its tokenizer is beside it
    assert beside.encode(story) == ours.encode(story)


def test_gpt2_itself() -> None:
    ours = load_tokenizer(shared_data("gpt2-tokenizer"))
    assert ours.encode("Hello world") == [15496, 995]
    assert (ours.vocab_size, ours.eos) == (50257, 50256)
    assert ours.encode("<|endoftext|>") == [50256]
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == text


def write_gguf(path: Path, **fields: Any) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    adders = {
        "tokenizer_model": "tokenizer_model",
        "pre": "tokenizer_pre",
        "tokens": "token_list",
        "scores": "token_scores",
    }
    adders |= {"types": "token_types", "merges": "token_merges", "bos": "bos_token_id", "eos": "eos_token_id"}
    adders |= {"add_bos": "add_bos_token", "template": "chat_template", "prefix": "add_space_prefix"}
    for name, value in fields.items():
        getattr(writer, f"add_{adders[name]}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("pre", "digits"), [("gpt-2", 4), ("smollm", 1), ("llama-bpe", 3), ("qwen2", 1)])
def test_gguf_byte_level(pre: str, digits: int, tmp_path: Path) -> None:
    numbers = ["12", "123", "1234", "the"] * 40
    model = model_of(train_tokenizer(texts=numbers, vocab_size=300, special=("<|im_start|>", "<|im_end|>")))
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    path = write_gguf(
        tmp_path / "a.gguf",
        tokenizer_model="gpt2",
        pre=pre,
        tokens=tokens,
        merges=[" ".join(pair) for pair in model["merges"]],
        types=[3, 3] + [1] * (len(tokens) - 2),
        bos=0,
        eos=1,
        template="{{ bos_token }}{{ messages[0]['content'] }}",
    )
    ours = load_tokenizer(path)
    assert (ours.bos, ours.eos, ours.pad, ours.vocab_size) == (0, 1, None, len(tokens))
    assert ours.encode("")[:1] == ([0] if pre == "llama-bpe" else [])
    assert max(len(ours.token(id).strip("Ġ")) for id in ours.encode("1234", special=False)) == digits
    assert ours.chat([{"role": "user", "content": "the"}]) == "<|im_start|>the"
    assert ours.encode("<|im_end|>", special=False) == [1]
    for text in TEXTS[:4]:
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_gguf_sentencepiece(prefix: bool, tmp_path: Path, spm_models) -> None:
    theirs = spm_models["llama"][0]
    count = range(len(theirs))
    path = write_gguf(
        tmp_path / "a.gguf",
        tokenizer_model="llama",
        tokens=[theirs.id_to_piece(id) for id in count],
        scores=[theirs.get_score(id) for id in count],
        types=[
            2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1 for i in count
        ],
        bos=1,
        eos=2,
        prefix=prefix,
    )
    ours = load_tokenizer(path)
    for text in TEXTS:
        if prefix:
            assert ours.encode(text) == [1, *theirs.encode(text)]
        assert ours.decode(ours.encode(text)) == text


def test_gguf_of_another_kind(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", tokenizer_model="llma", tokens=["a"])
    with pytest.raises(CheckpointError, match=r"tokenizer model 'llma'; did you mean 'llama'"):
        load_tokenizer(path)
    path = write_gguf(tmp_path / "b.gguf", tokenizer_model="gpt2", pre="smolm", tokens=["a"], merges=["a a"])
    with pytest.raises(CheckpointError, match=r"'smolm'.*did you mean 'smollm'"):
        load_tokenizer(path)
    path = write_gguf(tmp_path / "c.gguf", tokenizer_model="gpt2", tokens=["a"], merges=["a a"])
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.pre is missing.*convert the model again"):
        load_tokenizer(path)


# ---- missing files


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no .*absent; give"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(
        CheckpointError, match=r"an empty directory.*looked for tokenizer\.json.*vocab\.json\+merges\.txt"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "weights.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"names: weights\.safetensors"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"names: weights\.safetensors"):
        load_tokenizer(tmp_path / "weights.safetensors")


def test_any_tokenizer_json(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    core.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    assert ours.vocab_size == 8  # the highest id and 1, not the number of entries
    assert (ours.bos, ours.special_ids) == (None, set())
    assert ours.encode("b") == [7]
