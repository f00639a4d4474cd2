"""Tokenizer files: `load_tokenizer`, and the formats that need only one short function each."""

from __future__ import annotations

import base64
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from clearhead.data import sentencepiece as spm
from clearhead.data import tokenizer_parts as parts
from clearhead.data.gguf_tokenizer import read_gguf
from clearhead.data.tokenizer import BYTE_PIECE, Tokenizer
from clearhead.errors import CheckpointError

# In the order of OpenAI's ids, which follow <|startoftranscript|>. Only large-v3 has the last one.
_LANGUAGES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml "
    "cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am "
    "yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a directory or a file, in any format of `_FORMATS`; tokenizer.json comes first.

    For a file of weights that has none inside (llama2.c's .bin, Whisper's .pt), it is the tokenizer beside the file.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise CheckpointError(f"there is no {path}; give a directory or a file that holds a tokenizer")
    for pattern, others, reader in _FORMATS:
        found = sorted(folder.glob(pattern)) if path.is_dir() else [path] if path.match(pattern) else []
        if found and all((folder / other).is_file() for other in others):
            parts.check_checksums(found[0].parent)
            return reader(found[0])
    if path.is_file() and path.suffix in (".bin", ".pt", ".safetensors"):
        return load_tokenizer(folder)
    names = sorted(entry.name for entry in folder.iterdir())[:8] if path.is_dir() else [path.name]
    raise CheckpointError(
        f"no tokenizer is known by these names: {', '.join(names) or 'an empty directory'} ({path}); "
        f"looked for {', '.join('+'.join((pattern, *others)) for pattern, others, _ in _FORMATS)}"
    )


def read_tokenizer_json(path: Path) -> Tokenizer:
    with parts.parse_errors(path, "a tokenizer.json"):
        core = tokenizers.Tokenizer.from_str(parts.read_bytes(path).decode())
        parts.apply_config(core, path.parent)
        parts.add_listed(core, path.parent, missing=True)
        parts.check_named(core, path.parent)
        # Some broken files fail only at their first use.
        core.encode("a b")
    return parts.finish(core, path.parent)


def read_gpt2(vocab_path: Path) -> Tokenizer:
    """Vocabulary and merges: transformers' vocab.json + merges.txt, or OpenAI's encoder.json + vocab.bpe."""
    merges_path = vocab_path.with_name({"encoder.json": "vocab.bpe"}.get(vocab_path.name, "merges.txt"))
    config = parts.read_json(vocab_path.with_name("tokenizer_config.json"))
    kind = str(config.get("tokenizer_class") or "GPT2Tokenizer")
    words = {"GPT2": "gpt-2", "Whisper": "gpt-2", "Qwen2": "qwen2"}.get(re.sub(r"Tokenizer(Fast)?$", "", kind))
    if words is None:
        raise CheckpointError(
            f"{vocab_path} belongs to a {kind}, whose rules are not in these files; write them out as tokenizer.json: "
            "transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
        )
    vocab = parts.read_vocab(vocab_path)
    with parts.parse_errors(merges_path, "a list of merges, two pieces a line"):
        lines = [line for line in parts.read_bytes(merges_path).decode().split("\n") if not line.startswith("#version")]
        core = parts.byte_level_bpe(vocab, [_two(line.rstrip("\r")) for line in lines if line], words)
        parts.add_special(core, ["<|endoftext|>"])
        parts.add_listed(core, vocab_path.parent)
        if config.get("add_prefix_space") and words == "gpt-2":
            core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        _surround_whisper(core)
    tokenizer = parts.finish(core, vocab_path.parent)
    ends = [
        tokenizer.bos if config.get("add_bos_token") else None,
        tokenizer.eos if config.get("add_eos_token") else None,
    ]
    if any(id is not None for id in ends):
        parts.surround(core, *([None if id is None else core.id_to_token(id)] for id in ends))
    return tokenizer


def _two(line: str) -> tuple[str, str]:
    left, right = line.split(" ")
    return left, right


def _surround_whisper(core: tokenizers.Tokenizer) -> None:
    # As transformers does if no language is given: the special tokens of a transcript without timestamps.
    if core.token_to_id("<|startoftranscript|>") is not None:
        parts.surround(core, ["<|startoftranscript|>", "<|notimestamps|>"], ["<|endoftext|>"])


