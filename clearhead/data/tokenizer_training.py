"""Training a tokenizer on your own text, with the trainers of the `tokenizers` library."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from clearhead.data.interruptible import call_interruptibly
from clearhead.data.tokenizer import Tokenizer
from clearhead.data.tokenizer_parts import CONVENTION, by_convention, byte_alphabet, surround
from clearhead.errors import ConfigError, InputError, did_you_mean

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Kind = Literal["bpe", "unigram", "wordpiece", "bytes", "chars"]
_KINDS = ("bpe", "unigram", "wordpiece", "bytes", "chars")
# Added to the code of a letter inside a word, to mark it: the result is in Unicode's private-use planes.
_INSIDE = 0xF0000


def train_tokenizer(
    files: Files = (),
    kind: Kind = "bpe",
    vocab_size: int | None = None,
    special: Sequence[str] = ("<pad>", "<s>", "</s>", "<unk>"),
    *,
    texts: Iterable[str] | None = None,
    split_digits: bool = False,
    add_bos: bool = True,
    add_eos: bool = False,
    progress: bool = False,
) -> Tokenizer:
    """A tokenizer trained on `files` (UTF-8) or on an iterable of `texts`; equal corpora give equal tokenizers.

    "bpe" and "unigram" work on bytes, so decoding restores every text exactly; "bytes" has an entry for each of the 256 bytes
    and needs no corpus; "chars" has one for every character in the corpus; "wordpiece" is BERT's, which loses spacing. Special
    tokens come first, in the order given. `vocab_size` (default 8192) includes them and is a limit: a small corpus may give
    fewer entries. `split_digits` makes every digit its own token. `add_bos` and `add_eos` say what `encode(special=True)` adds.
    With `progress`, `tokenizers` draws progress bars on stderr.

    The library's unigram trainer only considers strings that are followed by at least two different letters (or a letter and
    the end of a word) somewhere. English text takes at most 2% more tokens than with SentencePiece; a corpus of few words that
    never vary takes many more: use "bpe" for it.
    """
    if kind not in _KINDS:
        raise ConfigError(f"no tokenizer is of kind {kind!r}; {did_you_mean(kind, _KINDS)}")
    if len(set(special)) < len(special) or "" in special:
        raise ConfigError(f"special={tuple(special)} has a repeated or an empty name; give each token its own")
    unk = next((name for name in CONVENTION["unk"] if name in special), None)
    if unk is None and kind in ("wordpiece", "chars"):
        raise ConfigError(f"kind={kind!r} meets unknown text, but special={tuple(special)} lacks '<unk>'; add it")
    _check_size(vocab_size, len(special) + (1 if kind in ("wordpiece", "chars") else 256), kind)

    corpus = iter(()) if kind == "bytes" else _read(files, texts)
    if kind != "bytes":
        first = next((text for text in corpus if text), None)
        if first is None:
            raise InputError(f"there is no text to train on in files={files!r:.100}; give files or texts with content")
        corpus = chain([first], corpus)
    try:
        core = _learn(corpus, kind, vocab_size or 8192, list(special), unk, split_digits, progress)
    except UnicodeEncodeError as error:  # a lone surrogate, which a Python str can contain, but no file
        raise InputError(f"a text to train on is not valid Unicode: {error}; remove what is no text") from error
    _check_size(vocab_size, core.get_vocab_size(), kind)

    core.add_special_tokens(list(special))
    roles = by_convention(core)
    names = {role: core.id_to_token(id) for role, id in roles.items() if id is not None}
    surround(core, [names.get("bos") if add_bos else None], [names.get("eos") if add_eos else None])
    return Tokenizer(core, roles)


def _check_size(vocab_size: int | None, least: int, kind: str) -> None:
    if vocab_size is not None and vocab_size < least:
        raise ConfigError(f"vocab_size={vocab_size} is too small for kind={kind!r} here; it needs at least {least}")


def _learn(
    corpus: Iterable[str], kind: str, size: int, special: list[str], unk: str | None, split_digits: bool, progress: bool
) -> tokenizers.Tokenizer:
    common: dict[str, Any] = {"vocab_size": size, "special_tokens": special, "show_progress": progress}
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    if kind == "bpe":
        trainer = trainers.BpeTrainer(initial_alphabet=byte_alphabet(), **common)
        call_interruptibly(lambda texts: core.train_from_iterator(texts, trainer), corpus)
    elif kind == "unigram":
        # Split at spaces only, as SentencePiece does. With GPT-2's rule the same text took a third more tokens (122k against
        # 93k for the first 300 kB of tinyshakespeare with 4,000 entries).
        words = pre_tokenizers.Split(Regex(r" ?\S+|\s+(?!\S)|\s+"), "isolated")
        core.pre_tokenizer = pre_tokenizers.Sequence([*digits, words, bytes_only])
        core.model = models.Unigram()
        trainer = trainers.UnigramTrainer(initial_alphabet=byte_alphabet(), unk_token=unk, **common)
        call_interruptibly(lambda texts: core.train_from_iterator(texts, trainer), corpus)
        core.model = _deterministic(core, special, unk)
    elif kind == "wordpiece":
        core.normalizer = normalizers.BertNormalizer(lowercase=False)
        core.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.BertPreTokenizer()])
        core.decoder = decoders.WordPiece()
        core.model = models.WordPiece(
            _learn_wordpieces(core, corpus, trainers.BpeTrainer(**common)), unk_token=str(unk)
        )
    elif kind == "bytes":
        core.pre_tokenizer = bytes_only
        core.model = models.BPE(_number([*special, *byte_alphabet()]), [])
    else:
        core.model = models.BPE(_number([*special, *sorted({c for text in corpus for c in text})]), [], unk_token=unk)
        core.pre_tokenizer = pre_tokenizers.Sequence([])
        core.decoder = decoders.Fuse()
    return core


def _number(tokens: Iterable[str]) -> dict[str, int]:
    return {token: id for id, token in enumerate(dict.fromkeys(tokens))}


def _deterministic(core: tokenizers.Tokenizer, special: list[str], unk: str | None) -> models.Unigram:
    """The trained model without the differences between runs.

    The trainer sums in the order of a hash table, so the last digits of a score vary; and bytes that are not in the corpus get
    scores that are 0.0001 apart, in random order.
    """
    learnt = json.loads(core.to_str())["model"]["vocab"][len(special) :]
    least = min(score for _, score in learnt)
    pieces = [(piece, round(least if score < least + 256 * 0.0001 else score, 6)) for piece, score in learnt]
    pieces.sort(key=lambda entry: (-entry[1], entry[0]))
    return models.Unigram([(token, 0.0) for token in special] + pieces, special.index(unk) if unk else None)


def _learn_wordpieces(
    core: tokenizers.Tokenizer, corpus: Iterable[str], trainer: trainers.BpeTrainer
) -> dict[str, int]:
    """A WordPiece vocabulary, made by plain BPE over words whose inner letters are marked.

    The library's WordPiece trainer numbers the inner letters in the order of a hash table and breaks ties by number, so two
    runs give different results.
    """
    inside = {code: code + _INSIDE for code in range(0x20000)}
    plain = tokenizers.Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    def marked() -> Iterator[str]:
        for text in corpus:
            words = core.pre_tokenizer.pre_tokenize_str(core.normalizer.normalize_str(text))
            yield " ".join(word[0] + word[1:].translate(inside) for word, _ in words)

    call_interruptibly(lambda texts: plain.train_from_iterator(texts, trainer), marked())
    ranked = sorted(plain.get_vocab().items(), key=lambda entry: entry[1])
    outside = {marked: code for code, marked in inside.items()}
    return _number(("##" if ord(token[0]) >= _INSIDE else "") + token.translate(outside) for token, _ in ranked)


def _read(files: Files, texts: Iterable[str] | None) -> Iterator[str]:
    """Files line by line, or texts one by one."""
    paths = [Path(files)] if isinstance(files, (str, os.PathLike)) else [Path(file) for file in files]
    if isinstance(texts, str):
        raise InputError(f"texts is one text, {texts!r:.60}, and would be read letter by letter; put it in a list")
    if texts is not None and paths:
        raise InputError(f"both files ({paths[0]} ...) and texts are given; choose one of them")
    for path in paths:
        if not path.is_file():
            raise InputError(f"there is no file {path} to train on; check the path")
    for text in texts or ():
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - not every caller has types
            raise InputError(f"a text must be a str, not {type(text).__name__}: {text!r:.60}; decode it first")
        yield text
    for path in paths:
        with path.open("rb") as file:
            # With its line ending: a newline is text too.
            for number, line in enumerate(file, 1):
                try:
                    yield line.decode()
                except UnicodeDecodeError as error:
                    wrong = line[error.start : error.start + 4]
                    raise InputError(
                        f"{path} is not UTF-8: {wrong!r} in line {number}; convert it first, for instance with iconv"
                    ) from error
