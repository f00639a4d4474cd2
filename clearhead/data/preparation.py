"""What every preparation of a store shares: is it done already, how far is it, what does it say about itself."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from clearhead.data.filters import Findings, Policy, TextFilter
from clearhead.data.token_store import VERSION, Store, StoreWriter
from clearhead.data.tokenizer import Tokenizer
from clearhead.errors import InputError, did_you_mean

Folder = str | os.PathLike[str]
Progress = Callable[[int, int], None]  # bytes done, bytes in all
T = TypeVar("T")

AT_ONCE = 2**20  # characters tokenised side by side; `tokenizers` took up to 280 bytes for each while it worked


class Preparation:
    """One preparation, known by the fingerprint of its files, tokenizer and options."""

    def __init__(
        self,
        folder: Folder,
        paths: list[Path],
        policy: Policy | None,
        progress: Progress | None,
        options: list[Any],
        tokenizer: Tokenizer | None = None,
        findings: Findings | None = None,
    ) -> None:
        self.folder, self.paths, self.text_filter, self._progress = (
            Path(folder),
            paths,
            TextFilter(policy, findings),
            progress,
        )
        files = [(str(each.absolute()), each.stat()) for path in paths for each in _below(path)]
        self._total = sum(stat.st_size for _, stat in files)
        described = [
            VERSION,
            [str(path) for path in paths],
            [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files],
            dataclasses.asdict(self.text_filter.policy),
            options,
            [] if tokenizer is None else [tokenizer.core.to_str(), tokenizer.target_core.to_str(), tokenizer.eos],
            {} if tokenizer is None else tokenizer.vocab,
        ]
        self._fingerprint = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def is_done(self) -> bool:
        """Whether the folder holds this very store."""
        return (self.folder / "store.json").exists() and Store(self.folder).info.get("fingerprint") == self._fingerprint

    def tell(self) -> None:
        if self._progress is not None:
            self._progress(min(self.text_filter.findings.done, self._total), self._total)

    def describe(self, writer: StoreWriter, **info: Any) -> None:
        findings, counts = self.text_filter.findings, writer.count()
        if not all(rows for rows, _ in counts.values()):
            told = "; ".join(findings.lines()) or "there was nothing in it"
            raise InputError(
                f"nothing is left of {', '.join(map(str, self.paths)):.200} to learn from: {told}; give other data"
            )
        rows = next(iter(counts.values()))[0]
        writer.info = {
            "rows": rows,
            "values": {name: values for name, (_, values) in counts.items()},
            **info,
            "read": dict(findings.read),
            "findings": findings.lines(),
            "fingerprint": self._fingerprint,
        }


class Labels:
    """Names met one by one; their order is known only at the end, unless it was given."""

    def __init__(self, given: Sequence[str] | None) -> None:
        self._given = given
        self._numbers = {name: number for number, name in enumerate(given or ())}
        self._met: list[int] = []

    def add(self, name: str, place: str) -> None:
        if self._given is not None and name not in self._numbers:
            raise InputError(
                f"{place} has the label {name!r}, which is none of the {len(self._given)} known; "
                + did_you_mean(name, self._given)
            )
        self._met.append(self._numbers.setdefault(name, len(self._numbers)))

    def settle(self) -> tuple[list[str], np.ndarray]:
        """All names in order, whole numbers by their value, and the place in it of each name met."""
        names = list(self._numbers)
        if self._given is None:
            numbers = all(name.isdecimal() for name in names)
            names.sort(key=lambda name: (int(name) if numbers else 0, name))
        if len(names) == 1:
            raise InputError(f"every label is {names[0]!r}; classes need at least 2, is it the right column?")
        place = {name: number for number, name in enumerate(names)}
        moved = np.array([place[name] for name in self._numbers], np.int32)
        return names, moved[np.array(self._met, np.int64)]


def _below(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.is_file())
    return [] if str(path).startswith("hf:") else [path]


def in_batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """As many items as make `AT_ONCE` characters."""
    held: list[T] = []
    total = 0
    for item in items:
        held.append(item)
        total += size(item)
        if total >= AT_ONCE:
            yield held
            held, total = [], 0
    if held:
        yield held
