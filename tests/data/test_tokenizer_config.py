"""tokenizer_config.json beside a tokenizer.json that says otherwise: transformers is the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from clearhead.data import load_tokenizer
from clearhead.data import tokenizer_parts as parts
from clearhead.errors import CheckpointError


def written(folder: Path, core: tokenizers.Tokenizer, kind: str, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(dict(model_type=kind)))
    return folder


def assert_as_transformers(folder: Path, text: str) -> list[int]:
    expected = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert load_tokenizer(folder).encode(text) == expected
    return expected


BERT_RULES: list[dict[str, Any]] = [
    *(
        {name: value}
        for name in ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
        for value in (True, False)
    ),
    dict(do_lower_case=False, strip_accents=None),
    {},
]


@pytest.mark.parametrize("kind", ["BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("rules", [(True, None), (False, None), (True, False), (False, True)])
def test_berts_rules_in_tokenizer_config(tmp_path: Path, kind: str, rules: tuple[bool, bool | None]) -> None:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"aAéÉeE中"]
    core = tokenizers.Tokenizer(tokenizers.models.WordPiece({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    core.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=rules[0], strip_accents=rules[1])
    core.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    parts.add_special(core, names[:5])
    parts.surround(core, ["[CLS]"], ["[SEP]"])
    found = set()
    for config in BERT_RULES:
        folder = written(tmp_path, core, "bert", tokenizer_class=kind, cls_token="[CLS]", sep_token="[SEP]", **config)
        found.add(tuple(assert_as_transformers(folder, "A é É a中a")))
    assert (len(found) > 1) == kind.startswith("Bert")
    # Where no class is named, only what is given counts.
    for config in (dict(do_lower_case=False), dict(do_lower_case=True)):
        normalizer = load_tokenizer(written(tmp_path, core, "bert", **config)).core.normalizer
        assert normalizer.lowercase == config["do_lower_case"]
        assert normalizer.strip_accents == rules[1]


def gpt2_core(spaced: bool) -> tokenizers.Tokenizer:
    vocab = {letter: id for id, letter in enumerate([*parts.byte_alphabet(), "<|endoftext|>", "Ġa"])}
    core = parts.byte_level_bpe(vocab, [("Ġ", "a")])
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    parts.add_special(core, ["<|endoftext|>"])
    return core


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("spaced", [True, False])
def test_gpt2s_rules_in_tokenizer_config(tmp_path: Path, kind: str, spaced: bool) -> None:
    for config in ({}, *({name: value} for name in ("add_prefix_space", "add_bos_token") for value in (True, False))):
        assert_as_transformers(written(tmp_path, gpt2_core(spaced), "gpt2", tokenizer_class=kind, **config), "a b")
    folder = written(tmp_path, gpt2_core(spaced), "gpt2", add_prefix_space=not spaced)
    assert assert_as_transformers(folder, "a b")[0] == (257 if not spaced else 97)


@pytest.mark.parametrize(
    "config", [{}, dict(add_prefix_space=True), dict(add_bos_token=True), dict(add_eos_token=True)]
)
def test_gpt2s_rules_beside_vocabulary_and_merges(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = written(tmp_path, gpt2_core(False), "gpt2", tokenizer_class="GPT2Tokenizer", **config)
    core = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(core["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\nĠ a\n")
    (folder / "tokenizer.json").unlink()
    ids = assert_as_transformers(folder, "a b")
    bare = [257 if config.get("add_prefix_space") else 97, 32, 98]
    assert ids == [256] * ("add_bos_token" in config) + bare + [256] * ("add_eos_token" in config)


def test_a_space_that_the_rules_can_not_make_is_refused(tmp_path: Path) -> None:
    core = gpt2_core(False)
    core.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.Digits(), core.pre_tokenizer])
    load_tokenizer(written(tmp_path, core, "gpt2", tokenizer_class="GPT2Tokenizer", add_prefix_space=False))
    with pytest.raises(CheckpointError, match=r"add_prefix_space=True does not fit .* Sequence"):
        load_tokenizer(written(tmp_path, core, "gpt2", tokenizer_class="GPT2Tokenizer", add_prefix_space=True))


NEW = dict(content="<|new|>", lstrip=False, rstrip=False, normalized=False, single_word=False, special=True)


def small() -> tokenizers.Tokenizer:
    return parts.byte_level_bpe({letter: id for id, letter in enumerate(parts.byte_alphabet())}, [])


@pytest.mark.parametrize(
    ("config", "side_files"),
    [
        (dict(added_tokens_decoder={"256": NEW, "257": {**NEW, "content": "<|b|>", "lstrip": True}}), {}),
        ({}, {"added_tokens.json": {"<|new|>": 256}}),
        (dict(added_tokens_decoder={"256": NEW}), {"added_tokens.json": {"<|old|>": 256}}),  # the newer list holds
        (dict(added_tokens_decoder={"300": {**NEW, "content": "a"}}), {}),  # as does tokenizer.json's own id
    ],
    ids=str,
)
def test_tokens_that_only_the_config_lists(
    tmp_path: Path, config: dict[str, Any], side_files: dict[str, dict[str, int]]
) -> None:
    folder = written(tmp_path, small(), "llama", tokenizer_class="PreTrainedTokenizerFast", **config)
    for name, content in side_files.items():
        (folder / name).write_text(json.dumps(content))
    ids = assert_as_transformers(folder, "x<|new|>y <|b|> <|old|>")
    assert (256 in ids) == ("300" not in str(config))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(added_tokens_decoder={"300": NEW}), r"'<\|new\|>' is listed at 300 but belongs at 256"),
        (dict(additional_special_tokens=["<|new|>"]), r"names '<\|new\|>', which tokenizer.json does not have"),
        (dict(extra_special_tokens=[NEW]), r"extra_special_tokens .* names '<\|new\|>'"),
        (dict(extra_special_tokens={"image_token": "<|new|>"}), r"extra_special_tokens .* names '<\|new\|>'"),
        (dict(split_special_tokens=True), "split_special_tokens=true"),
    ],
    ids=str,
)
def test_tokens_whose_id_nobody_says_are_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    load_tokenizer(written(tmp_path, small(), "llama", additional_special_tokens=["a"], split_special_tokens=False))
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(written(tmp_path, small(), "llama", **config))
