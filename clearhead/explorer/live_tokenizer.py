"""A tokenizer for a page that computes by itself: the steps of tokenizer.json that page/live/tokenizer.js knows, or a refusal."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

from clearhead.data import Tokenizer
from clearhead.data.sentencepiece import PairTokenizer
from clearhead.data.tokenizer import ROLES
from clearhead.errors import InputError

# Texts that the page encodes anew before it answers anything: words, blanks, digits, other scripts, emoji, broken lines.
TEXTS = (
    "the cat sat on the mat",
    " Two  blanks,\tTabs\n\nand lines ",
    "It's 1987-03-03, isn't it? (3,141.59)",
    "le 7 mars 1989; 1989年3月7日; 7 Μαρτίου",
    "naïve café ﬁ 🙂 👩‍👩‍👧 Ǆ",
    "def f(x):\n    return x ** 2  # ²",
    "",
)


def live_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer as page/live/tokenizer.js takes it; what it does not know is an error that names it."""
    if isinstance(tokenizer, PairTokenizer):
        raise _refused("source and target have vocabularies of their own (Marian)")
    return {
        "sides": {"source": _pipeline(tokenizer.core)},
        "names": {str(id): tokenizer.name(id) for id in sorted(tokenizer.vocab.values())},
        "special": sorted(tokenizer.special_ids),
        "roles": {role: getattr(tokenizer, role) for role in ROLES},
    }


def _refused(what: str) -> InputError:
    return InputError(
        f"a live page has no such tokenizer: {what}; it knows BPE over bytes or characters, and words; "
        "leave out --live for a page with the answers for one text"
    )


def _pipeline(core: tokenizers.Tokenizer) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(core.to_str())
    for token in told["added_tokens"]:
        if any(token[flag] for flag in ("single_word", "lstrip", "rstrip", "normalized")):
            raise _refused(f"the added token {token['content']!r} has rules of its own")
    before, after = _around(told["post_processor"])
    return {
        "added": [(token["content"], token["id"], token["special"]) for token in told["added_tokens"]],
        "normal": [_normal(step) for step in _steps(told["normalizer"], "normalizers")],
        "cuts": [_cut(step) for step in _steps(told["pre_tokenizer"], "pretokenizers")],
        "model": _model(told["model"]),
        "before": before,
        "after": after,
        "back": [_back(step) for step in _steps(told["decoder"], "decoders")] or [{"type": "Space"}],
    }


def _steps(told: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a pipeline's part, those within a Sequence one after the other."""
    if told is None:
        return []
    if told["type"] == "Sequence":
        return [step for part in told[inner] for step in _steps(part, inner)]
    return [told]


def _normal(step: dict[str, Any]) -> dict[str, Any]:
    match step:
        case {"type": "Replace", "pattern": {"String": str() as text}, "content": str() as content}:
            return {"type": "Replace", "from": text, "to": content}
        case {"type": "Prepend", "prepend": str() as text}:
            return {"type": "Prepend", "prepend": text}
        case {"type": "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" as kind}:
            return {"type": kind}
        case _:
            raise _refused(f"normalizer {step['type']}")


def _cut(step: dict[str, Any]) -> dict[str, Any]:
    match step:
        case {"type": "Digits", "individual_digits": each}:
            return {"type": "Digits", "each": each}
        case {"type": "ByteLevel", "add_prefix_space": space, "use_regex": words}:
            return {"type": "ByteLevel", "space": space, "words": words}
        case {"type": "WhitespaceSplit" as kind}:
            return {"type": kind}
        case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": str() as pattern}}:
            return {"type": "Split", "pattern": _pattern(pattern)}
        case _:
            raise _refused(f"pre_tokenizer {step['type']}")


def _pattern(pattern: str) -> str:
    """A pattern of `tokenizers` as JavaScript writes it: Unicode's blanks, and letters of either case written out."""

    def either(group: re.Match[str]) -> str:
        return "(?:" + re.sub(r"[a-zA-Z]", lambda one: f"[{one[0].lower()}{one[0].upper()}]", group[1]) + ")"

    plain = re.sub(r"\(\?i:([a-zA-Z'|]*)\)", either, pattern)
    plain = plain.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")
    known = r"(?:\\[pP]\{\w+\}|\\[rnt]|\(\?[:!=]|[\w'|()\[\]^?*+{},\- ])*"
    if re.fullmatch(known, plain) is None:
        raise _refused(f"words are cut by the pattern {pattern!r:.60}")
    return plain


def _model(told: dict[str, Any]) -> dict[str, Any]:
    match told:
        case {"type": "BPE", "vocab": dict() as vocab, "merges": list() as merges}:
            for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
                if told.get(field):
                    raise _refused(f"BPE with {field}={told[field]!r}")
            return {
                "type": "BPE",
                "vocab": vocab,
                "merges": merges,
                "unk": vocab.get(told["unk_token"]),
                "fuse": told["fuse_unk"],
                "bytes": told["byte_fallback"],
                "whole": told["ignore_merges"],
            }
        case {"type": "WordLevel", "vocab": dict() as vocab, "unk_token": str() as unk}:
            return {"type": "WordLevel", "vocab": vocab, "merges": [], "unk": vocab[unk]}
        case _:
            raise _refused(f"model {told['type']}")


def _around(told: dict[str, Any] | None) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    if told is None or told["type"] == "ByteLevel":
        return [], []
    if told["type"] != "TemplateProcessing":
        raise _refused(f"post_processor {told['type']}")
    ends: tuple[list[int], list[int]] = ([], [])
    is_after = False
    for step in told["single"]:
        if "Sequence" in step:
            is_after = True
        else:
            ends[is_after].extend(told["special_tokens"][step["SpecialToken"]["id"]]["ids"])
    return ends


def _back(step: dict[str, Any]) -> dict[str, Any]:
    match step:
        case {"type": "ByteLevel" | "Fuse" | "ByteFallback" as kind}:
            return {"type": kind}
        case {"type": "Replace", "pattern": {"String": str() as text}, "content": str() as content}:
            return {"type": "Replace", "from": text, "to": content}
        case {"type": "Strip", "content": str() as content, "start": start, "stop": stop}:
            return {"type": "Strip", "content": content, "start": start, "stop": stop}
        case _:
            raise _refused(f"decoder {step['type']}")
