"""Functions that the readers of tokenizer files share: errors of broken files, roles, special tokens, byte-level BPE."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from clearhead.data.tokenizer import CHECKSUMS, ROLES, Tokenizer, checksums
from clearhead.errors import CheckpointError, ClearheadError, did_you_mean

# More than any tokenizer file has, and little enough to read at once; a larger file is something else.
MAX_BYTES = 256 * 2**20
# No vocabulary has longer pieces. `derive_merges` takes quadratic time, which the limit bounds for broken files.
MAX_PIECE = 512

# The role of a token by its name, where no file says it. Earlier names are preferred.
CONVENTION = {
    "bos": ("<s>", "<bos>", "[CLS]", "<cls>", "<|begin_of_text|>", "<|endoftext|>"),
    "eos": ("</s>", "<eos>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
}

# How LLaMA 3 and Qwen2 split text into words; they differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@contextmanager
def parse_errors(path: Path, kind: str) -> Generator[None, None, None]:
    """Turn every error that a broken file causes in a parser into a CheckpointError."""
    try:
        yield
    except (ClearheadError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic in `tokenizers` is not an Exception
        raise CheckpointError(
            f"{path} does not read as {kind}: {type(error).__name__}: {error!s:.200}; fetch or export the file again"
        ) from error


def read_bytes(path: Path) -> bytes:
    if (size := path.stat().st_size) > MAX_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, too many for a tokenizer; point at the tokenizer's own file")
    return path.read_bytes()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is no such file."""
    if not path.is_file():
        return {}
    with parse_errors(path, "JSON"):
        found = json.loads(read_bytes(path))
        if not isinstance(found, dict):
            raise ValueError(f"{type(found).__name__} at the top, not an object")
        return cast("dict[str, Any]", found)


def check_checksums(folder: Path) -> None:
    """CheckpointError if a file of a tokenizer that we saved is not what was saved.

    Other programs write no checksums, and their files are read as they are. transformers copies the fields it does not know into
    what it writes, but sorts them: the checksums are then not the last field, as in ours, and are about other files.
    """
    config = read_json(folder / "tokenizer_config.json")
    if next(reversed(config), None) != CHECKSUMS:
        return
    saved = config[CHECKSUMS]
    names = saved.keys() if isinstance(saved, dict) else []
    files = [folder / name for name in names if name != "tokenizer_config.json" and Path(name).name == name]
    found = checksums({file.name: read_bytes(file) if file.is_file() else b"" for file in files}, config)
    if found != saved:
        wrong = next((name for name in names if saved[name] != found.get(name)), "tokenizer_config.json")
        raise CheckpointError(
            f"{folder / wrong} is not what was saved: its checksum is {found.get(wrong)}, that of the saved file in "
            f"tokenizer_config.json differs; copy the files again, or, if they were changed on purpose, remove the field "
            f"{CHECKSUMS!r} from {folder / 'tokenizer_config.json'}"
        )


def read_vocab(path: Path) -> dict[str, int]:
    vocab = read_json(path)
    with parse_errors(path, "a vocabulary, {token: id}"):
        if not vocab or not all(type(id) is int and 0 <= id < 2**31 for id in vocab.values()):
            raise ValueError(f"{len(vocab)} entries, not all with a number from 0 on as id")
    return vocab


