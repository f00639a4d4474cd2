"""A tokenizer as llama.cpp's metadata: byte-level BPE ("gpt2") or SentencePiece's BPE ("llama")."""

from __future__ import annotations

import json
from typing import Any

from clearhead.data import Tokenizer
from clearhead.data.tokenizer_parts import byte_level_bpe
from clearhead.errors import CheckpointError

# llama.cpp's names of the rules that split text into words before bytes are merged.
WORDS = ("gpt-2", "smollm", "llama-bpe", "qwen2")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}


def vocabulary(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The keys and values after "tokenizer."; an error if llama.cpp has no such tokenizer."""
    core = json.loads(tokenizer.core.to_str())
    if tokenizer.target_core is not tokenizer.core:
        raise CheckpointError("a GGUF file holds one vocabulary, and this tokenizer has two; export to hf or onnx")
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model vocab_size={vocab_size}; do they belong together?"
        )
    model = core["model"]
    if model["type"] != "BPE":
        raise CheckpointError(
            f"GGUF is written with BPE tokenizers; this model's is of the type {model['type']!r}; export to hf or onnx"
        )
    for token in core["added_tokens"]:
        if flags := [flag for flag in ("single_word", "lstrip", "rstrip") if token[flag]]:
            raise CheckpointError(
                f"llama.cpp has no place for the rules of an added token; {token['content']!r} has {' and '.join(flags)}; "
                f"export to hf or onnx"
            )
    own = sentencepiece(core) if model.get("byte_fallback") else byte_level(core)
    before, after = surroundings(tokenizer)
    ids = {name: getattr(tokenizer, role) for role, name in ROLES.items()}
    return {
        **own,
        "ggml.tokens": [spell(token, own["ggml.model"]) for token in tokens_of(tokenizer, vocab_size)],
        "ggml.token_type": types_of(tokenizer, core, vocab_size),
        **{f"ggml.{name}_token_id": id for name, id in ids.items() if id is not None},
        "ggml.add_bos_token": before,
        "ggml.add_eos_token": after,
        **({} if tokenizer.chat_template is None else {"chat_template": tokenizer.chat_template}),
        **({"ggml.scores": scores_of(tokenizer, core, vocab_size)} if model.get("byte_fallback") else {}),
    }


def byte_level(core: dict[str, Any]) -> dict[str, Any]:
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in core["model"]["merges"]]
    for words in WORDS:
        known = json.loads(byte_level_bpe({}, [], words).to_str())
        if known["normalizer"] == core["normalizer"] and plain(known["pre_tokenizer"]) == plain(core["pre_tokenizer"]):
            if (ignores := bool(core["model"].get("ignore_merges"))) != known["model"]["ignore_merges"]:
                raise CheckpointError(
                    f"with words cut as {words} does, llama.cpp has ignore_merges={not ignores} (whether a word of the vocabulary "
                    f"is one token without merges); this tokenizer has ignore_merges={ignores}; export to hf or onnx"
                )
            return {"ggml.model": "gpt2", "ggml.pre": words, "ggml.merges": merges}
    raise CheckpointError(
        f"GGUF is written with BPE tokenizers that cut words as {', '.join(WORDS)} do; this one cuts by "
        f"{json.dumps(core['pre_tokenizer']):.120}; export to hf or onnx"
    )


def plain(rule: Any) -> Any:
    """A rule without what does not change ids: whether offsets leave spaces out, and a sequence of one."""
    if not isinstance(rule, dict):
        return rule
    if rule.get("type") == "Sequence" and len(rule["pretokenizers"]) == 1:
        return plain(rule["pretokenizers"][0])
    rule = {name: value for name, value in rule.items() if name != "trim_offsets"}
    if rule.get("type") == "Sequence":
        rule["pretokenizers"] = [plain(each) for each in rule["pretokenizers"]]
    return rule


def sentencepiece(core: dict[str, Any]) -> dict[str, Any]:
    normal: dict[str, Any] = core["normalizer"] or {"type": "Sequence", "normalizers": []}
    for step in normal["normalizers"] if normal["type"] == "Sequence" else [normal]:
        # llama.cpp marks spaces, and changes no other letter of a text (NFKC, lower case).
        if step["type"] != "Prepend" and not (step["type"] == "Replace" and step["pattern"] == {"String": " "}):
            raise CheckpointError(
                f"llama.cpp changes nothing in a text but its spaces; this tokenizer has the normalizer "
                f"{json.dumps(step):.120}; export to hf or onnx"
            )
    rules = json.dumps([core["normalizer"], core["pre_tokenizer"]])
    prefix = any(words in rules for words in ('"Prepend"', '"prepend_scheme": "first"', '"prepend_scheme": "always"'))
    return {"ggml.model": "llama", "ggml.add_space_prefix": prefix}


def scores_of(tokenizer: Tokenizer, core: dict[str, Any], vocab_size: int) -> list[float]:
    """SentencePiece joins the pair whose result scores highest: minus the place of the first merge that makes it."""
    ranks: dict[str, int] = {}
    for place, merge in enumerate(core["model"]["merges"]):
        ranks.setdefault("".join(merge.split(" ", 1) if isinstance(merge, str) else merge), place)
    last = len(core["model"]["merges"])
    return [-float(ranks.get(token, last)) for token in tokens_of(tokenizer, vocab_size)]


def spell(token: str, model: str) -> str:
    """A piece as SentencePiece writes it, with a mark for a space; a few vocabularies keep the space itself."""
    return token.replace(" ", "▁") if model == "llama" else token


def tokens_of(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    names = {id: token for token, id in tokenizer.vocab.items()}
    return [names.get(id, f"[PAD{id}]") for id in range(vocab_size)]


def types_of(tokenizer: Tokenizer, core: dict[str, Any], vocab_size: int) -> list[int]:
    added = {each["id"]: CONTROL if each["special"] else USER_DEFINED for each in core["added_tokens"]}
    known = set(tokenizer.vocab.values())
    is_pieces = bool(core["model"].get("byte_fallback"))

    def kind(id: int, token: str) -> int:
        if id not in known:
            return UNUSED
        if is_pieces and id == tokenizer.unk:
            return UNKNOWN
        if is_pieces and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return BYTE
        return added.get(id, NORMAL)

    return [kind(id, token) for id, token in enumerate(tokens_of(tokenizer, vocab_size))]


def surroundings(tokenizer: Tokenizer) -> tuple[bool, bool]:
    """Whether bos comes before a text and eos after it; anything else llama.cpp can not add."""
    whole, inside = tokenizer.encode("a"), tokenizer.encode("a", special=False)
    for before in ([], [tokenizer.bos]):
        for after in ([], [tokenizer.eos]):
            if whole == [*before, *inside, *after]:
                return bool(before), bool(after)
    raise CheckpointError(
        f"llama.cpp puts only bos and eos around a text; this tokenizer makes {whole} of 'a'; export to hf"
    )
