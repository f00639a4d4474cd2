"""Tokenizer: text to ids and back, for all file formats, based on the `tokenizers` library."""

from __future__ import annotations

import json
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead.data.chat import render_chat
from clearhead.data.token_store import sync_folder
from clearhead.errors import InputError, did_you_mean

Side = Literal["left", "right"]
ROLES = ("bos", "eos", "pad", "unk", "mask")

# The field of tokenizer_config.json that holds the checksums of a tokenizer's files.
CHECKSUMS = "checksums"

# How SentencePiece vocabularies spell one raw byte.
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """Text to ids and back. `bos`, `eos`, `pad`, `unk` and `mask` are ids, or None if the vocabulary has no such token."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        roles: Mapping[str, int | None],
        chat_template: str | None = None,
        *,
        target_core: tokenizers.Tokenizer | None = None,
        vocab: dict[str, int] | None = None,
    ) -> None:
        # A tokenizer.json may enable truncation or padding. Here only the caller decides about them.
        core.no_truncation()
        core.no_padding()
        self.core = core
        self.target_core = target_core or core
        self.bos, self.eos, self.pad, self.unk, self.mask = (roles.get(role) for role in ROLES)
        self.chat_template = chat_template
        self.vocab = vocab or core.get_vocab()
        self._names = {id: token for token, id in self.vocab.items()}
        # Not the number of entries: ids may have gaps, and an embedding needs a row for the highest id.
        self.vocab_size = max(self._names, default=-1) + 1
        self.special_ids = {id for id, token in core.get_added_tokens_decoder().items() if token.special}

    def encode(self, text: str, special: bool = True, target: bool = False) -> list[int]:
        """The ids of `text`; `special` adds the tokens that the model expects around it, such as bos or [CLS] ... [SEP].

        `target` matters only if source and target have different pieces (see PairTokenizer).
        """
        return self.encode_all([text], special, target)[0]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of `ids`, without special tokens unless `special`."""
        return self.core.decode(self._check(ids), skip_special_tokens=not special)

    def batch(
        self,
        texts: Iterable[str],
        special: bool = True,
        max_len: int | None = None,
        side: Side = "right",
        truncate: Side | None = None,
        target: bool = False,
    ) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """The ids, padded on `side`, and a mask, True = a real token.

        A text longer than `max_len` is an error unless `truncate` says which end to cut; special tokens are not cut.
        """
        for name, value in (("side", side), ("truncate", truncate or "right")):
            if value not in ("left", "right"):
                raise InputError(f"{name}={value!r} is no end of a text; {did_you_mean(value, ('left', 'right'))}")
        rows = self.encode_all(texts, special, target, max_len, truncate)
        width = max((len(row) for row in rows), default=0)
        # Without a pad token any id will do, since the mask hides it; 0 is in every vocabulary.
        tokens = torch.full((len(rows), width), self.pad or 0, dtype=torch.long)
        real = torch.zeros((len(rows), width), dtype=torch.bool)
        for i, row in enumerate(rows):
            place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
            tokens[i, place] = torch.tensor(row, dtype=torch.long)
            real[i, place] = True
        return tokens, real

    def token(self, id: int) -> str:
        """The vocabulary's spelling of an id, such as 'Ġworld' or '▁world'."""
        return self._names[self._check([id])[0]]

    def name(self, id: int) -> str:
        """A token as a reader sees it, such as ' world', with the space that it starts with: a label for plots and tables.

        A token that is no text by itself is spelled as in the vocabulary; an id that the vocabulary does not have, as its number.
        """
        if id not in self._names:
            return f"<{id}>"
        text, spelled = self.decode([id]), self._names[id]
        if not text or "\ufffd" in text:
            return spelled
        return f" {text}" if spelled.startswith(("▁", " ")) and not text.startswith(" ") else text

    def names(self, ids: Iterable[int]) -> list[str]:
        """The names of some tokens, in order."""
        return [self.name(int(id)) for id in ids]

    def id(self, token: str) -> int:
        """The id of a token in the vocabulary's spelling."""
        if token not in self.vocab:
            special = [self._names[id] for id in self.special_ids]
            hint = did_you_mean(token, special) if special else "encode it as text instead"
            raise InputError(f"{token!r} is not one token of this vocabulary of {self.vocab_size}; {hint}")
        return self.vocab[token]

    def stream(self, special: bool = False) -> TextStream:
        """A decoder for one id at a time, for text that is shown while it is generated."""
        return TextStream(self, special)

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt that the model's chat template makes of `messages`; encode it with special=False."""
        known = {key: token or "" for key, token in self._role_tokens().items()}
        known["add_generation_prompt"] = add_generation_prompt
        return render_chat(self.chat_template, messages, {**known, **variables})

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `load_tokenizer` and transformers read."""
        self._write(directory, {"tokenizer.json": self.core.to_str(pretty=True).encode()}, "PreTrainedTokenizerFast")

    def _write(self, directory: str | os.PathLike[str], files: Mapping[str, bytes], kind: str) -> None:
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        # All five roles, also those that are null: a reader must not guess them from other files in the directory.
        config = {"tokenizer_class": kind, "clean_up_tokenization_spaces": False, **self._role_tokens()}
        config["chat_template"] = self.chat_template
        config[CHECKSUMS] = checksums(files, config)
        files = {**files, "tokenizer_config.json": json.dumps(config, indent=2).encode()}
        for name, content in files.items():
            temporary = folder / f".{name}.{secrets.token_hex(8)}.tmp"
            try:
                with temporary.open("xb") as stream:  # new, also not a link that somebody put there
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(temporary, folder / name)  # a reader sees the whole old file or the whole new one
            finally:
                temporary.unlink(missing_ok=True)
        # Files of another tokenizer that would take precedence over those just written.
        for name in {"chat_template.jinja", "tokenizer.json"} - files.keys():
            (folder / name).unlink(missing_ok=True)
        sync_folder(folder)

    def _role_tokens(self) -> dict[str, Any]:
        ids = {role: getattr(self, role) for role in ROLES}
        return {f"{role}_token": None if id is None else self.token(id) for role, id in ids.items()}

    def encode_all(
        self,
        texts: Iterable[str],
        special: bool = True,
        target: bool = False,
        max_len: int | None = None,
        truncate: Side | None = None,
    ) -> list[list[int]]:
        """The ids of each text, as in `batch`, without padding."""
        if isinstance(texts, str):
            raise InputError(f"texts is one str, {texts!r:.60}; pass a list of texts")
        texts = list(texts)
        for text in texts:
            if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - not every caller has types
                raise InputError(f"a text must be a str, not {type(text).__name__}: {text!r:.60}; decode it first")
        core = self.target_core if target else self.core
        try:
            encodings = core.encode_batch(texts, add_special_tokens=False)
        except Exception as error:
            raise InputError(
                f"these texts cannot be encoded: {texts!r:.60}: {error}; remove what is no text, such as a lone "
                "surrogate, or check that the vocabulary has its unknown token"
            ) from error
        extra = core.num_special_tokens_to_add(False) if special else 0
        rows: list[list[int]] = []
        for encoding in encodings:
            length = len(encoding.ids) + extra
            if max_len is not None and length > max_len:
                if truncate is None or extra > max_len:
                    raise InputError(
                        f"a text has {length} tokens ({extra} of them special) but max_len={max_len}; shorten it, "
                        'raise max_len, or cut the text by choice with truncate="left" or "right"'
                    )
                encoding.truncate(max_len - extra, direction=truncate)
            rows.append(self._ids(core.post_process(encoding) if special else encoding))
        return rows

    def _ids(self, encoding: tokenizers.Encoding) -> list[int]:
        return encoding.ids

    def _check(self, ids: Iterable[int]) -> list[int]:
        """The ids as plain numbers. Unknown ids are an error; `tokenizers` would drop them silently."""
        ids = [int(id) for id in ids]
        for id in ids:
            if id not in self._names:
                raise InputError(
                    f"id {id} is not in this vocabulary of {self.vocab_size} ids; "
                    "check that the tokenizer belongs to the model"
                )
        return ids


class TextStream:
    """Incremental decoding. The results of all `push` calls and of `finish`, joined, are exactly `decode` of all ids.

    Text that later ids could still change is held back: an incomplete UTF-8 character, or a run of SentencePiece byte pieces,
    which can only be decoded together.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        # Decoding is local, except that the first token loses its leading space. So one decoded chunk stays in front of the
        # ids that are not decoded yet, and a stream of n ids takes O(n) time, not O(n^2).
        self._window: list[int] = []
        self._finished = 0  # ids of the window that belong to that chunk
        self._sent = 0  # characters of the window's text that `push` has returned

    def push(self, id: int) -> str:
        """The new text that is certain after this id: often a word, sometimes nothing."""
        piece = self._tokenizer.token(id)
        if id in self._tokenizer.special_ids and not self._special:
            return ""
        self._window.append(int(id))
        if BYTE_PIECE.fullmatch(piece):
            return ""
        text = self._decode(self._window)
        # An incomplete character is decoded as one replacement character at the end; the text before it is final.
        certain = len(text) - text.endswith("\ufffd")
        new, self._sent = text[self._sent : certain], max(self._sent, certain)
        if certain == len(text) and (tail := self._decode(self._window[self._finished :])):
            self._window = self._window[self._finished :]
            self._finished, self._sent = len(self._window), len(tail)
        return new

    def finish(self) -> str:
        """The text that was held back. Afterwards the stream can be used for a new text."""
        rest = self._decode(self._window)[self._sent :]
        self._window, self._finished, self._sent = [], 0, 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, special=self._special)


def checksums(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, int]:
    """Of each file by its name, and of the fields of tokenizer_config.json."""
    fields = {name: value for name, value in config.items() if name != CHECKSUMS}
    content = {**files, "tokenizer_config.json": json.dumps(fields, sort_keys=True).encode()}
    return {name: zlib.crc32(each) for name, each in content.items()}