def read_vocab_txt(path: Path) -> Tokenizer:
    """A file with one token a line: BERT's WordPiece, or ESM's amino acids."""
    config = parts.read_json(path.with_name("tokenizer_config.json"))
    with parts.parse_errors(path, "a list of tokens, one a line"):
        # Not splitlines: vocabularies contain characters that it would treat as line ends.
        tokens = [line.rstrip("\r") for line in parts.read_bytes(path).decode().removesuffix("\n").split("\n")]
        vocab = {token: id for id, token in enumerate(tokens)}
        letters = "<cls>" in vocab and "[CLS]" not in vocab
        unk, first, last = ("<unk>", "<cls>", "<eos>") if letters else ("[UNK]", "[CLS]", "[SEP]")
        unk, first, last = (
            str(config.get(f"{role}_token") or usual)
            for role, usual in (("unk", unk), ("cls", first), ("eos" if letters else "sep", last))
        )
        if not {unk, first, last} <= vocab.keys():
            raise ValueError(f"{len(vocab)} tokens, and {unk}, {first} or {last} is not among them")
        if letters:
            core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=unk))
            each = "|".join(re.escape(token) for token in sorted(vocab, key=len, reverse=True) if token)
            core.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(each), "isolated")]
            )
            core.decoder = decoders.Fuse()
        else:
            core = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unk))
            core.normalizer = normalizers.BertNormalizer(
                lowercase=bool(config.get("do_lower_case", True)),
                handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
                strip_accents=config.get("strip_accents"),
            )
            core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            core.decoder = decoders.WordPiece()
        parts.add_special(core, [unk, first, last, "[PAD]", "[MASK]", "<pad>", "<mask>"])
        parts.surround(core, [first], [last])
    return parts.finish(core, path.parent)


def read_tiktoken(path: Path, languages: int = 99) -> Tokenizer:
    """OpenAI's Whisper files: each line is a token in base64 and its rank. Special tokens are added; large-v3 has 100 languages."""
    with parts.parse_errors(path, "tiktoken ranks"):
        lines = [line.split() for line in parts.read_bytes(path).splitlines() if line.strip()]
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        if sorted(ranks.values()) != list(range(len(lines))) or not lines:
            raise ValueError(f"{len(lines)} lines whose ranks are not 0, 1, 2, ... each once")
        letters = parts.byte_alphabet()
        vocab = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
        core = parts.byte_level_bpe(vocab, parts.derive_merges(sorted(vocab, key=vocab.__getitem__), vocab))
        tasks = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
        times = [f"{step * 0.02:.2f}" for step in range(1501)]
        names = ["endoftext", "startoftranscript", *_LANGUAGES.split()[:languages], *tasks, *times]
        core.add_special_tokens([f"<|{name}|>" for name in names])
        _surround_whisper(core)
        return Tokenizer(core, parts.by_convention(core))


def read_llama2c(path: Path) -> Tokenizer:
    """llama2.c's tok*.bin: the length of the longest token, then score, length and bytes of each. Spaces stay spaces."""
    with parts.parse_errors(path, "llama2.c's tokenizer (its file of weights ends in .bin too)"):
        data = parts.read_bytes(path)
        (longest,) = struct.unpack_from("<i", data)
        pieces: list[spm.Piece] = []
        at = 4
        while at < len(data):
            score, size = struct.unpack_from("<fi", data, at)
            at += 8 + size
            if not 0 < size <= min(longest, 4 * parts.MAX_PIECE) or at > len(data):
                raise ValueError(f"token {len(pieces)} claims {size} bytes of at most {longest}")
            text = data[at - size : at].decode()
            kind = {0: spm.UNKNOWN, 1: spm.CONTROL, 2: spm.CONTROL}.get(len(pieces), spm.NORMAL)
            pieces.append(spm.Piece(text, score, spm.BYTE if BYTE_PIECE.fullmatch(text) else kind))
        core = spm.build_core(pieces, space=" ")
        parts.surround(core, [pieces[1].text], [])
        return Tokenizer(core, {"unk": 0, "bos": 1, "eos": 2})


# The pattern of the name, files that must be beside it, the reader.
_FORMATS: list[tuple[str, tuple[str, ...], Callable[[Path], Tokenizer]]] = [
    ("tokenizer.json", (), read_tokenizer_json),
    ("source.spm", ("target.spm", "vocab.json"), lambda path: spm.read_marian(path.parent)),
    ("vocab.json", ("merges.txt",), read_gpt2),
    ("encoder.json", ("vocab.bpe",), read_gpt2),
    ("*.model", (), spm.read_sentencepiece),
    ("vocab.txt", (), read_vocab_txt),
    ("*.tiktoken", (), read_tiktoken),
    ("tok*.bin", (), read_llama2c),
    ("*.gguf", (), read_gguf),
]