def finish(core: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    """The tokenizer with the roles and the chat template that the files in `folder` define."""
    config = read_json(folder / "tokenizer_config.json")
    named = {**read_json(folder / "special_tokens_map.json"), **config}
    numbered = {**read_json(folder / "config.json"), **read_json(folder / "generation_config.json")}
    roles = by_convention(core)
    for role in ROLES:
        # BERT's [CLS] and [SEP] have the roles bos and eos.
        keys = [f"{role}_token", {"bos": "cls_token", "eos": "sep_token"}.get(role, "")]
        number = numbered.get(f"{role}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if given := [_content(named[key]) for key in keys if key in named]:
            # If the field is null, or names a token that the vocabulary lacks, the role has no id.
            token = next((token for token in given if token), None)
            roles[role] = None if token is None else core.token_to_id(token)
        elif type(number) is int and 0 <= number < 2**32 and core.id_to_token(number) is not None:  # some write -1
            roles[role] = number
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = template.get("default")
    if (own := folder / "chat_template.jinja").is_file():
        with parse_errors(own, "a UTF-8 chat template"):
            template = read_bytes(own).decode()
    return Tokenizer(core, roles, template if isinstance(template, str) else None)


def apply_config(core: tokenizers.Tokenizer, folder: Path) -> None:
    """Apply the rules of tokenizer_config.json to a tokenizer.json that says otherwise, as transformers does.

    BERT's class takes case, accents and Chinese characters from there, GPT-2's and Whisper's the space before a text. A class that
    is named has defaults for what is not given. Without a name, the model's class is meant, and only fields that are given count.
    The general classes (PreTrainedTokenizerFast) follow tokenizer.json, and `add_bos_token` does so for all.
    """
    config = read_json(folder / "tokenizer_config.json")
    named = re.sub(r"Tokenizer(Fast)?$", "", str(config.get("tokenizer_class") or "")).lower()
    kind = named or read_json(folder / "config.json").get("model_type")
    if kind == "bert" and isinstance(rules := core.normalizer, normalizers.BertNormalizer):
        core.normalizer = normalizers.BertNormalizer(
            clean_text=rules.clean_text,
            lowercase=bool(config.get("do_lower_case", True if named else rules.lowercase)),
            strip_accents=config.get("strip_accents", None if named else rules.strip_accents),
            handle_chinese_chars=bool(
                config.get("tokenize_chinese_chars", True if named else rules.handle_chinese_chars)
            ),
        )
    if kind in ("gpt2", "whisper"):
        split, spaced = core.pre_tokenizer, config.get("add_prefix_space")
        if isinstance(split, pre_tokenizers.ByteLevel):
            start = bool(spaced) if named or spaced is not None else split.add_prefix_space
            core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=start, use_regex=split.use_regex)
        elif spaced:
            raise CheckpointError(
                f"tokenizer_config.json's add_prefix_space={spaced!r} does not fit tokenizer.json, whose pre_tokenizer is a "
                f"{type(split).__name__}; set add_prefix_space to false, or export both files again"
            )


def by_convention(core: tokenizers.Tokenizer) -> dict[str, int | None]:
    """The id of each role, found by the names of the special tokens."""
    known = {token.content: id for id, token in core.get_added_tokens_decoder().items() if token.special}
    return {role: next((known[name] for name in names if name in known), None) for role, names in CONVENTION.items()}


def _content(token: Any) -> str | None:
    """The text of a token, which these files write as a string or as an object."""
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None


def add_special(core: tokenizers.Tokenizer, tokens: Iterable[str | None]) -> None:
    """Mark tokens as special, if the vocabulary has them."""
    core.add_special_tokens([token for token in tokens if token and core.token_to_id(token) is not None])


def add_listed(core: tokenizers.Tokenizer, folder: Path, *, missing: bool = False) -> None:
    """Add the tokens that added_tokens.json or tokenizer_config.json list, each at its id.

    `missing`: only those that the vocabulary lacks. tokenizer.json decides about the others, as in transformers; and where
    tokenizer_config.json has a list, added_tokens.json is an old one.
    """
    listed: dict[int, AddedToken] = {}
    with parse_errors(folder, "a list of added tokens"):
        newer = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
        older = {} if missing and newer else read_json(folder / "added_tokens.json")
        for content, id in older.items():
            listed[int(id)] = AddedToken(content, normalized=False, special=True)
        for id, entry in newer.items():
            flags = {flag: bool(entry.get(flag)) for flag in ("single_word", "lstrip", "rstrip", "special")}
            listed[int(id)] = AddedToken(entry["content"], normalized=bool(entry.get("normalized")), **flags)
        if missing:
            listed = {id: token for id, token in listed.items() if core.token_to_id(token.content) is None}
        core.add_tokens([listed[id] for id in sorted(listed)])
        for id, token in listed.items():
            if core.token_to_id(token.content) != id:
                raise ValueError(
                    f"{token.content!r} is listed at {id} but belongs at {core.token_to_id(token.content)}"
                )


def check_named(core: tokenizers.Tokenizer, folder: Path) -> None:
    """Refuse special tokens without an id that the vocabulary lacks (transformers adds them), and those that are read as text."""
    config = read_json(folder / "tokenizer_config.json")
    named = {**read_json(folder / "special_tokens_map.json"), **config}
    for field in ("additional_special_tokens", "extra_special_tokens"):
        tokens: Any = named.get(field) or ()
        for token in map(_content, tokens.values() if isinstance(tokens, dict) else tokens):
            if token is not None and core.token_to_id(token) is None:
                raise CheckpointError(
                    f"{field} beside tokenizer.json names {token!r}, which tokenizer.json does not have: a text with it would be "
                    f"cut into other tokens; add it to tokenizer.json with its id, or delete it from {field}"
                )
    if config.get("split_special_tokens"):
        raise CheckpointError(
            "tokenizer_config.json's split_special_tokens=true reads special tokens in a text as text, which is not supported; "
            "supported: false"
        )


def surround(core: tokenizers.Tokenizer, before: Sequence[str | None], after: Sequence[str | None]) -> None:
    """Set the tokens that `special=True` puts before and after a text."""
    before, after = [t for t in before if t], [t for t in after if t]
    ids = [(token, core.token_to_id(token)) for token in dict.fromkeys([*before, *after])]
    core.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)


def byte_alphabet() -> list[str]:
    """GPT-2's visible character for each of the 256 bytes: itself if printable, else the next one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + hidden.index(byte)) for byte in range(256)]


def byte_level_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], words: str = "gpt-2") -> tokenizers.Tokenizer:
    """BPE over bytes; `words` is llama.cpp's name of the rule that first splits text into words."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cuts: dict[str, Any] = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS % "{1,3}"), "isolated"), whole]),
        "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS % ""), "isolated"), whole]),
    }
    if words not in cuts:
        raise CheckpointError(f"no way to cut words is known as {words!r} here; {did_you_mean(words, cuts)}")
    # LLaMA 3 uses a whole word that is in the vocabulary even if no merges lead to it.
    core = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=words == "llama-bpe"))
    core.pre_tokenizer = cuts[words]
    core.decoder = decoders.ByteLevel()
    if words == "qwen2":
        core.normalizer = normalizers.NFC()
    return core


def derive_merges(ranked: Iterable[str], known: Collection[str]) -> list[tuple[str, str]]:
    """All pairs of known pieces that join to a piece in `ranked`, in the order of `ranked`.

    SentencePiece and tiktoken merge the pair whose result ranks best, whatever its halves. A merge list with all halves of each
    piece does the same.
    """
    merges: list[tuple[str, str]] = []
    for piece in ranked:
        if len(piece) > MAX_PIECE:
            raise ValueError(f"a piece of {len(piece)} characters, {piece[:20]!r}...")
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges += [(left, right) for left, right in halves if left in known and right in known]
    return merges
