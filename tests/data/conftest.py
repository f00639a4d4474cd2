"""A small corpus, and the libraries to compare with, imported without their warnings."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from clearhead.data import Tokenizer, load_tokenizer

COMMON = "the a of and to in is was that with not, number. it's don't Mann über schön! été? 12 345 2024 中文 日本語 привет мир 🙂"
STARTS = "be un ver gr st tr ab con pre sch wa mo li"
MIDDLES = "an en ö er ou ai in ol ü ack"
ENDS = "d t ing ung lich er ed es tion ß heit s"


def make_lines(count: int = 600, seed: int = 0) -> list[str]:
    """Lines of common and of random words, with enough different ones to train a tokenizer."""
    draw = random.Random(seed)
    made = ["".join(draw.choice(parts.split()) for parts in (STARTS, MIDDLES, ENDS)) for _ in range(400)]
    words = COMMON.split(" ") * 20 + made
    return [" ".join(draw.choices(words, k=draw.randint(2, 14))) for _ in range(count)]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(make_lines()) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def sentencepiece() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SWIG's types have no __module__
        return pytest.importorskip("sentencepiece")


@pytest.fixture(scope="session")
def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


def train_spm(sentencepiece, corpus: Path, prefix: Path, **options: Any) -> Path:
    defaults = {"input": str(corpus), "model_prefix": str(prefix), "vocab_size": 307, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(**{**defaults, "num_threads": 1, **options})
    return prefix.with_name(prefix.name + ".model")


SPM = {
    "unigram": {"model_type": "unigram"},
    "unigram-bytes": {"model_type": "unigram", "byte_fallback": True, "vocab_size": 503},
    "bpe": {"model_type": "bpe"},
    "llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "vocab_size": 503,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
    },
    "no-prefix": {"model_type": "bpe", "add_dummy_prefix": False},
    "across-words": {"model_type": "unigram", "split_by_whitespace": False},
    "symbols": {"model_type": "unigram", "user_defined_symbols": ["<u>", "<u>a", "Mann"]},
}
SPM["symbols, llama"] = {**SPM["llama"], "user_defined_symbols": ["<u>", "<u>a", "Mann", "▁▁"]}


@pytest.fixture(scope="session")
def spm_models(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, sentencepiece
) -> dict[str, tuple[Any, Tokenizer]]:
    models = {}
    for name, options in SPM.items():
        path = train_spm(sentencepiece, corpus, tmp_path_factory.mktemp(name) / "tokenizer", **options)
        models[name] = (sentencepiece.SentencePieceProcessor(model_file=str(path)), load_tokenizer(path))
    return models


TEXTS = [
    "",
    " ",
    "Hello world",
    " the  Straße\n\n\tist 12 345 schön!  ",
    "don't\r\nit's 🙂 中文 ЖЖ\0",
    *make_lines(40, seed=7),
]


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
