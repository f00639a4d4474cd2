"""Unusable data in a corpus: the user's policy, the filter that applies it, and the record of what was found."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from clearhead.errors import ConfigError, InputError, did_you_mean

_SURROGATES = re.compile("[\ud800-\udfff]")  # corpus_files.py reads bytes that are not UTF-8 as these
_SHOWN = 3  # places listed for each kind of finding
_CHOICES = {
    "bad_bytes": ("error", "replace", "drop"),
    "empty": ("drop", "error", "keep"),
    "too_long": ("error", "drop", "cut"),
    "unequal": ("error", "cut"),
}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What to do with unusable data. "error" stops at the first one; other choices are counted in `Findings`."""

    bad_bytes: str = "error"  # bytes that are not UTF-8; images that can not be read
    empty: str = "drop"  # lines, rows and files without text
    too_long: str = "error"  # more tokens than the model takes; "cut" keeps the first ones
    unequal: str = "error"  # source and target with different numbers of lines; "cut" stops at the end of the shorter

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value, choices = getattr(self, each.name), _CHOICES[each.name]
            if value not in choices:
                raise ConfigError(f"{each.name}={value!r} is no policy; {did_you_mean(str(value), choices)}")


@dataclass
class Findings:
    """How much was read, and how much of it was dropped, repaired or cut: counts by reason, with the first few places."""

    read: Counter[str] = field(default_factory=Counter)  # by unit: "lines", "rows", "pairs", "files" ...
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by unit and reason
    places: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    done: int = 0  # bytes of the files read so far, for a progress bar

    def note(self, unit: str, what: str, place: str, count: int = 1) -> None:
        """Record that `what`, such as "dropped: empty", happened to a `unit`, such as "lines", at `place`."""
        self.counts[unit, what] += count
        places = self.places.setdefault((unit, what), [])
        if len(places) < _SHOWN:
            places.append(place)

    def lines(self) -> list[str]:
        """A sentence for each kind of finding: "3 of 29,000 pairs dropped: empty (train.en:17, train.de:203, ...)"."""
        sentences: list[str] = []
        for (unit, what), count in self.counts.items():
            places = self.places[unit, what]
            shown = ", ".join(places) + (", ..." if count > len(places) else "")
            sentences.append(f"{count:,} of {self.read[unit]:,} {unit} {what} ({shown})")
        return sentences


class TextRow(NamedTuple):
    """The columns of one row, the file of each column, and the row's number."""

    values: tuple[str, ...]
    paths: Sequence[Path]
    number: int

    def place(self, column: int) -> str:
        return f"{self.paths[column]}:{self.number}"


class TextFilter:
    """Applies a policy to texts, and records in `findings` what it did."""

    def __init__(self, policy: Policy | None = None, findings: Findings | None = None) -> None:
        self.policy = Policy() if policy is None else policy
        self.findings = Findings() if findings is None else findings

    def apply(self, values: Sequence[str], unit: str, paths: Sequence[Path], number: int) -> TextRow | None:
        """The row, repaired where needed, or None if it is dropped."""
        kept: list[str] = []
        for value, path in zip(values, paths, strict=True):
            text = self.repair(value, unit, path, number)
            if text is None or (not text.strip() and not self.keep_empty(unit, path, number)):
                return None
            kept.append(text)
        return TextRow(tuple(kept), paths, number)

    def repair(self, text: str, unit: str, path: Path, number: int) -> str | None:
        """The text with bytes that are not UTF-8 replaced, or None if it is dropped."""
        wrong = _SURROGATES.search(text)
        if wrong is None:
            return text
        if self.policy.bad_bytes == "error":
            code = ord(wrong[0])
            what = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"half a character, \\u{code:04x},"
            before = len(text[: wrong.start()].encode())
            raise InputError(
                f"{path}:{number} is not UTF-8: {what} at byte {before + 1} of the line; convert the file, for instance with "
                'iconv, or choose bad_bytes="replace" or "drop"'
            )
        drops = self.policy.bad_bytes == "drop"
        self.findings.note(unit, f"{'dropped' if drops else 'repaired'}: invalid UTF-8", f"{path.name}:{number}")
        return None if drops else _SURROGATES.sub("\ufffd", text)

    def keep_empty(self, unit: str, path: Path, number: int | None = None) -> bool:
        """Whether an empty text is kept."""
        place = "" if number is None else f":{number}"
        if self.policy.empty == "error":
            raise InputError(f'{path}{place} is empty; remove it, or choose empty="drop" or "keep"')
        if self.policy.empty == "drop":
            self.findings.note(unit, "dropped: empty", path.name + place)
        return self.policy.empty == "keep"

    def keep_long(self, unit: str, place: str, length: int, limit: int, name: str) -> bool:
        """Whether a text with more tokens than `limit`, the model's field `name`, is cut (and not dropped)."""
        policy = self.policy.too_long
        if policy == "error":
            raise InputError(
                f"{place} has at least {length:,} tokens, but {name}={limit:,}; shorten it, raise {name}, or choose "
                'too_long="drop" or "cut"'
            )
        what = f"cut to {limit:,} tokens: too long" if policy == "cut" else f"dropped: more than {limit:,} tokens"
        self.findings.note(unit, what, place.rpartition("/")[2])
        return policy == "cut"
